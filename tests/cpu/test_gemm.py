"""Products of every type, transpose and ragged tile on every unit that this machine has."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_tile.language as T
from tvm_tile.lower.cpu import amx_available

from .harness import compile_kernel, host_target, narrow_targets, numpy_dtype, poisoned

rng = np.random.default_rng()
TYPES = [  # operands, accumulator, output, relative error
    ("bfloat16", "float32", "float32", 1e-5),
    ("bfloat16", "float32", "bfloat16", 5e-3),
    ("float16", "float32", "float16", 1e-3),
    ("float16", "float16", "float16", 1e-3),
    ("float32", "float32", "float32", 1e-5),
    ("float64", "float64", "float64", 1e-13),
    ("float8_e4m3fn", "float32", "float32", 1e-5),
    ("float8_e5m2", "float32", "float32", 1e-5),
    ("int8", "int32", "int32", 0),
    ("uint8", "int32", "int32", 0),
]


def gemm(m, n, k, tile, dtype, accumulator, out, trans_a, trans_b):
    block_m, block_n, block_k = tile
    a_shape, b_shape = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))
    a_tile = (block_k, block_m) if trans_a else (block_m, block_k)
    b_tile = (block_n, block_k) if trans_b else (block_k, block_n)

    @T.prim_func
    def kernel(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=128) as (bx, by):
            a, b = T.alloc_shared(a_tile, dtype), T.alloc_shared(b_tile, dtype)
            acc = T.alloc_fragment((block_m, block_n), accumulator)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_k), num_stages=2):
                if trans_a:
                    T.copy(A[ko * block_k, by * block_m], a)
                else:
                    T.copy(A[by * block_m, ko * block_k], a)
                if trans_b:
                    T.copy(B[bx * block_n, ko * block_k], b)
                else:
                    T.copy(B[ko * block_k, bx * block_n], b)
                T.gemm(a, b, acc, transpose_A=trans_a, transpose_B=trans_b)
            T.copy(acc, C[by * block_m, bx * block_n])

    return kernel


def operand(shape, dtype):
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        return rng.integers(0 if kind.kind == "u" else -100, 100, shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def run(m, n, k, tile, types, trans_a, trans_b, how="optimised", target=None):
    dtype, accumulator, out, tolerance = types
    a = operand((k, m) if trans_a else (m, k), dtype)
    b = operand((n, k) if trans_b else (k, n), dtype)
    c = poisoned((m, n), out)
    compile_kernel(gemm(m, n, k, tile, dtype, accumulator, out, trans_a, trans_b), how, target)(a, b, c)
    left, right = (a.T if trans_a else a).astype("float64"), (b.T if trans_b else b).astype("float64")
    want = left @ right
    scale = max(1.0, np.abs(left).max() * np.abs(right).max() * np.sqrt(k))
    assert np.isfinite(c.astype("float64")).all()
    assert np.abs(c.astype("float64") - want).max() <= tolerance * scale


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("types", TYPES, ids=lambda t: "-".join(t[:3]))
def test_types_and_transposes(types, trans_a, trans_b):
    run(67, 101, 99, (32, 48, 64), types, trans_a, trans_b)


@pytest.mark.parametrize("tile", [(16, 16, 16), (24, 40, 24), (1, 1, 1), (7, 33, 8), (64, 100, 40), (33, 16, 130)])
@pytest.mark.parametrize("types", [TYPES[0], TYPES[4], TYPES[8]], ids=lambda t: t[0])
def test_tiles_that_no_instruction_divides(types, tile):
    run(40, 50, 60, tile, types, False, True)
    run(40, 50, 60, tile, types, True, False)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 33), (65, 1, 64), (64, 64, 64)])
@pytest.mark.parametrize("how", ["optimised", "reference"])
def test_small_shapes(shape, how):
    run(*shape, (32, 32, 32), TYPES[0], False, True, how)


@pytest.mark.parametrize("name", narrow_targets())
@pytest.mark.parametrize("types", [TYPES[0], TYPES[2], TYPES[4], TYPES[8]], ids=lambda t: t[0])
def test_narrower_vector_units(name, types):
    run(50, 70, 90, (32, 40, 32), types, False, True, target=narrow_targets()[name])


@pytest.mark.parametrize("how", ["optimised", "reference"])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("value", [None, -7.0])
def test_tile_mask(how, clear, value):
    @T.prim_func
    def kernel(
        A: T.Tensor((33, 40), "bfloat16"),
        B: T.Tensor((50, 40), "bfloat16"),
        M: T.Tensor((33, 50), "int8"),
        C: T.Tensor((33, 50), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:  # noqa: F841
            a, b = T.alloc_shared((33, 40), "bfloat16"), T.alloc_shared((50, 40), "bfloat16")
            mask, acc = T.alloc_shared((33, 50), "int8"), T.alloc_fragment((33, 50), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.copy(M, mask)
            T.fill(acc, 2.0)
            T.gemm(a, b, acc, transpose_B=True, clear_accum=clear, mask=mask, mask_value=value)
            T.copy(acc, C)

    a, b = operand((33, 40), "bfloat16"), operand((50, 40), "bfloat16")
    mask, c = rng.integers(0, 2, (33, 50)).astype("int8"), poisoned((33, 50), "float32")
    compile_kernel(kernel, how)(a, b, mask, c)
    old = 0.0 if clear else 2.0
    product = a.astype("float64") @ b.astype("float64").T
    # the masked-out elements take mask_value, or keep what they had
    want = np.where(mask != 0, old + product, old if value is None else value)
    np.testing.assert_allclose(c, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["optimised", "reference"])
def test_scalar_mask_slices_and_a_shared_right_operand(how):
    """One tile is the right operand of two products, in both orientations, through slices; a mask skips one of them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((32, 64), "float32"),
        B: T.Tensor((64, 64), "float32"),
        Keep: T.Tensor((2,), "int32"),
        C: T.Tensor((2, 32, 64), "float32"),
        D: T.Tensor((32, 32), "float32"),
    ):
        with T.Kernel(2, threads=128) as bx:
            a, b = T.alloc_shared((32, 64), "float32"), T.alloc_shared((2, 64, 64), "float32")
            acc, part = T.alloc_fragment((32, 64), "float32"), T.alloc_fragment((32, 32), "float32")
            T.copy(A, a)
            T.copy(B, b[1, 0:64, 0:64])
            T.clear(acc)
            T.gemm(a, b[1, 0:64, 0:64], acc, mask=Keep[bx] != 0)
            T.gemm(a[0:32, 16:48], b[1, 32:64, 16:48], part, transpose_B=True, clear_accum=True)
            T.copy(acc, C[bx, 0:32, 0:64])
            if bx == 0:
                T.copy(part, D)

    a, b = operand((32, 64), "float32"), operand((64, 64), "float32")
    c, d = poisoned((2, 32, 64), "float32"), poisoned((32, 32), "float32")
    compile_kernel(kernel, how)(a, b, np.array([0, 1], "int32"), c, d)
    np.testing.assert_array_equal(c[0], 0)
    np.testing.assert_allclose(c[1], a @ b, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d, a[:, 16:48] @ b[32:, 16:48].T, rtol=1e-4, atol=1e-4)


