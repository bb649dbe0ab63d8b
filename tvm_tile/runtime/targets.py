"""Names of targets -> TVM targets with the machine's real limits."""

from __future__ import annotations

import ctypes
import difflib
import functools

from .. import hardware
from ..errors import TileTargetError
from .tvm_setup import driver_available, prepare_tvm, thread_count

__all__ = ["ARCHITECTURES", "cpu_name", "gpu_arch", "host_target", "target", "target_label"]

# Architectures that kernels are compiled for; their limits are in tvm_tile.hardware.
ARCHITECTURES = ("sm_80", "sm_90")
NAMES = ("auto", "cuda", "llvm", *ARCHITECTURES)

_COMPUTE_MAJOR, _COMPUTE_MINOR, _SHARED_PER_BLOCK_OPTIN = 75, 76, 97  # CUdevice_attribute


@functools.lru_cache(maxsize=1)
def _device_facts() -> tuple[str, int] | None:
    """(``"sm_90"`` and the like, shared bytes a block may have) of the first GPU here; None without a GPU."""
    if not driver_available():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    values = []
    for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR, _SHARED_PER_BLOCK_OPTIN):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
        values.append(value.value)
    return f"sm_{values[0]}{values[1]}", values[2]


def gpu_arch() -> str | None:
    """``"sm_90"`` and the like of the first GPU here; None without a GPU."""
    facts = _device_facts()
    return None if facts is None else facts[0]


@functools.lru_cache(maxsize=1)
def _host_config() -> dict:
    tvm = prepare_tvm()
    config: dict = {"kind": "llvm", "num-cores": thread_count()}
    triple = tvm.get_global_func("tvm.codegen.llvm.GetProcessTriple", allow_missing=True)
    if triple is not None:
        config["mtriple"] = str(triple())
    cpu = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName", allow_missing=True)
    if cpu is not None:
        config["mcpu"] = str(cpu())
    on: set[str] = set()
    features = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    if features is not None:
        # The CPU's name alone is not enough: virtual machines report a model that lacks, or has, other features.
        found = {str(name): bool(value) for name, value in features().items()}
        config["mattr"] = sorted(("+" if value else "-") + name for name, value in found.items())
        on = {name for name, value in found.items() if value}
    if "mcpu" in config:
        config["mcpu"] = cpu_name(config["mcpu"], on)
    return config


# x86 models that LLVM does not recognise where a hypervisor hides the model number; newest first.
_MODELS = (
    ("graniterapids", {"amx-fp16", "amx-bf16", "avx512fp16"}),
    ("sapphirerapids", {"amx-bf16", "amx-int8", "avx512fp16"}),
)


def cpu_name(reported: str, features: set[str]) -> str:
    """LLVM's name of a CPU that has the features, where the reported name is of an older model.

    Parameters
    ----------
    reported : str
        The name that LLVM derives from the model number.
    features : set of str
        LLVM's names of what the CPU has.
    """
    names = [name for name, _ in _MODELS]
    for name, needed in _MODELS:
        if needed <= features and reported not in (*names, "diamondrapids"):
            return name
    return reported


def host_target():
    """The target of this machine's CPU: LLVM's name for it and exactly the features it reports."""
    return prepare_tvm().target.Target(_host_config())


def _cuda_target(name: str, shared: int | None = None):
    tvm = prepare_tvm()
    gpu = hardware.lookup(name)
    config = {
        "kind": "cuda",
        "arch": gpu.arch,
        "keys": ["cuda", "gpu"],
        "max_threads_per_block": gpu.threads_per_block,
        "max_shared_memory_per_block": gpu.shared_per_block if shared is None else min(shared, gpu.shared_per_block),
        "thread_warp_size": gpu.warp_size,
    }
    return tvm.target.Target(config, host={k: v for k, v in _host_config().items() if k in ("kind", "mtriple")})


