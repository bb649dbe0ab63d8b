"""Conversions between narrow floats and float32, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from tvm_tile.lower.cpu import convert

from .harness import map_function

NARROW = {
    "bfloat16": ("uint16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
}


@pytest.mark.parametrize("dtype", NARROW)
def test_widening_is_exact_for_every_value(dtype):
    storage, numpy_dtype = NARROW[dtype]
    count = 256 if storage == "uint8" else 65536
    bits = np.arange(count).astype(storage)
    want = bits.view(numpy_dtype).astype("float32")
    got = map_function(lambda b, x: convert.widen(b, x, dtype), 16, count, storage, "float32")(bits)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrowing_rounds_to_nearest_even(dtype):
    storage, numpy_dtype = NARROW[dtype]
    rng = np.random.default_rng(2)
    count = 1 << 16
    exponents = rng.uniform(-20, 8, count)
    x = (rng.choice([-1, 1], count) * np.exp2(exponents)).astype("float32")
    every = np.arange(256 if storage == "uint8" else 65536).astype(storage).view(numpy_dtype).astype("float32")
    every = every[np.isfinite(every)][: count // 4]
    x[: len(every)] = every
    ties = ((every[:-1].astype("float64") + every[1:]) / 2).astype("float32")
    x[count // 2 : count // 2 + len(ties)] = ties
    largest = float(ml_dtypes.finfo(numpy_dtype).max)
    x = np.clip(x, -largest, largest)
    got = map_function(lambda b, v: convert.narrow(b, v, dtype), 16, count, "float32", storage)(x)
    want = x.astype(numpy_dtype).view(storage)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", NARROW)
def test_special_values_of_narrowing(dtype):
    storage, numpy_dtype = NARROW[dtype]
    x = np.zeros(16, "float32")
    x[:5] = [np.nan, np.inf, -np.inf, 1e30, -1e30]
    got = map_function(lambda b, v: convert.narrow(b, v, dtype), 16, 16, "float32", storage)(x)
    got = got.view(numpy_dtype).astype("float32")
    largest = float(ml_dtypes.finfo(numpy_dtype).max)
    assert np.isnan(got[0])
    if dtype == "bfloat16":
        np.testing.assert_array_equal(got[1:3], [np.inf, -np.inf])
        assert got[3] == np.float32(1e30).astype(numpy_dtype) and got[4] == -got[3]
    else:  # saturation, as the GPUs' conversion does
        np.testing.assert_array_equal(got[1:5], [largest, -largest, largest, -largest])


def test_bool_round_trip():
    bits = np.array([0, 1, 2, 255] * 4, "uint8")

    def both(b, x):
        return convert.narrow(b, convert.widen(b, x, "bool"), "bool")

    np.testing.assert_array_equal(map_function(both, 16, 16, "uint8", "uint8")(bits), [0, 1, 1, 1] * 4)