def test_matrix_unit_is_used_where_it_is():
    from tvm_tile.lower.cpu import lower_cpu

    func = gemm(64, 64, 64, (32, 32, 32), "bfloat16", "float32", "float32", False, True)
    text = lower_cpu(func, host_target()).script()
    assert ("tdpbf16ps" in text) == amx_available("bfloat16")


def test_nan_and_infinity_stay_in_their_rows():
    a, b = operand((64, 64), "float32"), operand((64, 64), "float32")
    a[3, 5], a[9, 1] = np.nan, np.inf
    c = poisoned((64, 64), "float32")
    compile_kernel(gemm(64, 64, 64, (32, 32, 32), "float32", "float32", "float32", False, True))(a, b, c)
    rows = np.arange(64)
    assert np.isnan(c[3]).all() and not np.isfinite(c[9]).any()
    others = ~np.isin(rows, [3, 9])
    np.testing.assert_allclose(c[others], (a @ b.T)[others], rtol=1e-4, atol=1e-4)


def test_aarch64_code_uses_fused_vector_multiply_adds():
    """Built only: there is no such machine here."""
    import tvm

    from .harness import PIPELINES, lower_cpu

    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"})
    func = gemm(67, 45, 50, (32, 48, 64), "bfloat16", "float32", "float32", False, True)
    lowered = lower_cpu(func, target).with_attr("global_symbol", "main")
    assembly = tvm.compile(lowered, target, tir_pipeline=PIPELINES[True]).mod.inspect_source("s")
    assert "fmla\tv" in assembly
