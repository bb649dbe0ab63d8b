"""T.gemm: dtypes, transposes, slices, masks, ragged K, policies."""

import numpy as np
import pytest

import tvm_tile.language as T

from .harness import out, rand, run


def product(a, b, accumulator="float32"):
    kind = "float64" if accumulator.startswith("float") else "int64"
    return (a.astype(kind) @ b.astype(kind)).astype(accumulator)


@pytest.mark.parametrize(
    "dtype, accumulator",
    [
        ("float16", "float32"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float32"),
        ("int8", "int32"),
        ("uint8", "int32"),
    ],
)
@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False), (True, True)])
def test_dtypes_and_transposes(dtype, accumulator, trans_a, trans_b):
    m, n, k = 16, 8, 24
    shape_a, shape_b = (k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)

    @T.prim_func
    def kernel(A: T.Tensor(shape_a, dtype), B: T.Tensor(shape_b, dtype), C: T.Tensor((m, n), accumulator)):
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_shared(shape_a, dtype)
            b = T.alloc_shared(shape_b, dtype)
            c = T.alloc_fragment((m, n), accumulator)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=trans_a, transpose_B=trans_b, clear_accum=True)
            T.copy(c, C)

    rng = np.random.default_rng(0)
    a, b, c = rand(rng, shape_a, dtype), rand(rng, shape_b, dtype), out((m, n), accumulator)
    run(kernel, a, b, c)
    expected = product(a.T if trans_a else a, b.T if trans_b else b, accumulator)
    tolerance = {"float16": 5e-3, "float32": 1e-4, "float64": 1e-12}.get(accumulator, 0) * 8
    np.testing.assert_allclose(c.astype("float64"), expected.astype("float64"), atol=tolerance)


@pytest.mark.parametrize("block_k", [8, 24, 40])
@pytest.mark.parametrize("stages", [0, 2])
def test_ragged_everything_accumulates_over_k(block_k, stages):
    # tilelang 2381: block_K = 24 dropped the tail of K
    m, n, k = 19, 9, 51

    @T.prim_func
    def kernel(A: T.Tensor((m, k), "float16"), B: T.Tensor((n, k), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 8), T.ceildiv(m, 16), threads=32) as (bx, by):
            a = T.alloc_shared((16, block_k), "float16")
            b = T.alloc_shared((8, block_k), "float16")
            c = T.alloc_fragment((16, 8), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, block_k), num_stages=stages):
                T.copy(A[by * 16, step * block_k], a)
                T.copy(B[bx * 8, step * block_k], b)
                T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, C[by * 16, bx * 8])

    rng = np.random.default_rng(block_k)
    a, b, c = rand(rng, (m, k), "float16"), rand(rng, (n, k), "float16"), out((m, n))
    run(kernel, a, b, c)
    np.testing.assert_allclose(c, product(a, b.T), rtol=1e-4, atol=1e-4)


def masked(mask_dtype, mask_value, clear, mask_scope):
    @T.prim_func
    def kernel(
        A: T.Tensor((16, 16), "float16"), B: T.Tensor((16, 16), "float16"), Old: T.Tensor((16, 16), "float32"),
        Mask: T.Tensor((16, 16), mask_dtype), C: T.Tensor((16, 16), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_shared((16, 16), "float16")
            b = T.alloc_shared((16, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            if mask_scope == "shared":
                mask = T.alloc_shared((16, 16), mask_dtype)
            else:
                mask = T.alloc_fragment((16, 16), mask_dtype)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(Mask, mask)
            T.copy(Old, c)
            T.gemm(a, b, c, clear_accum=clear, mask=mask, mask_value=mask_value)
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize("mask_dtype, mask_scope", [("bool", "fragment"), ("int8", "shared")])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("mask_value", [None, 7.0, float("-inf")])
def test_tile_mask(mask_dtype, mask_scope, clear, mask_value):
    rng = np.random.default_rng(3)
    a, b, old = rand(rng, (16, 16), "float16"), rand(rng, (16, 16), "float16"), rand(rng, (16, 16))
    mask = rand(rng, (16, 16), mask_dtype, -2, 2)  # int8: any non-zero keeps, also negative values
    c = out((16, 16))
    run(masked(mask_dtype, mask_value, clear, mask_scope), a, b, old, mask, c)
    base = np.zeros_like(old) if clear else old
    expected = np.where(mask != 0, base + product(a, b), base if mask_value is None else mask_value)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clear", [False, True])
def test_scalar_mask_skips_the_product(clear):
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), Keep: T.Tensor((3,), "int32"), C: T.Tensor((3, 16, 16), "float32")):
        with T.Kernel(3, threads=32) as bx:
            a = T.alloc_shared((16, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.copy(A, a)
            T.fill(c, 1.0)
            T.gemm(a, a, c, clear_accum=clear, mask=Keep[bx] > 1)
            T.copy(c, C[bx, 0, 0])

    a, c = rand(np.random.default_rng(4), (16, 16), "float16"), out((3, 16, 16))
    run(kernel, a, np.array([0, 2, 1], "int32"), c)
    base = 0.0 if clear else 1.0
    np.testing.assert_array_equal(c[[0, 2]], np.full((2, 16, 16), base, "float32"))
    np.testing.assert_allclose(c[1], base + product(a, a), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
def test_python_mask_is_decided_at_parse_time(keep):
    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_shared((16, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True, mask=keep)
            T.copy(c, C)

    a, c = rand(np.random.default_rng(5), (16, 16), "float16"), out((16, 16))
    run(kernel, a, c)
    np.testing.assert_allclose(c, product(a, a) if keep else 0 * c, rtol=1e-4, atol=1e-4)
    assert ("gemm" in kernel.script()) is keep


def test_fragment_operand_slices_and_keywords():
    @T.prim_func
    def kernel(A: T.Tensor((16, 32), "float16"), B: T.Tensor((2, 8, 16), "float16"), C: T.Tensor((16, 8), "float32")):
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_fragment((16, 32), "float16")
            b = T.alloc_shared((2, 8, 16), "float16")
            c = T.alloc_fragment((16, 8), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.clear(c)
            T.gemm(A=a[:, 0:16], B=b[0, :, :], C=c, transpose_B=True, policy="FullCol")
            T.gemm(a[:, 16:32], b[1, :, :], c[0:16, 0:8], False, True)
            T.copy(c, C)

    rng = np.random.default_rng(6)
    a, b, c = rand(rng, (16, 32), "float16"), rand(rng, (2, 8, 16), "float16"), out((16, 8))
    run(kernel, a, b, c)
    np.testing.assert_allclose(c, product(a[:, :16], b[0].T) + product(a[:, 16:], b[1].T), rtol=1e-4, atol=1e-4)


def test_registered_policy_and_precision_are_recorded():
    name = T.GemmWarpPolicy.register("all_rows_test", lambda m, n, warps, instruction: (warps, 1))

    @T.prim_func
    def kernel(A: T.Tensor((64, 16), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64) as bx:
            a = T.alloc_shared((64, 16), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, transpose_B=True, policy=name, clear_accum=True, precision="tf32")
            T.copy(c, C)

    from tvm_tile import ir

    gemm = next(op for op in ir.tile_ops(kernel.body) if isinstance(op, ir.GemmOp))
    assert (gemm.policy, gemm.precision, gemm.clear_accum) == ("all_rows_test", "tf32", True)
    assert (gemm.m, gemm.n, gemm.k, gemm.trans_a, gemm.trans_b) == (64, 64, 16, False, True)
