"""T.copy, T.fill, T.clear: scopes, slices, element starts, dtypes, bounds, safe values."""

import ml_dtypes
import numpy as np
import pytest

import tvm_tile
import tvm_tile.language as T

from .harness import out, rand, run


@pytest.mark.parametrize("scope", ["shared", "fragment"])
@pytest.mark.parametrize("m, n", [(64, 64), (60, 60), (1, 7), (65, 130)])
def test_ragged_tiles_through_on_chip_memory(scope, m, n):
    @T.prim_func
    def kernel(A: T.Tensor((m, n), "float32"), B: T.Tensor((m, n), "float16")):
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=64) as (bx, by):
            if scope == "shared":
                tile = T.alloc_shared((32, 32), "float32")
            else:
                tile = T.alloc_fragment((32, 32), "float32")
            T.copy(A[by * 32, bx * 32], tile)
            T.copy(tile, B[by * 32, bx * 32])

    rng = np.random.default_rng(m * 1000 + n)
    a, b = rand(rng, (m, n)), out((m, n), "float16")
    run(kernel, a, b)
    np.testing.assert_array_equal(b, a.astype("float16"))


@pytest.mark.parametrize("safe", [None, -1.5, float("inf"), float("-inf"), float("nan")])
def test_tile_beyond_the_edge_holds_the_safe_value(safe):
    # tilelang 2543: 60 x 60 into 64 x 64
    @T.prim_func
    def kernel(A: T.Tensor((60, 60), "float32"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            if safe is not None:
                T.annotate_safe_value({A: safe})
            tile = T.alloc_shared((64, 64), "float32")
            T.copy(A[0, 0], tile)
            T.copy(tile, B)
            for i, j in T.Parallel(64, 64):
                C[i, j] = A[i, j]

    a, b, c = rand(np.random.default_rng(0), (60, 60)), out((64, 64)), out((64, 64))
    run(kernel, a, b, c)
    expected = np.full((64, 64), 0 if safe is None else safe, "float32")
    expected[:60, :60] = a
    np.testing.assert_array_equal(b, expected)
    np.testing.assert_array_equal(c, expected)


def test_safe_value_from_infinity_of_the_dtype():
    @T.prim_func
    def kernel(A: T.Tensor((5,), "float16"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            T.annotate_safe_value({A: -T.infinity("float16")})
            for i in T.Parallel(8):
                B[i] = A[i]

    a, b = rand(np.random.default_rng(0), 5, "float16"), out(8)
    run(kernel, a, b)
    np.testing.assert_array_equal(b, np.r_[a.astype("float32"), [-np.inf] * 3])


def test_integer_safe_value_keeps_all_its_bits():
    value = 2**62 + 1

    @T.prim_func
    def kernel(A: T.Tensor((3,), "int64"), B: T.Tensor((4,), "int64")):
        with T.Kernel(1, threads=32) as bx:
            T.annotate_safe_value({A: value})
            for i in T.Parallel(4):
                B[i] = A[i]

    a, b = np.arange(3, dtype="int64"), out(4, "int64")
    run(kernel, a, b)
    assert b.tolist() == [0, 1, 2, value]


@pytest.mark.parametrize("threads", [8, 16, 31, 48, 128])
def test_any_thread_count_writes_the_whole_tile(threads):
    # tilelang 2562
    @T.prim_func
    def kernel(A: T.Tensor((16, 24), "float32"), B: T.Tensor((16, 24), "float32")):
        with T.Kernel(1, threads=threads) as bx:
            tile = T.alloc_shared((16, 24), "float32")
            T.copy(A, tile)
            T.copy(tile, B)

    a, b = rand(np.random.default_rng(0), (16, 24)), out((16, 24))
    run(kernel, a, b)
    np.testing.assert_array_equal(a, b)


def test_slices_of_both_sides_and_squeezed_dimensions():
    batch, heads, length, dim = 2, 3, 20, 8

    @T.prim_func
    def kernel(
        K: T.Tensor((batch, length, heads, dim), "float16"),
        B: T.Tensor((batch, heads, 16, dim), "float16"),
        C: T.Tensor((batch, heads, dim), "float16"),
    ):
        with T.Kernel(heads, batch, threads=32) as (h, b):
            tile = T.alloc_shared((16, 16), "float16")
            row = T.alloc_fragment((dim,), "float16")
            T.clear(tile)
            # unit dimensions between the slices are squeezed
            T.copy(K[b, 2:18, h, :], tile[:, 4:12])
            T.copy(tile[0:16, 4 : 4 + dim], B[b, h, 0, 0])
            T.copy(K[b, 19, h, 0:dim], row)
            T.copy(row, C[b, h, 0])

    rng = np.random.default_rng(1)
    k = rand(rng, (batch, length, heads, dim), "float16")
    b, c = out((batch, heads, 16, dim), "float16"), out((batch, heads, dim), "float16")
    run(kernel, k, b, c)
    np.testing.assert_array_equal(b, k[:, 2:18].transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(c, k[:, 19])


def test_element_start_aligns_with_trailing_dimensions():
    @T.prim_func
    def kernel(A: T.Tensor((3, 40, 50), "float32"), B: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((16, 8), "float32")
            T.copy(A[1, 5, 45], tile)
            T.copy(tile, B)

    a, b = rand(np.random.default_rng(2), (3, 40, 50)), out((16, 8))
    run(kernel, a, b)
    expected = np.zeros((16, 8), "float32")
    expected[:, :5] = a[1, 5:21, 45:50]
    np.testing.assert_array_equal(b, expected)


def test_start_before_the_tensor_reads_zero():
    # sliding windows start below 0
    @T.prim_func
    def kernel(A: T.Tensor((10,), "float32"), B: T.Tensor((4, 8), "float32")):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((8,), "float32")
            T.copy(A[bx * 4 - 6], tile)
            T.copy(tile, B[bx, 0])

    a, b = rand(np.random.default_rng(3), 10), out((4, 8))
    run(kernel, a, b)
    padded = np.r_[np.zeros(6, "float32"), a, np.zeros(8, "float32")]
    np.testing.assert_array_equal(b, np.stack([padded[4 * i : 4 * i + 8] for i in range(4)]))


def test_start_taken_from_memory_is_the_value_at_the_call():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            index = T.alloc_shared((8,), "int32")
            T.copy(A, index)
            # the copy changes index[0] itself; the start was taken before
            T.copy(A[index[0]], index[0:4])
            T.copy(index[0:4], B)

    a, b = np.array([3, 10, 11, 12, 13, 14, 15, 16], "int32"), out(4, "int32")
    run(kernel, a, b)
    assert b.tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize(
    "source, target",
    [
        ("float32", "int32"),
        ("int8", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float8_e4m3fn"),
        ("bool", "int32"),
        ("int32", "float32"),
    ],
)
def test_copy_converts(source, target):
    @T.prim_func
    def kernel(A: T.Tensor((33,), source), B: T.Tensor((33,), target)):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_fragment((33,), source)
            T.copy(A, tile)
            T.copy(tile, B)

    a = rand(np.random.default_rng(4), 33, source)
    kind = getattr(ml_dtypes, target, None) or target
    b = out(33, target)
    run(kernel, a, b)
    np.testing.assert_array_equal(b.astype("float32"), a.astype(kind).astype("float32"))


def test_fill_and_clear_of_slices():
    @T.prim_func
    def kernel(B: T.Tensor((6, 8), "float32"), x: T.float32):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((6, 8), "float32")
            T.fill(tile, x)
            T.clear(tile[1:3, 2:5])
            T.fill(tile[5, :], tile[0, 0] + 1.0)
            T.copy(tile, B)
            T.fill(B[3, 0:2], 9)

    b = out((6, 8))
    run(kernel, b, 2.5)
    expected = np.full((6, 8), 2.5, "float32")
    expected[1:3, 2:5] = 0
    expected[5] = 3.5
    expected[3, :2] = 9
    np.testing.assert_array_equal(b, expected)


def test_fill_of_a_global_slice_beyond_the_edge_is_dropped():
    @T.prim_func
    def kernel(B: T.Tensor((10,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            T.fill(B[bx * 8 : bx * 8 + 8], 1.0)

    b = out(10)
    run(kernel, b)
    assert (b == 1).all()


@pytest.mark.parametrize("m, n", [(1, 1), (7, 3), (1000, 1), (33, 65)])
def test_symbolic_shapes(m, n):
    rows, columns = T.dynamic("rows, columns")

    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), "float32"), B: T.Tensor((columns, rows), "float32")):
        with T.Kernel(T.ceildiv(columns, 32), T.ceildiv(rows, 32), threads=64) as (bx, by):
            tile = T.alloc_shared((32, 32), "float32")
            turned = T.alloc_fragment((32, 32), "float32")
            T.copy(A[by * 32, bx * 32], tile)
            for i, j in T.Parallel(32, 32):
                turned[i, j] = tile[j, i]
            T.copy(turned, B[bx * 32, by * 32])

    a, b = rand(np.random.default_rng(m), (m, n)), out((n, m))
    run(kernel, a, b)
    np.testing.assert_array_equal(b, a.T)


def test_rows_of_a_strided_tensor():
    @T.prim_func
    def kernel(A: T.StridedTensor((6, 5), (8, 1), "float32"), B: T.Tensor((6, 5), "float32")):
        with T.Kernel(1, threads=32) as bx:
            T.copy(A, B)

    whole = rand(np.random.default_rng(5), (6, 8))
    b = out((6, 5))
    tvm_tile.compile(kernel, "llvm", lowering="reference")(whole[:, :5], b)
    np.testing.assert_array_equal(b, whole[:, :5])
