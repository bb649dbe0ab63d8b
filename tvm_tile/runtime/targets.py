"""Names of targets -> TVM targets with the machine's real limits."""

from __future__ import annotations

import ctypes
import difflib
import functools

from ..errors import TileTargetError
from .tvm_setup import driver_available, prepare_tvm, thread_count

__all__ = ["NVIDIA", "gpu_arch", "host_target", "target", "target_label"]

# Architecture -> (TVM's arch string, shared bytes a block may have). The "a" suffix gives wgmma and TMA's full set.
NVIDIA = {
    "sm_80": ("sm_80", 163 * 1024),
    "sm_86": ("sm_86", 99 * 1024),
    "sm_89": ("sm_89", 99 * 1024),
    "sm_90": ("sm_90a", 227 * 1024),
}
NAMES = ("auto", "cuda", "llvm", *NVIDIA)


@functools.lru_cache(maxsize=1)
def gpu_arch() -> str | None:
    """``"sm_90"`` and the like of the first GPU here; None without a GPU."""
    if not driver_available():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device) != 0:
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device) != 0:
        return None
    return f"sm_{major.value}{minor.value}"


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
    features = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures", allow_missing=True)
    if features is not None:
        # The CPU's name alone is not enough: virtual machines report a model that lacks, or has, other features.
        config["mattr"] = sorted(("+" if bool(on) else "-") + str(name) for name, on in features().items())
    return config


def host_target():
    """The target of this machine's CPU: LLVM's name for it and exactly the features it reports."""
    return prepare_tvm().target.Target(_host_config())


def _cuda_target(name: str):
    tvm = prepare_tvm()
    arch, shared = NVIDIA[name]
    config = {
        "kind": "cuda",
        "arch": arch,
        "keys": ["cuda", "gpu"],
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": shared,
        "thread_warp_size": 32,
    }
    return tvm.target.Target(config, host={k: v for k, v in _host_config().items() if k in ("kind", "mtriple")})


def _nearest(arch: str) -> str:
    """The description to use on a GPU that has none of its own: the newest that is not newer than it."""
    number = int("".join(c for c in arch if c.isdigit()))
    known = [n for n in NVIDIA if int(n[3:]) <= number]
    if not known:
        raise TileTargetError(
            f"the GPU here is {arch}, older than {min(NVIDIA)}, which is the oldest supported",
            advice="use target='llvm' to run on the CPU",
        )
    # sm_90a code runs on sm_90 only; the newest architecture whose PTX every later GPU accepts is the plain one.
    return arch if arch in NVIDIA else [n for n in known if not NVIDIA[n][0].endswith("a")][-1]


def target(name="auto"):
    """The TVM target of a name, with the machine's real limits.

    Parameters
    ----------
    name : str or tvm.target.Target
        ``"auto"`` (the GPU here, else this CPU), ``"llvm"`` (this CPU), ``"cuda"`` (the GPU here), ``"sm_80"``,
        ``"sm_90"``, or a TVM target. A CUDA target that declares less shared memory than its GPU has gets the real
        limit; anything else of a TVM target is kept.

    Returns
    -------
    tvm.target.Target
        For ``tvm_tile.compile`` and for ``tvm.compile(module, target, tir_pipeline="tvm_tile")``.

    Raises
    ------
    TileTargetError
        An unknown name, ``"cuda"`` on a machine without a GPU, or a kind of target that is not supported.
    """
    tvm = prepare_tvm()
    # Tile functions in a Relax module are built by the pipeline of this name.
    from . import pipeline  # noqa: F401

    if isinstance(name, tvm.target.Target):
        return _completed(name)
    if not isinstance(name, str):
        raise TileTargetError(f"a target is a name or a TVM Target, not {name!r}")
    if name == "auto":
        return target(_nearest(gpu_arch())) if gpu_arch() else host_target()
    if name in ("llvm", "cpu"):
        return host_target()
    if name == "cuda":
        if gpu_arch() is None:
            raise TileTargetError(
                "there is no CUDA GPU here to take the architecture from",
                advice="name the architecture to compile for: target='sm_80' or target='sm_90'",
            )
        return _cuda_target(_nearest(gpu_arch()))
    plain = name.removesuffix("a")
    if plain in NVIDIA:
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
    if plain not in NVIDIA:
        raise TileTargetError(
            f"the target's architecture {arch} is not one of {', '.join(NVIDIA)}",
            advice="use tvm_tile.target('sm_90'), or give the Target one of these architectures",
        )
    real_arch, shared = NVIDIA[plain]
    config = dict(given.export())
    config.pop("tag", None)
    declared = int(given.attrs.get("max_shared_memory_per_block", 0))
    host = config.pop("host", None) or host_target()
    config.update(arch=real_arch, max_shared_memory_per_block=max(shared, declared))
    config.setdefault("max_threads_per_block", 1024)
    return tvm.target.Target(config, host=host)


def target_label(value) -> str:
    """Short name of a target for people: ``sm_90a``, ``llvm (rocketlake, 2 threads)``."""
    if value.kind.name == "cuda":
        return str(value.attrs["arch"])
    cpu = value.attrs.get("mcpu", None)
    return f"llvm ({cpu or 'generic'}, {thread_count()} threads)"
