"""The compilers of this machine: nvcc and the C compiler; how CUDA source becomes code, and what ptxas said of it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InternalError, ToolchainError

__all__ = [
    "CompiledCuda",
    "Nvcc",
    "PtxasKernel",
    "collect",
    "compile_cuda",
    "find_cc",
    "find_cuobjdump",
    "find_nvcc",
    "install_callback",
    "link_shared",
    "parse_ptxas",
    "require_cc",
    "require_nvcc",
    "to_ptx",
    "to_sass",
]

# Keys that mark a device target as ours: tile kernels, and the plain PrimFuncs that are built beside them.
TILE_KEY = "tvm_tile"
PLAIN_KEY = "tvm_tile_plain"

_COMMON_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-diag-suppress=177,550,1046", "-Xptxas", "-v")
DISASSEMBLERS = (
    "install the CUDA toolkit's binary utilities, or: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
)
_TILE_FLAGS = ("--use_fast_math",)


@dataclass(frozen=True)
class Nvcc:
    """An nvcc: its path, version and the include folders it needs besides its own."""

    path: str
    version: str
    includes: tuple[str, ...] = ()


def find_cc() -> str | None:
    """Path of the C or C++ compiler that links libraries: ``$CXX``, ``$CC``, else the first of the usual names."""
    for name in (os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang++", "clang", "c++", "cc"):
        if name and (path := shutil.which(name)):
            return path
    return None


def require_cc(purpose: str) -> str:
    """:func:`find_cc`, or a :class:`ToolchainError` that says what needs it."""
    path = find_cc()
    if path is None:
        raise ToolchainError(
            f"{purpose} needs a C compiler, and there is none on PATH",
            advice="install gcc (Debian: apt install g++), or set CXX to a compiler",
        )
    return path


def _nvcc_candidates():
    for variable in ("TVM_TILE_NVCC",):
        if os.environ.get(variable):
            yield os.environ[variable], ()
    if found := shutil.which("nvcc"):
        yield found, ()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield os.path.join(os.environ[variable], "bin", "nvcc"), ()
    yield "/usr/local/cuda/bin/nvcc", ()
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        # The wheels split the toolkit over folders: the compiler in one, headers in others.
        includes = tuple(str(p) for p in sorted(Path(root).glob("*/include")))
        for path in sorted(Path(root).glob("*/bin/nvcc"), reverse=True):
            yield str(path), includes


@functools.lru_cache(maxsize=8)
def _probe_nvcc(path: str, includes: tuple[str, ...]) -> Nvcc | None:
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"release [\d.]+, V([\d.]+)", result.stdout)
    return Nvcc(path, version.group(1), includes) if result.returncode == 0 and version else None


def find_nvcc() -> Nvcc | None:
    """The nvcc of ``$TVM_TILE_NVCC``, PATH, ``$CUDA_HOME``, ``$CUDA_PATH`` or the PyPI wheel; None if there is none."""
    for path, includes in _nvcc_candidates():
        if os.access(path, os.X_OK) and (found := _probe_nvcc(path, includes)):
            return found
    return None


def require_nvcc() -> Nvcc:
    """:func:`find_nvcc`, or a :class:`ToolchainError` that says what to install."""
    found = find_nvcc()
    if found is None:
        raise ToolchainError(
            "compiling for CUDA needs nvcc, which is not on PATH, in CUDA_HOME or CUDA_PATH, nor a wheel",
            advice="install the CUDA toolkit (12.4 or newer), or: pip install nvidia-cuda-nvcc nvidia-cuda-runtime "
            "nvidia-cuda-cccl",
        )
    return found


@dataclass(frozen=True)
class PtxasKernel:
    """What ``ptxas -v`` reported of one kernel; sizes in bytes."""

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int


@dataclass
class CompiledCuda:
    """Result of one nvcc run."""

    source: str
    binary: bytes
    arch: str
    log: str
    seconds: float
    kernels: list[PtxasKernel] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def parse_ptxas(log: str) -> tuple[list[PtxasKernel], list[str]]:
    """Kernels and warnings (performance losses such as C7508, compiler warnings) in the output of ``ptxas -v``."""
    kernels: list[PtxasKernel] = []
    warnings: list[str] = []
    name, frame = None, (0, 0, 0)
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '([^']+)'", line):
            name, frame = match.group(1), (0, 0, 0)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = tuple(map(int, match.groups()))
        elif match := re.search(r"Used (\d+) registers", line):
            if name is None:
                continue
            shared = re.search(r"(\d+)(?:\+\d+)? bytes smem", line)
            static = int(shared.group(1)) if shared else 0
            kernels.append(PtxasKernel(name, int(match.group(1)), frame[1], frame[2], frame[0], static))
            name = None
        elif re.search(r"\(C7\d{3}\)|\bwarning\b|Potential Performance Loss", line):
            text = re.sub(r"^ptxas\s+(info|warning)\s*:\s*", "", line.strip())
            if text not in warnings:
                warnings.append(text)
    return kernels, warnings


def gencode(arch: str) -> list[str]:
    """nvcc's flags for ``sm_90a`` and the like; plain architectures also get PTX, so that newer GPUs run them."""
    number = arch.removeprefix("sm_")
    if number.endswith(("a", "f")):
        return ["-gencode", f"arch=compute_{number},code=sm_{number}"]
    return ["-gencode", f"arch=compute_{number},code=[sm_{number},compute_{number}]"]


