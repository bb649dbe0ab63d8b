"""``tvm-tile doctor``: what this machine has, and what to install."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass

from . import common


@dataclass
class Finding:
    """One line of the report; ``status`` is ok, missing (needed) or absent (only needed for what ``need`` says)."""

    name: str
    status: str
    detail: str
    need: str = ""


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("doctor", help="say what this machine has and what to install")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def findings() -> list[Finding]:
    """Every check, in the order of the report."""
    return [
        _python(),
        *_tvm(),
        _package("torch", "pip install torch (ops' inputs and references: run, bench and the tests)"),
        *[_package(name, f"pip install {name} (tuning)") for name in ("xgboost", "psutil", "cloudpickle")],
        _package("ml_dtypes", "pip install ml_dtypes (bfloat16 and float8 NumPy arrays)"),
        _compiler(),
        _nvcc(),
        _cuobjdump(),
        *_gpu(),
        _cpu(),
        _cache(),
    ]


def _python() -> Finding:
    version = sys.version.split()[0]
    good = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return Finding("Python", "ok" if good else "missing", version, "" if good else "use Python 3.10 to 3.13")


def _package(name: str, need: str) -> Finding:
    from ..runtime.tvm_setup import package_version

    version = package_version(name)
    return Finding(name, "ok", version) if version else Finding(name, "absent", "not installed", need)


def _tvm() -> list[Finding]:
    from ..runtime.tvm_setup import FFI_BELOW, TVM_VERSION, package_version, version_problems

    problems = version_problems()
    result = []
    for name in ("apache-tvm", "apache-tvm-ffi"):
        wrong = next((p for p in problems if p.startswith(f"{name} ")), None)
        advice = f"pip install 'apache-tvm=={TVM_VERSION}' 'apache-tvm-ffi<{'.'.join(map(str, FFI_BELOW))}'"
        version = package_version(name) or "not installed"
        result.append(Finding(name, "missing" if wrong else "ok", wrong or version, advice if wrong else ""))
    return result


def _compiler() -> Finding:
    from ..runtime.toolchain import find_cc

    path = find_cc()
    need = "apt install g++ (export, the disk cache and the simulator)"
    return Finding("C compiler", "ok", path) if path else Finding("C compiler", "absent", "none on PATH", need)


def _nvcc() -> Finding:
    from ..runtime.toolchain import find_nvcc

    found = find_nvcc()
    if found:
        return Finding("nvcc", "ok", f"{found.version} ({found.path})")
    need = "the CUDA toolkit, or: pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl (CUDA kernels)"
    return Finding("nvcc", "absent", "neither on PATH, in CUDA_HOME or CUDA_PATH, nor a wheel", need)


def _cuobjdump() -> Finding:
    from ..runtime.toolchain import find_cuobjdump

    path = find_cuobjdump()
    if path:
        return Finding("cuobjdump", "ok", path)
    return Finding(
        "cuobjdump", "absent", "not found", "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm (kernel.sass)"
    )


def _gpu() -> list[Finding]:
    from ..runtime.targets import ARCHITECTURES, gpu_arch
    from ..runtime.tvm_setup import driver_available

    if not driver_available():
        return [Finding("NVIDIA driver", "absent", "libcuda.so.1 does not load", "only needed to run kernels on a GPU")]
    arch = gpu_arch()
    result = [Finding("NVIDIA driver", "ok", "libcuda.so.1 loads")]
    if arch is None:
        return [*result, Finding("GPU", "absent", "the driver sees no GPU", "check nvidia-smi")]
    native = "" if arch in ARCHITECTURES else ", runs sm_80 code"
    result.append(Finding("GPU", "ok", arch + native))
    if "torch" in sys.modules or common.importable("torch"):
        import torch

        built = torch.version.cuda
        if not torch.cuda.is_available():
            need = "a torch build with CUDA: pip install torch"
            result.append(Finding("torch on the GPU", "absent", f"this torch is built for {built or 'the CPU'}", need))
        else:
            result.append(Finding("torch on the GPU", "ok", f"CUDA {built}, {torch.cuda.get_device_name()}"))
    return result


def _cpu() -> Finding:
    from ..hardware import lookup
    from ..lower.cpu.amx import amx_available
    from ..runtime.tvm_setup import thread_count

    cpu = lookup("cpu")
    facts = [platform.machine(), f"{os.cpu_count()} cores", f"{thread_count()} kernel threads"]
    facts.append(f"{cpu.vector_bits}-bit vectors")
    amx = [dtype for dtype in ("bfloat16", "int8") if amx_available(dtype)]
    facts.append(f"AMX for {' and '.join(amx)}" if amx else "no AMX")
    return Finding("CPU", "ok", ", ".join(facts))


def _cache() -> Finding:
    from ..runtime import cache

    folder = cache.cache_dir()
    probe = folder
    while not probe.exists():
        probe = probe.parent
    if not os.access(probe, os.W_OK):
        return Finding("kernel cache", "missing", f"{folder} cannot be written", "set TVM_TILE_CACHE_DIR")
    info = cache.info()
    return Finding("kernel cache", "ok", f"{info.folder}: {info.entries} kernels, {info.bytes / 1e6:.1f} MB")


def execute(arguments) -> int:
    """Print the report; 1 when something that every kernel needs is missing."""
    report = findings()
    width = max(len(f.name) for f in report)
    marks = {"ok": "ok", "missing": "MISSING", "absent": "-"}
    lines = []
    for finding in report:
        line = f"{marks[finding.status]:<8} {finding.name:<{width}}  {finding.detail}"
        lines.append(line)
        if finding.need:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.need}")
    broken = any(f.status == "missing" for f in report)
    common.emit(arguments, {"ok": not broken, "findings": [asdict(f) for f in report]}, lines)
    return 1 if broken else 0
