"""The language's own tests on CUDA: what a kernel means does not depend on the machine.

Their kernels, inputs and expectations are those of ``tests/language``; ``run`` is another one. By default the simulator
takes the first case of each test as sm_80 code, and the products as sm_90 code too.
"""

from __future__ import annotations

import inspect
import re
import types

import numpy as np
import pytest

from tests.language import test_bounds, test_copy, test_gemm, test_kernels, test_reduce, test_values
from tvm_tile.errors import TileError

from . import harness

_MODULES = (test_bounds, test_copy, test_gemm, test_kernels, test_reduce, test_values)
_LEFT_OUT = {
    "test_print_and_assert": "compares with what the language's interpreter prints; test_debug has its own",
    "test_assume_is_checked_at_the_call": "compiles for a CPU itself; test_runtime has its own",
    "test_strided_tensors": "compiles for a CPU itself",
    "test_atomics": "its CTAs read what others update; test_memory has its own",
}
# What CUDA targets refuse: test -> what the message must say.
_REFUSED = {
    "test_dtypes_and_transposes": r"sm_80 has no tensor-core product float8|K = 24 is no multiple of 32, the k of",
    "test_manual_order_and_stage": r"n is assigned in a loop with order= or stage=",
}


def _runs_a_kernel(function) -> bool:
    return (
        isinstance(function, types.FunctionType)
        and function.__name__.startswith("test_")
        and function.__name__ not in _LEFT_OUT
        and "run" in function.__code__.co_names
    )


for _module in _MODULES:
    for _name, _function in list(vars(_module).items()):
        if _runs_a_kernel(_function):
            assert _name not in globals(), f"two tests are called {_name}"
            globals()[_name] = _function


@pytest.fixture(autouse=True)
def _on_the_device(request, device, monkeypatch):
    """``run`` of the language's tests compiles for the device instead."""
    refused = _REFUSED.get(request.node.originalname)

    def run(func, *args, compiled=True):
        given = [harness.from_numpy(a) if isinstance(a, np.ndarray) else a for a in args]
        try:
            kernel = device.compile(func)
        except TileError as error:
            if refused is None or re.search(refused, str(error)) is None:
                raise
            pytest.skip(f"refused, as it has to be: {error.args[0].splitlines()[0]}")
        outcomes = kernel.runs(given)
        for outcome in outcomes[1:]:
            same = [harness.same_bits(a, b) for a, b in zip(outcomes[0].args, outcome.args, strict=True)]
            assert all(same) or _order_matters(func), "two runs gave different results"
        for array, result in zip(args, outcomes[0].args, strict=True):
            if isinstance(array, np.ndarray):
                array[...] = harness.to_numpy(result, array.dtype)

    for module in _MODULES:
        monkeypatch.setattr(module, "run", run)


def _order_matters(func) -> bool:
    """Whether the order in which threads run may change a result: atomics on floats, or their previous values."""
    return "tile_atomic" in func.script()


def test_every_test_that_runs_kernels_is_here():
    for module in _MODULES:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and "run" in function.__code__.co_names:
                assert name in globals() or name in _LEFT_OUT
