"""Copy instructions, vector widths, shared layouts and alignment."""

from __future__ import annotations

import pytest

import tvm_tile.language as T
from tvm_tile import hardware, ir
from tvm_tile.errors import TileTargetError
from tvm_tile.schedule import decide
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_alignment, read_copy, read_log, read_loop, read_shared, read_vector

from . import kernels as K
from .test_gemm import preset

SM_80, SM_90 = hardware.lookup("sm_80"), hardware.lookup("sm_90")


def first_copy(func):
    return next(op for op in ir.tile_ops(func.body) if isinstance(op, ir.CopyOp))


def load(shape, start=(0, 0), tile=(32, 64), dtype="float16", tile_dtype=None, threads=128, safe=None, assume=None):
    """A tile loaded from global to shared memory and stored back."""
    tile_dtype = tile_dtype or dtype

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), B: T.Tensor(tile, tile_dtype)):
        if assume is not None:
            T.assume(assume)
        with T.Kernel(4, threads=threads) as bx:
            if safe is not None:
                T.annotate_safe_value({A: safe})
            s = T.alloc_shared(tile, tile_dtype)
            T.copy(A[bx * tile[0] + start[0], start[1]], s)
            T.copy(s, B)

    return kernel


@pytest.mark.parametrize(
    "shape, options, kind, vector",
    [
        ((128, 64), {}, "cp.async", 8),
        ((128, 64), {"dtype": "float32"}, "cp.async", 4),
        ((128, 64), {"dtype": "int8", "tile": (32, 64)}, "cp.async", 16),
        ((100, 64), {}, "cp.async", 8),  # a row guard is the same for all elements of a vector
        ((128, 72), {"start": (0, 8)}, "cp.async", 8),
        ((128, 72), {"start": (0, 4)}, "cp.async", 4),
        ((128, 68), {}, "cp.async", 4),  # rows are multiples of 4 elements only
        ((128, 66), {}, "cp.async", 2),
        ((128, 65), {}, "scalar", 1),  # 2 bytes are less than cp.async moves
        ((128, 60), {}, "cp.async", 4),  # so are the bounds
        ((128, 64), {"tile_dtype": "float32"}, "vector", 4),  # cp.async does not convert
        ((100, 64), {"safe": -1.0}, "vector", 8),  # cp.async fills with zero
        ((128, 64), {"safe": -1.0}, "cp.async", 8),  # nothing is outside
        ((128, 64), {"tile": (4, 64)}, "cp.async", 2),  # 256 elements for 128 threads
    ],
)
def test_loads(shape, options, kind, vector):
    op = first_copy(decide(load(shape, **options), SM_80))
    plan = read_copy(op.annotations)
    assert (plan.kind, plan.vector) == (kind, vector)
    loop = read_loop(op.annotations)
    assert loop.vector_width(1, 1, vector) == vector


def test_symbolic_rows_need_an_assumption():
    n = T.dynamic("n")
    assert read_copy(first_copy(decide(load((128, n)), SM_80)).annotations).kind == "scalar"
    m = T.dynamic("m")
    plan = read_copy(first_copy(decide(load((128, m), assume=m % 8 == 0), SM_80)).annotations)
    assert (plan.kind, plan.vector) == ("cp.async", 8)


def test_strided_rows():
    @T.prim_func
    def kernel(A: T.StridedTensor((64, 64), (72, 1), "float16"), X: T.StridedTensor((64, 64), (128, 2), "float16")):
        with T.Kernel(1, threads=128) as bx:
            s = T.alloc_shared((64, 64), "float16")
            T.copy(A, s)
            T.copy(X, s)
            T.copy(s, A)

    plans = [read_copy(op.annotations) for op in ir.tile_ops(decide(kernel, SM_80).body) if isinstance(op, ir.CopyOp)]
    assert [(p.kind, p.vector) for p in plans] == [("cp.async", 8), ("scalar", 1), ("vector", 8)]


def test_transposed_copy_is_not_vectorised():
    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float32"), B: T.Tensor((32, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            for i, j in T.Parallel(32, 64):
                B[i, j] = A[j, i]

    op = next(ir.tile_ops(decide(kernel, SM_80).body))
    assert read_vector(op.annotations) == 1
    # neighbouring threads still store side by side
    assert read_loop(op.annotations).thread_digits[-1].dim == 1


@pytest.mark.parametrize(
    "condition, vector",
    [
        (lambda i, j: i < 5, 4),
        (lambda i, j: j < 8, 4),
        (lambda i, j: j < 6, 2),
        (lambda i, j: j <= i, 1),
        (lambda i, j: j >= 12, 4),
        (lambda i, j: j > 11, 4),
        (lambda i, j: j > 12, 1),
    ],
)
def test_conditions_limit_vectors(condition, vector):
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "float32"), B: T.Tensor((32, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            for i, j in T.Parallel(32, 64):
                if condition(i, j):
                    B[i, j] = A[i, j]

    assert read_vector(next(ir.tile_ops(decide(kernel, SM_80).body)).annotations) == vector


@pytest.mark.parametrize("dtype, kind", [("float16", "staged"), ("float32", "vector")])
def test_stores_of_accumulators(dtype, kind):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), dtype)):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, clear_accum=True)
            T.copy(c, C)

    store = [op for op in ir.tile_ops(decide(kernel, SM_80).body) if isinstance(op, ir.CopyOp)][-1]
    plan = read_copy(store.annotations)
    # 16-bit elements: four lanes hold 16 bytes of a row side by side, half a sector
    assert plan.kind == kind and plan.vector == (8 if kind == "staged" else 2)


