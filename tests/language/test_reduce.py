"""Reductions and scans."""

import numpy as np
import pytest

import tvm_tile.language as T

from .harness import out, rand, run

NUMPY = {
    "max": np.max,
    "min": np.min,
    "sum": np.sum,
    "absmax": lambda x, axis: np.max(np.abs(x), axis),
    "abssum": lambda x, axis: np.sum(np.abs(x), axis),
}


def make(kind, shape, dim, scope, clear, keep, dtype, out_dtype=None):
    rank_out = [e for d, e in enumerate(shape) if d != dim % len(shape)] or [1]
    if keep:
        rank_out = [1 if d == dim % len(shape) else e for d, e in enumerate(shape)]
    rank_out = tuple(rank_out)
    reduce = getattr(T, f"reduce_{kind}")
    out_dtype = out_dtype or dtype

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), Old: T.Tensor(rank_out, out_dtype), B: T.Tensor(rank_out, out_dtype)):
        with T.Kernel(1, threads=64) as bx:
            if scope == "shared":
                tile = T.alloc_shared(shape, dtype)
            else:
                tile = T.alloc_fragment(shape, dtype)
            result = T.alloc_fragment(rank_out, out_dtype)
            T.copy(A, tile)
            T.copy(Old, result)
            reduce(tile, result, dim=dim, clear=clear)
            T.copy(result, B)

    return kernel, rank_out


@pytest.mark.parametrize("kind", sorted(NUMPY))
@pytest.mark.parametrize(
    "shape, dim, keep",
    [
        ((12, 48), 1, False),
        ((12, 48), -1, True),
        ((9, 5), 0, False),
        ((3, 4, 5), 1, False),
        ((37,), 0, False),
        ((1, 7), 0, True),
    ],
)
@pytest.mark.parametrize("clear", [True, False])
def test_reductions(kind, shape, dim, keep, clear):
    rng = np.random.default_rng(len(shape))
    kernel, result = make(kind, shape, dim, "fragment" if clear else "shared", clear, keep, "float32")
    a, old, b = rand(rng, shape), rand(rng, result), out(result)
    run(kernel, a, old, b)
    expected = NUMPY[kind](a, axis=dim).reshape(result)
    if not clear:
        expected = {"max": np.maximum, "absmax": np.maximum, "min": np.minimum}.get(kind, np.add)(expected, old)
    np.testing.assert_allclose(b, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["max", "min", "absmax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("position", [0, 3, 6])
def test_nan_propagates(kind, dtype, position):
    kernel, result = make(kind, (4, 7), 1, "fragment", True, False, dtype)
    a = rand(np.random.default_rng(0), (4, 7), dtype)
    a[1, position] = np.nan
    a[2] = -np.inf
    b = out(result, dtype)
    run(kernel, a, out(result, dtype), b)
    b = b.astype("float32")
    expected = NUMPY[kind](a.astype("float32"), axis=1)
    np.testing.assert_array_equal(b, expected)
    assert np.isnan(b[1]) and not np.isnan(b[[0, 2, 3]]).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_integers(dtype, kind):
    kernel, result = make(kind, (5, 9), 1, "fragment", True, False, dtype)
    info = np.iinfo(dtype)
    a = np.random.default_rng(0).integers(info.min // 16, info.max // 16, (5, 9)).astype(dtype)
    a[0] = info.min if kind == "max" else a[0]
    b = out(result, dtype)
    run(kernel, a, out(result, dtype), b)
    np.testing.assert_array_equal(b, NUMPY[kind](a, axis=1).astype(dtype))


def test_sum_into_a_wider_dtype():
    kernel, result = make("sum", (4, 64), 1, "shared", True, False, "float16", "float32")
    a, b = rand(np.random.default_rng(0), (4, 64), "float16"), out(result)
    run(kernel, a, out(result), b)
    np.testing.assert_allclose(b, a.astype("float32").sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [576, 768])
def test_absmax_where_elements_do_not_divide_by_the_threads(size):
    # tilelang 2305, 2524
    @T.prim_func
    def kernel(A: T.Tensor((3, size), "float32"), B: T.Tensor((3,), "float32")):
        with T.Kernel(3, threads=256) as bx:
            row = T.alloc_fragment((size,), "float32")
            result = T.alloc_fragment((1,), "float32")
            T.copy(A[bx, 0], row)
            T.reduce_absmax(row, result)
            T.copy(result, B[bx])

    a, b = rand(np.random.default_rng(size), (3, size)), out(3)
    run(kernel, a, b)
    np.testing.assert_array_equal(b, np.abs(a).max(1))


def test_reduction_of_slices():
    @T.prim_func
    def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_shared((8, 16), "float32")
            result = T.alloc_fragment((8,), "float32")
            T.copy(A, tile)
            T.reduce_sum(tile[0:4, 2:7], result[0:4], dim=1)
            T.reduce_max(tile[4:8, :], result[4:8], dim=1)
            T.copy(result, B)

    a, b = rand(np.random.default_rng(0), (8, 16)), out(8)
    run(kernel, a, b)
    np.testing.assert_allclose(b, np.r_[a[:4, 2:7].sum(1), a[4:].max(1)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape, dim", [((17,), 0), ((5, 9), 0), ((5, 9), 1), ((2, 3, 4), -2)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_cumsum(shape, dim, reverse, in_place):
    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_shared(shape, "float32")
            T.copy(A, tile)
            if in_place:
                T.cumsum(tile, dim=dim, reverse=reverse)
                T.copy(tile, B)
            else:
                result = T.alloc_fragment(shape, "float32")
                T.cumsum(tile, result, dim, reverse)
                T.copy(result, B)

    a, b = rand(np.random.default_rng(0), shape), out(shape)
    run(kernel, a, b)
    expected = np.flip(np.cumsum(np.flip(a, dim), dim), dim) if reverse else np.cumsum(a, dim)
    np.testing.assert_allclose(b, expected, rtol=1e-5, atol=1e-5)


def test_cumsum_of_a_slice_changes_only_the_slice():
    # tilelang 2523
    @T.prim_func
    def kernel(A: T.Tensor((6, 8), "int32")):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_shared((6, 8), "int32")
            T.copy(A, tile)
            T.cumsum(tile[1:4, 2:7], dim=1)
            T.copy(tile, A)

    a = rand(np.random.default_rng(0), (6, 8), "int32")
    expected = a.copy()
    expected[1:4, 2:7] = np.cumsum(a[1:4, 2:7], 1)
    run(kernel, a)
    np.testing.assert_array_equal(a, expected)


@pytest.mark.parametrize("dtype, scope", [("bool", "shared"), ("int8", "fragment"), ("int32", "global")])
def test_any_and_all(dtype, scope):
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), dtype), B: T.Tensor((4, 2), "int32")):
        with T.Kernel(4, threads=32) as bx:
            if scope == "shared":
                row = T.alloc_shared((6,), dtype)
            else:
                row = T.alloc_fragment((6,), dtype)
            T.copy(A[bx, 0], row)
            if scope == "global":
                any_, all_ = T.any_of(A[bx, 0:6]), T.all_of(A[bx, 0:6])
            else:
                any_, all_ = T.any_of(row), T.all_of(row)
            B[bx, 0] = T.if_then_else(any_, 1, 0)
            if all_:
                B[bx, 1] = 1
            else:
                B[bx, 1] = 0

    a = np.zeros((4, 6), dtype)
    a[1, 5], a[2] = 1, 1
    a[3, 1:] = 1
    b = out((4, 2), "int32")
    run(kernel, a, b)
    assert b.tolist() == [[0, 0], [1, 0], [1, 1], [1, 0]]
