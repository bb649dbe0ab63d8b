"""Machines: one description a class, looked up by name. Imports nothing of the package."""

from __future__ import annotations

from .base import CPU, GPU
from .cpu import this_cpu
from .occupancy import Occupancy, occupancy
from .sm_80 import SM_80
from .sm_90 import H100, H200, SM_90

__all__ = ["CPU", "GPU", "H100", "H200", "SM_80", "SM_90", "Occupancy", "lookup", "names", "occupancy", "this_cpu"]

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
