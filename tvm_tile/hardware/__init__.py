"""Machines: one description a class, looked up by name. Imports nothing of the package."""

from __future__ import annotations

from dataclasses import replace

from .base import CPU, GPU
from .cpu import this_cpu
from .occupancy import Occupancy, occupancy
from .sm_80 import SM_80
from .sm_90 import H100, H200, SM_90

__all__ = [
    "CPU",
    "GPU",
    "H100",
    "H200",
    "SM_80",
    "SM_90",
    "Occupancy",
    "gpu_of_target",
    "lookup",
    "names",
    "occupancy",
    "this_cpu",
]

_GPUS = {
    "sm_80": SM_80, "a100": SM_80,
    "sm_90": SM_90, "sm_90a": SM_90, "h100": H100, "h200": H200,
}
_CPU_NAMES = ("cpu", "llvm")


def names() -> tuple[str, ...]:
    """Names that `lookup` knows."""
    return (*_GPUS, *_CPU_NAMES)


def lookup(name: str) -> GPU | CPU:
    """Description of a machine by name (``sm_80``, ``sm_90``, ``h100``, ``h200``, ``cpu``, ...), any case.

    Raises
    ------
    KeyError
        Naming what is known. A newer GPU is not mapped to an older class here: that is the caller's decision.
    """
    key = name.lower()
    if key in _GPUS:
        return _GPUS[key]
    if key in _CPU_NAMES:
        return this_cpu()
    raise KeyError(f"no description of {name!r}; known are {', '.join(names())}")


#: What TVM's targets declare where nobody looked: the limit of statically allocated shared memory, on every GPU.
_STATIC_SHARED = 48 * 1024


def gpu_of_target(arch: str, shared: int = 0) -> GPU:
    """Description of the GPU that a target names, within the shared memory that the target declares.

    Parameters
    ----------
    arch : str
        ``sm_80``, ``sm_90a``, ...
    shared : int
        The target's ``max_shared_memory_per_block`` in bytes; 0 and 48 KB (TVM's default, which says nothing of the
        GPU) leave the description as it is.

    Raises
    ------
    KeyError
        As :func:`lookup`.
    """
    gpu = lookup(arch)
    if shared in (0, _STATIC_SHARED) or shared >= gpu.shared_per_block:
        return gpu
    return replace(gpu, shared_per_block=shared)
