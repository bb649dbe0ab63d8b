"""Which copies are issued ahead, and schedules by hand."""

from __future__ import annotations

import json

import pytest
import tvm
from tvm import s_tir

import tvm_tile.language as T
from tvm_tile import hardware, ops
from tvm_tile.errors import TileShapeError, TileSyntaxError
from tvm_tile.schedule import decide
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_log, read_pipeline

from . import kernels as K

SM_80 = hardware.lookup("sm_80")
HALF = "float16"


def plans(func):
    return [
        read_pipeline(scope.node) for kernel in kernel_views(func) for _, scope in kernel.loops
        if "tile.num_stages" in scope.annotations
    ]  # fmt: skip


def reasons(func) -> str:
    return " | ".join(entry[4] for entry in read_log(func) if entry[2] == "pipeline")


@pytest.mark.parametrize("stages", [0, 1, 2, 3])
def test_stages(stages):
    (plan,) = plans(decide(K.pipelined(num_stages=stages), SM_80))
    if stages < 2:
        assert plan is None
    else:
        buffers = {"A_shared": stages, "B_shared": stages}
        assert plan == {"stages": stages, "buffers": buffers, "producers": ["copy", "copy_1"]}


def test_library_kernels_are_pipelined():
    flash = decide(ops.flash_attention(1, 2, 128, 256, 64, causal=True, num_stages=2, target="sm_80"), SM_80)
    assert plans(flash)[0]["buffers"] == {"K_shared": 2, "V_shared": 2}
    mla = decide(ops.flash_mla(2, 16, 512, target="sm_80", page_size=64, block_N=32, num_stages=2), SM_80)
    assert plans(mla)[0]["buffers"] == {"KV_shared": 2, "K_pe_shared": 2}
    grouped = decide(ops.grouped_gemm(4, 256, 128, 128, num_stages=2), SM_80)
    assert plans(grouped)[0]["producers"], reasons(grouped)


def loop(body: str):
    """A pipelined loop over tiles of A whose body is one of several variants."""

    @T.prim_func
    def kernel(
        A: T.Tensor((8, 64, 64), HALF),
        Table: T.Tensor((8,), "int32"),
        Out: T.Tensor((8, 64, 64), HALF),
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), HALF)
            half = T.alloc_shared((64, 64), HALF)
            c = T.alloc_fragment((64, 64), "float32")
            step = T.alloc_var("int32", init=0)
            T.clear(c)
            for k in T.Pipelined(8, num_stages=2):
                if body == "table":
                    T.copy(A[Table[k], 0, 0], a)
                if body == "condition":
                    if Table[k] > 0:
                        T.copy(A[k, 0, 0], a)
                        T.gemm(a, a, c)
                if body == "condition around the copy only":
                    if Table[k] > 0:
                        T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
                if body == "used before":
                    T.gemm(a, a, c)
                    T.copy(A[k, 0, 0], a)
                if body == "two halves":
                    T.copy(A[k, 0:32, :], a[0:32, :])
                    T.copy(A[k, 32:64, :], a[32:64, :])
                    T.gemm(a, a, c)
                if body == "one half":
                    T.copy(A[k, 0:32, :], a[0:32, :])
                    T.gemm(a, a, c)
                if body == "variable":
                    T.copy(A[step, 0, 0], a)
                    step = Table[k]
                    T.gemm(a, a, c)
                if body == "written source":
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
                    T.copy(a, A[7 - k, 0, 0])
                if body == "atomic":
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
                    T.atomic_add(A[k, 0, 0], T.float16(1))
                if body == "inner loop":
                    for h in T.serial(2):
                        T.copy(A[k, 0, 0], a)
                        T.gemm(a, a, c)
                if body == "converted":
                    T.copy(C, a)
                    T.gemm(a, a, c)
                if body == "read after" or body == "read before":
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
                if body == "changed in place":
                    T.copy(A[k, 0, 0], a)
                    for i, j in T.Parallel(64, 64):
                        a[i, j] = a[i, j] * T.float16(2)
                    T.gemm(a, a, c)
                if body == "table":
                    T.gemm(a, a, c)
            if body == "read after":
                T.copy(a, Out[0, 0, 0])
            T.copy(c, C)

    return kernel


@pytest.mark.parametrize("body", ["table", "condition", "two halves", "read after", "changed in place"])
def test_issued_ahead(body):
    (plan,) = plans(decide(loop(body), SM_80))
    assert plan["buffers"] == {"a": 2}
    assert plan["producers"] == (["copy", "copy_1"] if body == "two halves" else ["copy"])


@pytest.mark.parametrize(
    "body, reason",
    [
        ("condition around the copy only", "gemm uses a outside of the branch that fills it"),
        ("used before", "gemm uses a before it is filled"),
        ("one half", "an iteration fills 2048 of the 4096 elements of a"),
        ("variable", "its place depends on step, which an earlier iteration may still change"),
        ("written source", "the kernel writes A"),
        ("atomic", "the kernel writes A"),
        ("inner loop", "it stands in an inner loop"),
        ("converted", "it is no asynchronous copy"),
    ],
)
def test_not_issued_ahead(body, reason):
    func = decide(loop(body), SM_80)
    assert plans(func) == [None]
    assert reason in reasons(func)


