"""Runs a parsed kernel by the tests' own interpreter and through the reference lowering, and compares the two."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
from tvm import tirx

import tvm_tile
from tvm_tile import ir

from .interpreter import Interpreter, numpy_dtype, poisoned

__all__ = ["check_ir", "out", "rand", "run"]

# Relative tolerances between the two executions: functions such as exp2 differ in the last bits.
_TOLERANCE = {"float16": 2e-2, "bfloat16": 2e-2, "float32": 2e-5, "float64": 1e-12}


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


def same(a: np.ndarray, b: np.ndarray, what: str = "") -> None:
    """Equal up to the dtype's tolerance; NaN equals NaN."""
    rtol = _TOLERANCE.get(str(a.dtype), 0.13 if "float8" in str(a.dtype) else 0)
    left, right = (x.astype("float64") if "float" in str(a.dtype) else x for x in (a, b))
    np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol, equal_nan=True, err_msg=what)


def check_ir(func: tirx.PrimFunc) -> None:
    """Every block reads back with a source location, and names are unique."""
    names = []
    for kernel in ir.kernels_of(func):
        for op in ir.tile_ops(kernel.block.body):
            assert op.location is not None and op.location.line > 0, op.name
            names.append(op.name)
        names += [b.name for b in kernel.buffers]
    assert len(set(names)) == len(names), names


_compiled: set[str] = set()


def _first_of_its_test() -> bool:
    """Compiling takes half a second: without ``--all``, only the first case of a parametrised test compiles."""
    test = re.sub(r"\[.*| \(.*", "", os.environ.get("PYTEST_CURRENT_TEST", ""))
    fresh = test not in _compiled
    _compiled.add(test)
    return fresh or "--all" in sys.argv


def run(func: tirx.PrimFunc, *args, compiled: bool = True) -> Interpreter:
    """Execute; arrays are changed in place.

    ``compiled=False`` leaves the reference lowering out (kernels whose output goes to the terminal). Returns the
    interpreter, which knows what was printed.
    """
    check_ir(func)
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    interpreter = Interpreter(func)
    interpreter(*args)
    if compiled and _first_of_its_test():
        kernel = tvm_tile.compile(func, "llvm", lowering="reference")
        kernel(*copies)
        for n, (a, b) in enumerate(zip(args, copies, strict=True)):
            if isinstance(a, np.ndarray):
                same(b, a, f"argument {n} of the reference lowering beside the interpreter")
    return interpreter