def _run_nvcc(source: str, output: str, flags: list[str]) -> tuple[bytes, str]:
    nvcc = require_nvcc()
    with tempfile.TemporaryDirectory(prefix="tvm_tile_nvcc_") as folder:
        source_path = os.path.join(folder, "kernel.cu")
        output_path = os.path.join(folder, output)
        Path(source_path).write_text(source)
        command = [nvcc.path, *flags, *(f"-I{i}" for i in nvcc.includes), "-o", output_path, source_path]
        result = subprocess.run(command, capture_output=True, text=True)
        log = result.stdout + result.stderr
        if result.returncode != 0:
            keep = os.path.join(tempfile.gettempdir(), f"tvm_tile_failed_{os.getpid()}.cu")
            Path(keep).write_text(source)
            errors = "\n".join(line for line in log.splitlines() if "error" in line.lower()) or log
            if re.search(r"Unsupported gpu architecture|is not defined for option 'gpu-architecture'", log):
                raise ToolchainError(
                    f"nvcc {nvcc.version} does not know the architecture: {errors.strip()[:500]}",
                    advice="install a CUDA toolkit that supports this GPU",
                )
            raise InternalError(f"nvcc refused generated code (kept in {keep}):\n{errors.strip()[:4000]}")
        return Path(output_path).read_bytes(), log


def compile_cuda(source: str, arch: str, *, fast_math: bool = True) -> CompiledCuda:
    """Compile CUDA source with nvcc.

    Parameters
    ----------
    source : str
        CUDA C++ as TVM generates it.
    arch : str
        ``"sm_90a"`` and the like.
    fast_math : bool
        Approximate division and transcendental functions, denormals flushed.

    Raises
    ------
    ToolchainError
        No nvcc, or one that does not know the architecture.
    InternalError
        The source does not compile: it is generated, so that is no mistake of the user.
    """
    start = time.perf_counter()
    flags = ["-fatbin", *_COMMON_FLAGS, *(_TILE_FLAGS if fast_math else ()), *gencode(arch)]
    binary, log = _run_nvcc(source, "kernel.fatbin", flags)
    kernels, warnings = parse_ptxas(log)
    return CompiledCuda(source, binary, arch, log, time.perf_counter() - start, kernels, warnings)


def to_ptx(source: str, arch: str) -> str:
    """The PTX that nvcc makes of the source."""
    number = arch.removeprefix("sm_")
    flags = ["-ptx", *(f for f in _COMMON_FLAGS if f not in ("-Xptxas", "-v")), *_TILE_FLAGS, f"-arch=compute_{number}"]
    return _run_nvcc(source, "kernel.ptx", flags)[0].decode()