@pytest.mark.parametrize("hw, kinds", [(SM_80, ["ldmatrix", "vector"]), (SM_90, ["ldmatrix", "stmatrix"])])
def test_matrix_moves(hw, kinds):
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            f = T.alloc_fragment((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(a, f)
            T.gemm(f, a, c, clear_accum=True, policy=T.GemmWarpPolicy.FullRow)
            T.copy(c, a)
            T.copy(a, B)

    copies = [op for op in ir.tile_ops(decide(kernel, hw).body) if isinstance(op, ir.CopyOp)]
    assert [read_copy(op.annotations).kind for op in copies[1:3]] == kinds


def test_fragments_of_mixed_width_load_whole_vectors():
    @T.prim_func
    def kernel(A: T.Tensor((16, 1024), "float16"), B: T.Tensor((16, 1024), "float16")):
        with T.Kernel(1, threads=128) as bx:
            x = T.alloc_fragment((16, 1024), "float32")
            T.copy(A, x)
            T.copy(x, B)

    plans = [read_copy(op.annotations) for op in ir.tile_ops(decide(kernel, SM_80).body)]
    assert [(p.kind, p.vector) for p in plans] == [("vector", 8)] * 2


def test_alignment_is_what_vectors_need():
    assert read_alignment(decide(load((128, 64)), SM_80)) == {"A": 16, "B": 16}
    assert read_alignment(decide(load((128, 66)), SM_80)) == {"A": 4, "B": 16}
    assert "A" not in read_alignment(decide(load((128, 65)), SM_80))


@pytest.mark.parametrize(
    "shape, dtype, span, pad",
    [
        ((64, 64), "float16", 128, 0),
        ((64, 32), "float16", 64, 0),
        ((64, 16), "float16", 32, 0),
        ((64, 24), "float16", 0, 0),
        ((64, 128), "int8", 128, 0),
    ],
)
def test_operand_tiles_are_swizzled(shape, dtype, span, pad):
    m, k = shape
    accum = "int32" if dtype == "int8" else "float32"
    func = decide(K.product(m=m, n=64, k=k, dtype=dtype, accum=accum, trans_b=True), SM_80)
    layout = read_shared(kernel_views(func)[0].info.block)["A_shared"]
    assert (layout.span, layout.pad) == (span, pad)


def narrow(swizzle: bool):
    @T.prim_func
    def kernel(A: T.Tensor((64, 24), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(4, 4, threads=128) as (bx, by):
            T.use_swizzle(2, enable=swizzle)
            a = T.alloc_shared((64, 24), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.gemm(a, a, c, transpose_B=True, clear_accum=True)
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize("swizzle", [True, False])
def test_tile_that_cannot_be_swizzled_is_reported(swizzle):
    (entry,) = [e for e in read_log(decide(narrow(swizzle), SM_80)) if e[1] == "a"]
    assert entry[4].startswith("not swizzled: a row of 24 elements has 48 bytes, no multiple of 32")
    assert entry[5:] == (["warning"] if swizzle else [])
    assert ("T.use_swizzle is in effect" in entry[4]) == swizzle


def test_tiles_of_scalars_are_row_major():
    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            s = T.alloc_shared((64, 64), "float32")
            for i, j in T.Parallel(64, 64):
                s[i, j] = A[j, i]
            for i, j in T.Parallel(64, 64):
                A[i, j] = s[i, 63 - j]

    layout = read_shared(kernel_views(decide(kernel, SM_80))[0].info.block)["s"]
    assert (layout.span, layout.pad) == (0, 0)


def test_given_copy_is_kept_and_checked():
    given = {"kind": "vector", "vector": 4}
    op = first_copy(decide(preset(load((128, 64)), "copy", "tile.copy", given), SM_80))
    assert read_copy(op.annotations).vector == 4 and read_loop(op.annotations).vector_width(1, 1, 4) == 4
    with pytest.raises(TileTargetError, match="the given copy instruction cp.async of 8 elements does not fit A -> s"):
        decide(preset(load((128, 66)), "copy", "tile.copy", {"kind": "cp.async", "vector": 8}), SM_80)
    with pytest.raises(TileTargetError, match="possible here: scalar, vector of up to 1 elements"):
        decide(preset(load((128, 65)), "copy", "tile.copy", {"kind": "cp.async", "vector": 1}), SM_80)
