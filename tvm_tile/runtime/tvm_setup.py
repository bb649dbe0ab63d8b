"""Makes the stock TVM wheel ready: version checks, and its CUDA runtime library on machines without a driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata as metadata
import os
import re
import subprocess
import tempfile
from pathlib import Path

from ..errors import ToolchainError
from .cache import cache_dir
from .toolchain import require_cc

__all__ = [
    "check_versions",
    "driver_available",
    "ensure_cuda_runtime",
    "library_folder",
    "load_runtime_libraries",
    "package_version",
    "prepare_tvm",
    "thread_count",
    "use_all_cores",
    "version_problems",
]

TVM_VERSION = "0.27.0.post1"
FFI_BELOW = (0, 1, 15)


def package_version(package: str) -> str | None:
    """Version of an installed package; None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_problems() -> list[str]:
    """What is wrong with the installed TVM packages; empty when they are the supported ones."""
    problems = []
    have = package_version("apache-tvm")
    if have != TVM_VERSION:
        problems.append(f"apache-tvm is {have or 'not installed'}, but tvm_tile is made for {TVM_VERSION}")
    ffi = package_version("apache-tvm-ffi")
    if ffi is None:
        problems.append("apache-tvm-ffi is not installed")
    elif tuple(int(n) for n in re.findall(r"\d+", ffi)[:3]) >= FFI_BELOW:
        problems.append(f"apache-tvm-ffi is {ffi}, but 0.1.15 and newer crash when TVM saves a PrimFunc as JSON")
    return problems


@functools.lru_cache(maxsize=1)
def check_versions() -> None:
    """Refuse TVM packages that are known not to work, before they crash."""
    if problems := version_problems():
        raise ToolchainError(
            "; ".join(problems),
            advice=f"pip install 'apache-tvm=={TVM_VERSION}' 'apache-tvm-ffi>=0.1.14.post0,<0.1.15'",
        )


def thread_count() -> int:
    """Threads of CPU kernels: ``$TVM_NUM_THREADS``, ``$OMP_NUM_THREADS``, else the cores this process may use."""
    for variable in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        asked = os.environ.get(variable, "")
        if asked.isdigit() and int(asked) > 0:
            return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_all_cores() -> None:
    """Size TVM's thread pool before it starts: on its own it halves the cores, taking each pair for hyperthreads."""
    os.environ.setdefault("TVM_NUM_THREADS", str(thread_count()))


@functools.lru_cache(maxsize=1)
def driver_available() -> bool:
    """Whether NVIDIA's driver library loads."""
    try:
        library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    # Our stand-in, which may be loaded already under this name, cannot start a GPU.
    return hasattr(library, "cuInit")


def library_folder() -> Path:
    """Folder of TVM's shared libraries, found without importing TVM."""
    import importlib.util

    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError("TVM is not installed", advice=f"pip install apache-tvm=={TVM_VERSION}")
    return Path(next(iter(spec.submodule_search_locations))) / "lib"


@functools.lru_cache(maxsize=1)
def load_runtime_libraries() -> None:
    """Load TVM's runtime without its compiler (no ``import tvm``): all that an exported CPU kernel needs."""
    import tvm_ffi  # noqa: F401  loads libtvm_ffi

    use_all_cores()
    ctypes.CDLL(str(library_folder() / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)


def _build_stub() -> Path:
    source = Path(__file__).with_name("libcuda_stub.c")
    folder = cache_dir() / "stub"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "libcuda.so.1"
    if path.exists():
        return path
    compiler = require_cc("exporting CUDA kernels on a machine without NVIDIA's driver")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = os.path.join(scratch, "libcuda.so.1")
        command = [compiler, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", output, str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise ToolchainError(f"building the driver's stand-in failed:\n{result.stderr.strip()[:1000]}")
        os.replace(output, path)
    return path


@functools.lru_cache(maxsize=1)
def ensure_cuda_runtime() -> None:
    """Load TVM's CUDA runtime library, over a stand-in for the driver where there is none.

    Without it TVM silently embeds CUDA source instead of cubins.

    Raises
    ------
    ToolchainError
        No driver, and no C compiler to build the stand-in with.
    """
    import tvm_ffi

    if tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None:
        return
    if not driver_available():
        ctypes.CDLL(str(_build_stub()), mode=ctypes.RTLD_GLOBAL)
    load_runtime_libraries()
    library = library_folder() / "libtvm_runtime_cuda.so"
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ToolchainError(
            f"TVM's CUDA runtime library does not load: {error}", advice="run tvm-tile doctor for what is missing"
        ) from None


def prepare_tvm():
    """Import TVM, after checking that it is a version that works; returns the module."""
    check_versions()
    use_all_cores()
    import tvm

    return tvm
