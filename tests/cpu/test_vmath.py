"""Vector mathematics against float64, over the whole range of float32 and at the special values."""

import math

import numpy as np
import pytest

from tvm_tile.lower.cpu import vmath

from .harness import map_function

COUNT = 1 << 16
INF, NAN = np.inf, np.nan


def _erf(x):
    return np.vectorize(math.erf)(x)


CASES = {  # function: (reference in float64, range of arguments, allowed error in units in the last place)
    "exp2": (np.exp2, (-126, 128), 2),
    "exp": (np.exp, (-87.3, 88.7), 2),
    "log2": (np.log2, (1e-3, 1e3), 3),
    "log": (np.log, (1e-3, 1e3), 2),
    "tanh": (np.tanh, (-10, 10), 2.5),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), (-80, 80), 3),
    "erf": (_erf, (-5, 5), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_error_in_units_in_the_last_place(name):
    reference, (low, high), allowed = CASES[name]
    rng = np.random.default_rng(1)
    x = rng.uniform(low, high, COUNT).astype("float32")
    x[: COUNT // 4] = (rng.standard_normal(COUNT // 4) * min(1.0, high / 8)).astype("float32")
    x = np.clip(x, np.float32(low), np.float32(high) * np.float32(1 - 1e-6))
    want = reference(x.astype("float64"))
    got = map_function(getattr(vmath, name), 16, COUNT)(x).astype("float64")
    ulp = np.spacing(np.abs(want).astype("float32")).astype("float64")
    if name in ("log", "log2"):  # near 1 the logarithm's own last place is far below that of its argument
        ulp = np.maximum(ulp, 2.0**-25)
    normal = np.abs(want) >= 2.0**-126
    error = (np.abs(got - want) / ulp)[normal]
    assert error.max() <= allowed, (x[normal][error.argmax()], error.max())


SPECIAL = {
    "exp2": (
        [-INF, INF, NAN, 0.0, -0.0, 1.0, -1.0, 128.0, 127.99999, 1e30, -1e30, -126.0, -126.3, -127.0, -150.0, 10.0],
        [0, INF, NAN, 1, 1, 2, 0.5, INF, None, INF, 0, 2.0**-126, 0, 0, 0, 1024],
    ),
    "exp": ([-INF, INF, NAN, 0.0, -0.0, 200.0, -200.0, 1e30], [0, INF, NAN, 1, 1, INF, 0, 0]),
    "log2": ([0.0, -0.0, -1.0, INF, NAN, 1.0, 8.0, 2.0**-140, -INF], [-INF, -INF, NAN, INF, NAN, 0, 3, -140, NAN]),
    "log": ([0.0, -1.0, INF, NAN, 1.0, -INF], [-INF, NAN, INF, NAN, 0, NAN]),
    "tanh": ([INF, -INF, NAN, 0.0, 50.0, -50.0], [1, -1, NAN, 0, 1, -1]),
    "sigmoid": ([INF, -INF, NAN, 0.0, 200.0, -200.0], [1, 0, NAN, 0.5, 1, 0]),
    "erf": ([INF, -INF, NAN, 0.0, 10.0, -10.0], [1, -1, NAN, 0, 1, -1]),
}
SPECIAL["exp"][1][-1] = INF


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name):
    arguments, wants = SPECIAL[name]
    x = np.zeros(16, "float32")
    x[: len(arguments)] = arguments
    got = map_function(getattr(vmath, name), 16, 16)(x)
    for argument, want, value in zip(arguments, wants, got, strict=False):
        if want is None:
            assert np.isfinite(value), (argument, value)
        elif np.isnan(want):
            assert np.isnan(value), (argument, value)
        else:
            assert value == np.float32(want), (argument, value, want)
