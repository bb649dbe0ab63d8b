"""Runs lowered CUDA kernels on the CPU, with checks: races, bounds, initialisation, barriers, asynchronous copies.

The kernel is the CUDA source that TVM generates, translated to C++ and compiled with GCC's memory instrumentation.
Every CUDA thread is a fiber, every access is checked against vector clocks; TMA, cp.async and wgmma are agents that
run as late as the waits allow. The host function is the real one.

>>> from tvm_tile.simulate import simulate_module  # doctest: +SKIP
>>> report = simulate_module(lowered, "sm_90a")(a, b, c)  # doctest: +SKIP
"""

from .errors import *  # noqa: F403
from .errors import __all__ as _errors
from .kernel import SimulatedKernel, simulate_module
from .report import SimulationReport

__all__ = ["SimulatedKernel", "SimulationReport", "simulate_module", *_errors]
