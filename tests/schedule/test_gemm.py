"""Instruction and warp split of products, and the errors for products that a machine does not have."""

from __future__ import annotations

import json

import pytest

import tvm_tile.language as T
from tvm_tile import hardware, ir
from tvm_tile.errors import TileShapeError, TileTargetError, TileTypeError
from tvm_tile.layout import allowed_triples
from tvm_tile.schedule import decide, default_rules
from tvm_tile.schedule.decisions import read_instruction, read_partition
from tvm_tile.schedule.gemm_instruction import why_not_wgmma

from .kernels import product

SM_80, SM_90 = hardware.lookup("sm_80"), hardware.lookup("sm_90")


def gemm_of(func):
    return next(op for op in ir.tile_ops(func.body) if isinstance(op, ir.GemmOp))


@pytest.mark.parametrize(
    "dtype, accum, k, options, expected",
    [
        ("float16", "float32", 64, {}, "m16n8k16.row.col.f32.f16.f16.f32"),
        ("float16", "float16", 32, {}, "m16n8k16.row.col.f16.f16.f16.f16"),
        ("bfloat16", "float32", 24, {}, "m16n8k8.row.col.f32.bf16.bf16.f32"),
        ("float16", "float32", 40, {}, "m16n8k8.row.col.f32.f16.f16.f32"),
        ("int8", "int32", 64, {}, "m16n8k32.row.col.s32.s8.s8.s32"),
        ("float32", "float32", 16, {"precision": "tf32"}, "m16n8k8.row.col.f32.tf32.tf32.f32"),
    ],
)
def test_tensor_core_instruction(dtype, accum, k, options, expected):
    op = gemm_of(decide(product(dtype=dtype, accum=accum, k=k, **options), SM_80))
    instruction = read_instruction(op.annotations)
    assert instruction.ptx == f"mma.sync.aligned.{expected}"
    part = read_partition(op.annotations)
    assert (part.M, part.N, part.warps) == (64, 64, 4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_full_precision_runs_on_the_cuda_cores(dtype):
    op = gemm_of(decide(product(dtype=dtype, accum=dtype, k=15), SM_80))
    assert json.loads(op.annotations["tile.instruction"]) == ["fma", dtype, dtype, dtype, 1, 1, 1]
    assert read_instruction(op.annotations) is None and read_partition(op.annotations) is None


@pytest.mark.parametrize("policy, split", [("Square", (2, 2)), ("FullRow", (4, 1)), ("FullCol", (1, 4))])
def test_policy(policy, split):
    part = read_partition(gemm_of(decide(product(policy=policy), SM_80)).annotations)
    assert (part.m_warps, part.n_warps) == split


def test_square_honours_the_real_aspect():
    part = read_partition(gemm_of(decide(product(m=128, n=32), SM_80)).annotations)
    assert (part.m_warps, part.n_warps) == (4, 1)


def test_registered_policy():
    name = T.GemmWarpPolicy.register("test_columns_of_two", lambda m, n, warps, instruction: (warps // 2, 2))
    part = read_partition(gemm_of(decide(product(n=128, policy=name), SM_80)).annotations)
    assert (part.m_warps, part.n_warps) == (2, 2)


@pytest.mark.parametrize("m", [1, 8, 15, 24])
def test_rows_are_padded_in_the_tile(m):
    part = read_partition(gemm_of(decide(product(m=m), SM_80)).annotations)
    assert part.M == m and part.padded_m % 16 == 0 and part.padded_m >= m


def test_depth_that_no_instruction_divides():
    with pytest.raises(TileShapeError) as caught:
        decide(product(dtype="int8", accum="int32", k=24), SM_80)
    assert caught.value.message == "T.gemm: K = 24 is no multiple of 32, the k of mma.sync with int8 operands"
    assert caught.value.advice == "make the tile's K 32; T.copy zero-fills what lies beyond the tensor"
    assert caught.value.file.endswith("kernels.py")


def test_fp8_where_the_gpu_has_none():
    with pytest.raises(TileTypeError) as caught:
        decide(product(dtype="float8_e4m3fn"), SM_80)
    assert caught.value.message == "T.gemm: sm_80 has no tensor-core product float8_e4m3fn x float8_e4m3fn -> float32"
    for a, b, c in allowed_triples("mma", 80):
        assert f"{a} x {b} -> {c}" in caught.value.advice
    op = gemm_of(decide(product(dtype="float8_e4m3fn"), SM_90))
    assert read_instruction(op.annotations).k == 32


def test_threads_that_are_no_whole_warps():
    with pytest.raises(TileShapeError) as caught:
        decide(product(threads=48), SM_80)
    assert caught.value.message == "T.gemm: tensor cores work by whole warps, and threads=48 is no multiple of 32"
    assert caught.value.advice == "launch T.Kernel(..., threads=64)"


def test_policy_that_cannot_split():
    with pytest.raises(TileShapeError) as caught:
        decide(product(m=32, policy="FullRow"), SM_80)
    assert caught.value.message == (
        "T.gemm: policy FullRow: 4 x 1 warps do not fit a 32x64 tile with mma: M has to be a multiple of 64 and N of 8"
    )
    assert "splits that fit: 1 x 4, 2 x 2" in caught.value.advice


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"m": 64}, None),
        ({"m": 48}, "M = 48 is no multiple of 64"),
        ({"threads": 96}, "96 threads are no whole warpgroups of 128"),
        ({"k": 24}, "K = 24 is no multiple of 16"),
        ({"n": 72}, "cannot be swizzled"),
        ({"dtype": "int8", "accum": "int32"}, "K along the rows"),
    ],
)
def test_conditions_of_wgmma(changes, reason):
    options = {"m": 64, "n": 64, "k": 64, "threads": 128, **changes}
    found = why_not_wgmma(gemm_of(product(**options)), options["threads"], SM_90)
    assert found is None if reason is None else reason in found
    assert why_not_wgmma(gemm_of(product(**options)), options["threads"], SM_80) == "sm_80 has no wgmma"


