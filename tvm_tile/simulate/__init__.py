"""Runs lowered CUDA kernels on the CPU, with checks: races, bounds, initialisation, barriers, asynchronous copies.

The kernel is the CUDA source that TVM generates, translated to C++ and compiled with GCC's memory instrumentation.
Every CUDA thread is a fiber, every access is checked against vector clocks; TMA, cp.async and wgmma are agents that
run as late as the waits allow. The host function is the real one.

- `simulate(func, target)` takes a tile function; call the result like a compiled kernel.
- `simulate_module(module, target)` takes thread-level TIR.
"""

from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .kernel import SimulatedKernel, simulate_module
from .report import SimulationReport
from .tile import simulate

__all__ = ["SimulatedKernel", "SimulationReport", "simulate", "simulate_module", *_errors]