def test_tile_read_before_the_loop_of_the_next_round():
    @T.prim_func
    def kernel(A: T.Tensor((8, 64, 64), HALF), Out: T.Tensor((4, 64, 64), HALF), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), HALF)
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            T.copy(A[0, 0, 0], a)
            for r in T.serial(4):
                T.copy(a, Out[r, 0, 0])
                for k in T.Pipelined(8, num_stages=2):
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
            T.copy(c, C)

    func = decide(kernel, SM_80)
    assert plans(func) == [None] and "uses a before the loop" in reasons(func)


def test_two_loops_may_share_their_tiles():
    @T.prim_func
    def kernel(A: T.Tensor((8, 64, 64), HALF), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), HALF)
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c)
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[4 + k, 0, 0], a)
                T.gemm(a, a, c)
            T.copy(c, C)

    assert [p["buffers"] for p in plans(decide(kernel, SM_80))] == [{"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    "order, stage, copies",
    [([0, 1, 2], [0, 0, 1], 2), ([1, 2, 0], [0, 0, 1], 1), ([0, 1, 2], [0, 0, 2], 3), ([0, 1, 2], [0, 0, 0], 1)],
)
def test_schedule_by_hand(order, stage, copies):
    (plan,) = plans(decide(K.pipelined(order=order, stage=stage), SM_80))
    assert (plan["order"], plan["stage"], plan["stages"]) == (order, stage, max(stage) + 1)
    assert plan["buffers"] == ({"A_shared": copies, "B_shared": copies} if copies > 1 else {})


def test_statement_before_what_it_needs():
    with pytest.raises(TileShapeError) as caught:
        decide(K.pipelined(order=[2, 1, 0], stage=[0, 0, 0]), SM_80)
    assert caught.value.message == (
        "T.Pipelined: statement 2 (gemm, stage 0, order 0) is placed before statement 0 (copy, stage 0, order 2), "
        "but both use A_shared"
    )
    assert caught.value.advice == "statement 2 needs a later stage than 0, or the same stage and a later order"


def test_value_that_only_lasts_an_iteration():
    @T.prim_func
    def kernel(A: T.Tensor((8, 64, 64), HALF), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), HALF)
            s = T.alloc_fragment((64, 64), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(8, order=[0, 1, 2], stage=[0, 0, 1]):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, s, clear_accum=True)
                for i, j in T.Parallel(64, 64):
                    c[i, j] += s[i, j]
            T.copy(c, C)

    with pytest.raises(TileShapeError) as caught:
        decide(kernel, SM_80)
    assert caught.value.message == (
        "T.Pipelined: statement 1 (gemm) of a later iteration would run before statement 2 (parallel) of this one, "
        "but s holds one iteration's values"
    )


def test_variables_in_a_schedule_by_hand():
    @T.prim_func
    def kernel(A: T.Tensor((8, 64, 64), HALF), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), HALF)
            c = T.alloc_fragment((64, 64), "float32")
            row = T.alloc_var("int32", init=0)
            T.clear(c)
            for k in T.Pipelined(8, order=[0, 1, 2], stage=[0, 1, 1]):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c)
                row = row + 1
            T.copy(c, C)

    with pytest.raises(TileSyntaxError, match="row is assigned in a loop with order= or stage="):
        decide(kernel, SM_80)


def given_plan(**changes):
    """The two-stage plan of K.pipelined(), given before the rules run."""
    plan = {"stages": 2, "buffers": {"A_shared": 2, "B_shared": 2}, "producers": ["copy", "copy_1"], **changes}
    sch = s_tir.Schedule(tvm.IRModule({"main": K.pipelined(num_stages=4)}))
    (loop,) = [x for x in sch.get_loops(sch.get_sblock("gemm", "main")) if sch.get(x).loop_var.name == "ko"]
    sch.annotate(loop, "tile.pipeline", json.dumps(plan))
    return sch.mod["main"]


def test_given_plan_is_kept():
    func = decide(given_plan(), SM_80)
    assert plans(func)[0]["stages"] == 2
    assert reasons(func) == "given before the rules ran"
    (plan,) = plans(decide(given_plan(buffers={"A_shared": 2}, producers=["copy"]), SM_80))
    assert plan["buffers"] == {"A_shared": 2}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"producers": ["copy", "gemm"]}, "issues gemm ahead in 2 stages, but it is no copy from a tensor"),
        ({"buffers": {"A_shared": 2}}, "issues copy_1 ahead in 2 stages, but B_shared has 1 copies"),
        ({"producers": ["copy"]}, "has copies of B_shared, which no copy that it issues ahead fills"),
    ],
)
def test_given_plan_is_checked(changes, message):
    with pytest.raises(TileShapeError, match=message):
        decide(given_plan(**changes), SM_80)


def test_balance_names_what_to_try():
    assert "fewer iterations than stages: num_stages=2 is enough" in reasons(
        decide(K.pipelined(tiles=2, num_stages=3), SM_80)
    )
    assert "fewer than 10 iterations" in reasons(decide(K.pipelined(tiles=4, num_stages=2), SM_80))
    assert "16 iterations, 8192 bytes each: copy 0.43 us" in reasons(decide(K.pipelined(tiles=16), SM_80))