def test_families_are_tried_in_order():
    rules = default_rules(SM_90, ("wgmma", "mma"))
    assert read_instruction(gemm_of(decide(product(), SM_90, rules)).annotations).family == "wgmma"
    func = decide(product(m=48), SM_90, rules)
    assert read_instruction(gemm_of(func).annotations).family == "mma"
    assert "not wgmma: M = 48 is no multiple of 64" in str(func.attrs["tile.decisions"])


def preset(func, block, key, value):
    import tvm
    from tvm import s_tir

    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    sch.annotate(sch.get_sblock(block, "main"), key, value)
    return sch.mod["main"]


def test_given_instruction_is_kept_and_checked():
    given = ["mma", "float16", "float16", "float32", 16, 8, 8]
    op = gemm_of(decide(preset(product(), "gemm", "tile.instruction", given), SM_80))
    assert read_instruction(op.annotations).k == 8
    with pytest.raises(TileShapeError, match="K = 24 is no multiple of 16, the k of the given instruction"):
        decide(preset(product(k=24), "gemm", "tile.instruction", [*given[:6], 16]), SM_80)
    with pytest.raises(TileTargetError, match="does not compute float16 x float16 -> float32 on sm_80"):
        decide(preset(product(), "gemm", "tile.instruction", ["wgmma", *given[1:4], 64, 64, 16]), SM_80)


def test_given_partition_is_kept_and_checked():
    from tvm_tile.layout import find_instruction, partition
    from tvm_tile.schedule.decisions import encode

    instruction = find_instruction("mma", "float16", "float16", "float32", 80, 64)
    part = partition("FullCol", 64, 64, 4, instruction)
    func = preset(product(policy="FullRow"), "gemm", "tile.partition", encode(part))
    assert read_partition(gemm_of(decide(func, SM_80)).annotations) == part
    wrong = partition("FullCol", 64, 64, 8, instruction)
    with pytest.raises(TileShapeError, match="the given partition is for 64 x 64 on 8 warps"):
        decide(preset(product(), "gemm", "tile.partition", encode(wrong)), SM_80)


def test_transposed_fragment_operand_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "float16"), B: T.Tensor((32, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_fragment((32, 64), "float16")
            b = T.alloc_shared((32, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, c, transpose_A=True, clear_accum=True)
            T.copy(c, C)

    with pytest.raises(TileTargetError, match=r"A \(a\) is a fragment and transposed"):
        decide(kernel, SM_80)
