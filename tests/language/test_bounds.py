"""Bounds rules: loads outside give 0, stores outside are dropped, proofs cost nothing."""

import numpy as np
import pytest
import tvm

import tvm_tile.language as T
from tvm_tile import ir
from tvm_tile.ir.visit import walk

from .harness import out, rand, run


def conditions(func):
    """Number of bounds conditions in a function."""
    found = []
    walk(func.body, (tvm.tirx.IfThenElse, found.append))
    walk(
        func.body,
        (tvm.ir.Call, lambda c: found.append(c) if getattr(c.op, "name", "") == "prim.if_then_else" else None),
    )
    return len(found)


@pytest.mark.parametrize("n", [1, 7, 64, 1000, 1001])
def test_elementwise_add_with_symbolic_length(n):
    # tilelang 968, 3010
    length = T.dynamic("length")

    @T.prim_func
    def kernel(A: T.Tensor((length,), "float32"), B: T.Tensor((length,), "float32"), C: T.Tensor((length,), "float32")):
        with T.Kernel(T.ceildiv(length, 128), threads=64) as bx:
            for i in T.Parallel(128):
                C[bx * 128 + i] = A[bx * 128 + i] + B[bx * 128 + i]

    rng = np.random.default_rng(n)
    a, b, c = rand(rng, n), rand(rng, n), out(n)
    run(kernel, a, b, c)
    np.testing.assert_array_equal(c, a + b)


def test_provable_accesses_have_no_conditions():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Tensor((m, 64), "float32"), B: T.Tensor((m, 64), "float32"), C: T.Tensor((128, 64), "float32")):
        with T.Kernel(m, threads=64) as bx:
            tile = T.alloc_shared((64,), "float32")
            T.copy(A[bx, 0], tile)
            for i in T.Parallel(64):
                B[bx, i] = tile[i]
                if bx < 128:
                    C[bx, i] = tile[63 - i]
            for i in T.Parallel(128):
                C[i, 0] = tile[i // 2] + T.if_then_else(i > 0, C[i, 1], 0.0)

    assert conditions(kernel) == 2  # the author's own two


@pytest.mark.parametrize("last", [0, 1])
def test_loops_that_run_down(last):
    """The lowest index is that of the last iteration; with one iteration more it would be -1."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32"), first: T.int32, end: T.int32):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_shared((1,), "float32")
            low = T.max(first, 0)
            high = T.max(end, low)
            for k in T.serial(low, high):
                T.copy(A[low + high - 1 - last - k], tile)
                B[k] = tile[0]

    guarded = kernel.script().count(">= 0")
    assert guarded == last
    a, b = rand(np.random.default_rng(0), 9), out(9)
    run(kernel, a, b, 2, 7)
    want = np.full(9, np.nan, "float32")
    want[2:7] = [a[i] for i in range(6 - last, 1 - last, -1)]
    np.testing.assert_array_equal(b[2:7], want[2:7])


def test_assumption_removes_conditions():
    n = T.dynamic("n")

    def make(assume):
        @T.prim_func
        def kernel(A: T.Tensor((n,), "float32")):
            if assume:
                T.assume(n % 128 == 0)
            with T.Kernel(T.ceildiv(n, 128), threads=64) as bx:
                for i in T.Parallel(128):
                    A[bx * 128 + i] = 1.0

        return kernel

    assert conditions(make(True)) == 0
    assert conditions(make(False)) == 1
    a = out(256)
    run(make(True), a)
    assert (a == 1).all()


def test_gather_by_loaded_index():
    @T.prim_func
    def kernel(A: T.Tensor((10, 4), "float32"), Index: T.Tensor((6,), "int32"), B: T.Tensor((6, 4), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for i, j in T.Parallel(6, 4):
                B[i, j] = A[Index[i], j]

    a, b = rand(np.random.default_rng(0), (10, 4)), out((6, 4))
    run(kernel, a, np.array([9, 0, -1, 10, 3, 2**31 - 1], "int32"), b)
    expected = np.where(np.array([1, 1, 0, 0, 1, 0])[:, None] == 1, a[[9, 0, 0, 0, 3, 0]], 0)
    np.testing.assert_array_equal(b, expected)


def test_paged_copy_by_block_table():
    @T.prim_func
    def kernel(Cache: T.Tensor((5, 4, 8), "float32"), Table: T.Tensor((3,), "int32"), B: T.Tensor((12, 8), "float32")):
        with T.Kernel(3, threads=32) as bx:
            tile = T.alloc_shared((4, 8), "float32")
            T.copy(Cache[Table[bx], 0, 0], tile)
            T.copy(tile, B[bx * 4, 0])

    cache, b = rand(np.random.default_rng(0), (5, 4, 8)), out((12, 8))
    run(kernel, cache, np.array([4, 99, 1], "int32"), b)
    np.testing.assert_array_equal(b, np.concatenate([cache[4], np.zeros((4, 8)), cache[1]]))


def test_scatter_beyond_the_tensor_is_dropped():
    @T.prim_func
    def kernel(Index: T.Tensor((6,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(6):
                B[Index[i]] = i

    b = np.full(4, -1, "int32")
    run(kernel, np.array([3, -1, 4, 0, 100, 2], "int32"), b)
    assert b.tolist() == [3, -1, 5, 0]


def test_atomics_outside_do_nothing_and_return_zero():
    @T.prim_func
    def kernel(Index: T.Tensor((5,), "int32"), B: T.Tensor((3,), "int32"), Old: T.Tensor((5,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(5):
                old = T.atomic_add(B[Index[i]], 10, return_prev=True)
                Old[i] = old

    b, old = np.array([1, 2, 3], "int32"), out(5, "int32")
    run(kernel, np.array([0, 3, 2, -1, 0], "int32"), b, old, compiled=False)
    assert b.tolist() == [21, 2, 13] and old.tolist() == [1, 0, 3, 0, 11]


def test_more_than_two_to_the_31_elements_in_one_dimension():
    # tilelang 330: index arithmetic must not wrap in 32 bits
    size = 3_000_000_000

    @T.prim_func
    def kernel(A: T.Tensor((size,), "int8")):
        with T.Kernel(2_929_688, threads=128) as bx:
            for i in T.Parallel(1024):
                A[bx * 1024 + i] = A[bx * 1024 + i] + T.int8(1)

    op = next(op for op in ir.tile_ops(kernel.body))
    loads = []
    walk(op.body, (tvm.ir.TensorLoad, loads.append))
    for load in loads:
        index = load.indices[0]
        assert str(index.ty.dtype) == "int64"
        at = {kernel_axis: 2_929_687 for kernel_axis in ir.kernels_of(kernel)[0].axes}
        value = tvm.sym.Analyzer().simplify(
            ir.visit.substitute(
                index,
                {k: tvm.tirx.const(v, "int32") for k, v in at.items()} | {op.axes[0].var: tvm.tirx.const(5, "int32")},
            )
        )
        assert int(value.value) == 2_929_687 * 1024 + 5


def test_wide_symbolic_dimension():
    n = T.dynamic("n", "int64")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 64), threads=32) as bx:
            for i in T.Parallel(64):
                A[bx * 64 + i] = 2.0

    a = out(100)
    run(kernel, a)
    assert (a == 2).all()


def test_empty_tensors_run_nothing():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n, 4), "float32")):
        with T.Kernel(T.ceildiv(n, 8), threads=32) as bx:
            for i, j in T.Parallel(8, 4):
                A[bx * 8 + i, j] = 1.0

    run(kernel, np.empty((0, 4), "float32"))