def _gpu_here():
    """The target of the GPU here."""
    arch, shared = _device_facts()
    if arch in ARCHITECTURES:
        return _cuda_target(arch)
    if int(arch[3:]) < 80:
        raise TileTargetError(
            f"the GPU here is {arch}, older than sm_80, which is the oldest supported",
            advice="use target='llvm' to run on the CPU",
        )
    # sm_90a code runs on sm_90 only; the PTX of sm_80 runs on every later GPU, but some have less shared memory.
    return _cuda_target("sm_80", shared)


def target(name="auto"):
    """The TVM target of a name, with the machine's real limits.

    Parameters
    ----------
    name : str or tvm.target.Target
        ``"auto"`` (the GPU here, else this CPU), ``"llvm"`` (this CPU), ``"cuda"`` (the GPU here), ``"sm_80"``,
        ``"sm_90"``, or a TVM target. A CUDA target that declares 48 KB of shared memory (TVM's default) gets the
        real limit of its GPU, one that declares another size below that keeps it; the rest of a TVM target is kept.

    Returns
    -------
    tvm.target.Target
        For ``tvm_tile.compile`` and for ``tvm.compile(module, target, tir_pipeline="tvm_tile")``.

    Raises
    ------
    TileTargetError
        An unknown name, ``"cuda"`` on a machine without a GPU, or a kind of target that is not supported.

    Examples
    --------
    >>> str(tvm_tile.target("sm_90").attrs["arch"]), int(tvm_tile.target("sm_90").attrs["max_shared_memory_per_block"])
    ('sm_90a', 232448)
    """
    tvm = prepare_tvm()
    # Tile functions in a Relax module are built by the pipeline of this name.
    from . import pipeline  # noqa: F401

    if isinstance(name, tvm.target.Target):
        return _completed(name)
    if not isinstance(name, str):
        raise TileTargetError(f"a target is a name or a TVM Target, not {name!r}")
    if name == "auto":
        return _gpu_here() if gpu_arch() else host_target()
    if name in ("llvm", "cpu"):
        return host_target()
    if name == "cuda":
        if gpu_arch() is None:
            raise TileTargetError(
                "there is no CUDA GPU here to take the architecture from",
                advice="name the architecture to compile for: target='sm_80' or target='sm_90'",
            )
        return _gpu_here()
    plain = name.removesuffix("a")
    if plain in ARCHITECTURES:
        return _cuda_target(plain)
    close = difflib.get_close_matches(name, NAMES, 1)
    raise TileTargetError(
        f"unknown target {name!r}",
        advice=[f"did you mean {close[0]!r}?"] * len(close) + [f"the targets are {', '.join(NAMES)}, or a TVM Target"],
    )


def _completed(given):
    tvm = prepare_tvm()
    kind = given.kind.name
    if kind == "llvm":
        return given
    if kind != "cuda":
        raise TileTargetError(f"tile kernels compile for llvm and cuda, not for {kind!r}")
    arch = str(given.attrs.get("arch", "sm_50"))
    plain = arch.removesuffix("a")
    if plain not in ARCHITECTURES:
        raise TileTargetError(
            f"the target's architecture {arch} is not one of {', '.join(ARCHITECTURES)}",
            advice="give the Target one of them (sm_80 code runs on every later GPU), or use tvm_tile.target('auto')",
        )
    gpu = hardware.gpu_of_target(plain, int(given.attrs.get("max_shared_memory_per_block", 0)))
    config = dict(given.export())
    config.pop("tag", None)
    host = config.pop("host", None) or host_target()
    config.update(arch=gpu.arch, max_shared_memory_per_block=gpu.shared_per_block)
    config.setdefault("max_threads_per_block", gpu.threads_per_block)
    return tvm.target.Target(config, host=host)


def target_label(value) -> str:
    """Short name of a target for people: ``sm_90a``, ``llvm (rocketlake, 2 threads)``."""
    if value.kind.name == "cuda":
        return str(value.attrs["arch"])
    cpu = value.attrs.get("mcpu", None)
    return f"llvm ({cpu or 'generic'}, {thread_count()} threads)"