def find_cuobjdump() -> str | None:
    """cuobjdump of ``$TVM_TILE_CUOBJDUMP``, PATH, the folder of nvcc or the PyPI wheel; None if there is none."""
    nvcc = find_nvcc()
    places = [os.environ.get("TVM_TILE_CUOBJDUMP"), shutil.which("cuobjdump")]
    if nvcc is not None:
        places.append(os.path.join(os.path.dirname(os.path.realpath(nvcc.path)), "cuobjdump"))
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec and spec.submodule_search_locations else ():
        places += [str(p) for p in Path(root).glob("*/bin/cuobjdump")]
    return next((p for p in places if p and os.access(p, os.X_OK)), None)


def to_sass(binary: bytes) -> str:
    """Disassembly of a fatbin by cuobjdump."""
    tool = find_cuobjdump()
    if tool is None:
        raise ToolchainError(
            "disassembly needs cuobjdump, which is neither on PATH nor beside nvcc",
            advice=DISASSEMBLERS,
        )
    with tempfile.TemporaryDirectory(prefix="tvm_tile_sass_") as folder:
        path = os.path.join(folder, "kernel.fatbin")
        Path(path).write_bytes(binary)
        # cuobjdump looks for nvdisasm on PATH; the wheels put both into one folder.
        environment = {**os.environ, "PATH": f"{os.path.dirname(tool)}{os.pathsep}{os.environ.get('PATH', '')}"}
        command = [tool, "-sass", path]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    if result.returncode != 0:
        raise ToolchainError(f"cuobjdump failed: {result.stderr.strip()[:500]}", advice=DISASSEMBLERS)
    return result.stdout


def link_shared(output: str, objects: list[str]) -> None:
    """Link object (and assembly) files into a shared library."""
    command = [require_cc("linking a kernel's library"), "-shared", "-fPIC", "-o", output, *objects, "-lm"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise ToolchainError(f"linking failed ({' '.join(command)}):\n{(result.stdout + result.stderr).strip()[:2000]}")


_local = threading.local()


@contextmanager
def collect():
    """A list that receives a :class:`CompiledCuda` for each CUDA module this thread builds inside the ``with``."""
    previous = getattr(_local, "collected", None)
    _local.collected = collected = []
    _local.error = None
    try:
        yield collected
    except Exception:
        error, _local.error = _local.error, None
        if error is not None:
            raise error from None
        raise
    finally:
        _local.collected = previous


@functools.lru_cache(maxsize=1)
def install_callback() -> None:
    """Make TVM compile our CUDA modules here; every other module goes to the callback that was there before."""
    import tvm
    import tvm_ffi

    stock_compile = tvm.get_global_func("tvm_callback_cuda_compile", allow_missing=True)
    stock_build = tvm.get_global_func("target.build.cuda")

    def build_cuda(mod, target):
        # The callback is given the source alone; this is where its target is still known.
        previous = getattr(_local, "target", None)
        _local.target = target
        try:
            return stock_build(mod, target)
        finally:
            _local.target = previous

    def tvm_callback_cuda_compile(code: str) -> bytes:
        target = getattr(_local, "target", None)
        keys = () if target is None else tuple(map(str, target.keys))
        if TILE_KEY not in keys and PLAIN_KEY not in keys:
            if stock_compile is None:
                raise ToolchainError("TVM has no CUDA compile callback of its own")
            return stock_compile(code)
        try:
            compiled = compile_cuda(code, str(target.attrs["arch"]), fast_math=TILE_KEY in keys)
        except Exception as error:
            # TVM's C++ would turn it into a RuntimeError; collect() raises it as it is.
            _local.error = error
            raise
        collected = getattr(_local, "collected", None)
        if collected is not None:
            collected.append(compiled)
        return compiled.binary

    tvm_ffi.register_global_func("target.build.cuda", build_cuda, override=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", tvm_callback_cuda_compile, override=True)
