"""Compiles the simulator's runtime and translated kernels with g++, cached by content.

The cache lies in ``TVM_TILE_CACHE_DIR`` (default: the user's cache folder), under ``simulate``. Files appear there by
rename only, so an interrupted or concurrent build leaves nothing half-written.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tvm_tile.errors import InternalError, ToolchainError

from ..runtime import cache
from .errors import UnsupportedInstructionError

_HERE = Path(__file__).resolve().parent
_RUNTIME = ("machine", "shadow", "sync", "tensor", "async", "counters", "memory", "segments")
_COMMON = ["-std=c++17", "-fPIC", "-fno-omit-frame-pointer", "-fno-strict-aliasing", "-w"]
_KERNEL_FLAGS = [
    *_COMMON,
    "-O1",
    "-g1",
    "-fsanitize=thread",
    "-fno-tree-sra",  # keep a vector access one access
    "-fno-optimize-sibling-calls",
    "-fno-ipa-sra",
    "-fstack-reuse=none",
    "-fvisibility=hidden",
    "-ffp-contract=off",
]


def cache_dir() -> Path:
    """Folder of the simulator's build cache."""
    path = cache.cache_dir() / "simulate"
    path.mkdir(parents=True, exist_ok=True)
    return path


def compiler() -> str:
    """Path of the C++ compiler: ``$TVM_TILE_SIMULATE_CXX`` or g++.

    Raises
    ------
    ToolchainError
        Where there is no g++; the simulator relies on GCC's memory instrumentation.
    """
    cxx = os.environ.get("TVM_TILE_SIMULATE_CXX", "g++")
    path = shutil.which(cxx)
    if path is None:
        raise ToolchainError(
            f"the kernel simulator compiles with g++, and `{cxx}` was not found on PATH: install g++ (GCC 9 or newer)"
        )
    return path


@functools.cache
def _version(cxx: str) -> str:
    return subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60).stdout.splitlines()[0]


def _run(cmd: list[str], what: str) -> None:
    env = dict(os.environ, LC_ALL="C")
    p = subprocess.run(cmd, capture_output=True, text=True, timeout=600, env=env)
    if p.returncode:
        raise InternalError(f"{what} failed:\n{p.stderr[-4000:]}")


@functools.cache
def _sources_digest() -> str:
    h = hashlib.sha256()
    for f in sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cc")]):
        h.update(f.name.encode())
        h.update(f.read_bytes())
    h.update(repr((_COMMON, _KERNEL_FLAGS)).encode())
    return h.hexdigest()


def _digest(*parts: str) -> str:
    h = hashlib.sha256()
    for p in parts:
        h.update(p.encode())
        h.update(b"\0")
    return h.hexdigest()[:24]


def runtime_library() -> tuple[Path, Path]:
    """(shared library, folder with the precompiled kernel header); built on first use."""
    cxx = compiler()
    key = _digest(_sources_digest(), cxx, _version(cxx))
    home = cache_dir() / f"runtime-{key}"
    lib = home / "libtvm_tile_sim.so"
    if lib.exists():
        return lib, home
    tmp = Path(tempfile.mkdtemp(dir=cache_dir(), prefix="tmp-"))
    try:
        for f in _HERE.glob("*.h"):
            shutil.copy(f, tmp)

        def one(name):
            opt = "-O3" if name == "tensor" else "-O2"
            _run(
                [cxx, *_COMMON, opt, "-c", str(_HERE / f"{name}.cc"), "-o", str(tmp / f"{name}.o")],
                f"building {name}.cc",
            )

        def header(_):
            _run(
                [cxx, *_KERNEL_FLAGS, "-x", "c++-header", str(tmp / "device.h"), "-o", str(tmp / "device.h.gch")],
                "precompiling device.h",
            )

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(one, n) for n in _RUNTIME] + [pool.submit(header, None)]
            for j in jobs:
                j.result()
        _run(
            [cxx, "-shared", "-o", str(tmp / lib.name), *[str(tmp / f"{n}.o") for n in _RUNTIME]],
            "linking the simulator",
        )
        for n in _RUNTIME:
            (tmp / f"{n}.o").unlink()
        try:
            os.replace(tmp, home)
        except OSError:  # another process was first
            if not lib.exists():
                raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return lib, home


@functools.cache
def runtime() -> ctypes.CDLL:
    """The loaded runtime with its functions typed."""
    lib, _ = runtime_library()
    dll = ctypes.CDLL(str(lib), mode=ctypes.RTLD_GLOBAL)
    dll.tsim_begin.argtypes = [
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_uint32,
        ctypes.c_double,
    ]
    dll.tsim_add_segment.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int, ctypes.c_char_p]
    dll.tsim_reserve.argtypes, dll.tsim_reserve.restype = [ctypes.c_uint64], ctypes.c_void_p
    dll.tsim_release.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    dll.tsim_fault.restype = ctypes.c_char_p
    dll.tsim_output.restype = ctypes.c_char_p
    dll.tsim_kinds.restype = ctypes.c_char_p
    dll.tsim_counters.restype = ctypes.POINTER(ctypes.c_uint64)
    return dll


def kernel_library(code: str) -> Path:
    """Compile one translated CUDA source (from :func:`~tvm_tile.simulate.translate.translate`) to a shared library."""
    cxx = compiler()
    lib, home = runtime_library()
    key = _digest(_sources_digest(), _version(cxx), str(lib), code)
    out = cache_dir() / f"kernel-{key}.so"
    if out.exists():
        return out
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="tmp-") as tmp:
        src, obj, so = (str(Path(tmp) / n) for n in ("kernel.cc", "kernel.o", "kernel.so"))
        Path(src).write_text(code)
        p = subprocess.run(
            [cxx, *_KERNEL_FLAGS, "-I", str(home), "-c", src, "-o", obj],
            capture_output=True,
            text=True,
            timeout=900,
            env=dict(os.environ, LC_ALL="C"),
        )
        if p.returncode:
            errors = [line for line in p.stderr.splitlines() if "error:" in line][:8]
            raise UnsupportedInstructionError(
                "the simulator cannot compile the CUDA source:\n  " + "\n  ".join(errors or p.stderr.splitlines()[:8])
            )
        _run([cxx, "-shared", "-o", so, obj, str(lib)], "linking a kernel")
        os.replace(so, out)
    return out
