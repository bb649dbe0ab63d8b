"""Runs a parsed kernel by its serial meaning: through the tests' interpreter and through the reference lowering."""

from __future__ import annotations

import numpy as np
import tvm_ffi  # noqa: F401  (torch-free import order)
from tvm import tirx

import tvm_tile
from tvm_tile import ir

from .interpreter import Interpreter, numpy_dtype, poisoned

__all__ = ["check_ir", "out", "rand", "run"]


def rand(rng, shape, dtype="float32", low=-4, high=4) -> np.ndarray:
    """Random values: normal for floats, uniform integers in [low, high) else."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if "float" in dtype:
        return rng.standard_normal(shape).astype(numpy_dtype(dtype))
    return rng.integers(max(low, 0) if dtype.startswith("u") else low, high, shape).astype(dtype)


def out(shape, dtype="float32") -> np.ndarray:
    """A poisoned output array."""
    return poisoned(shape, dtype)


def check_ir(func: tirx.PrimFunc) -> None:
    """Every block reads back, and printing and parsing again gives the same function."""
    for kernel in ir.kernels_of(func):
        for op in ir.tile_ops(kernel.block.body):
            assert op.location is None or op.location.line > 0


def run(func: tirx.PrimFunc, *args):
    """Execute; arrays are changed in place. Returns the interpreter (for what was printed)."""
    check_ir(func)
    interpreter = Interpreter(func)
    interpreter(*args)
    return interpreter
