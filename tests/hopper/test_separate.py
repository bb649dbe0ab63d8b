"""Tiles that several loops fill: each loop has its own, so that a producer runs ahead into the next loop."""

import dataclasses

import pytest
import torch
from tvm_ffi import structural_equal

import tvm_tile
import tvm_tile.language as T
from tvm_tile.schedule import decide
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_roles

from .harness import close, decided, machine, reason, simulated

ROWS, COLUMNS, FIRST, SECOND = 200, 136, 152, 328


def summed(rounds: int | None = None, block_K: int = 64, peek: bool = False, stages: int = 3):
    """``relu(A1 B1^T) + A2 B2^T`` through one pair of tiles; ``rounds`` times within a loop; ``peek`` behind it too."""

    @T.prim_func
    def main(
        A1: T.Tensor((ROWS, FIRST), "float16"),
        B1: T.Tensor((COLUMNS, FIRST), "float16"),
        A2: T.Tensor((ROWS, SECOND), "float16"),
        B2: T.Tensor((COLUMNS, SECOND), "float16"),
        C: T.Tensor((ROWS, COLUMNS), "float32"),
        Last: T.Tensor((128, block_K), "float16"),
    ):
        with T.Kernel(T.ceildiv(COLUMNS, 128), T.ceildiv(ROWS, 128), threads=256) as (bx, by):
            a, b = T.alloc_shared((128, block_K), "float16"), T.alloc_shared((128, block_K), "float16")
            c = T.alloc_fragment((128, 128), "float32")
            T.clear(c)
            for turn in T.serial(1 if rounds is None else rounds):
                for k in T.Pipelined(T.ceildiv(FIRST, block_K), num_stages=stages):
                    T.copy(A1[by * 128, k * block_K], a)
                    T.copy(B1[bx * 128, k * block_K], b)
                    T.gemm(a, b, c, transpose_B=True)
                for i, j in T.Parallel(128, 128):
                    c[i, j] = T.max(c[i, j], 0)
                for k in T.Pipelined(T.ceildiv(SECOND, block_K), num_stages=stages):
                    T.copy(A2[by * 128, k * block_K], a)
                    T.copy(B2[bx * 128, k * block_K], b)
                    T.gemm(a, b, c, transpose_B=True)
            if peek:
                if bx + by == 0:
                    T.copy(a, Last)
            T.copy(c, C[by * 128, bx * 128])

    return main


def inputs():
    g = torch.Generator().manual_seed(3)
    shapes = ((ROWS, FIRST), (COLUMNS, FIRST), (ROWS, SECOND), (COLUMNS, SECOND))
    return [(torch.randn(*s, generator=g) / 4).half() for s in shapes]


def tiles(func) -> set[str]:
    view = kernel_views(func)[0]
    return {b.name for b in view.info.buffers if str(b.ty.storage_scope).startswith("shared")}


@pytest.mark.parametrize("rounds", [None, 2])
def test_each_loop_has_its_tiles(rounds):
    func = decided(summed(rounds))
    assert tiles(func) == {"a", "b", "a_1", "b_1"}
    assert len(read_roles(kernel_views(func)[0].info.block)["rings"]) == 2
    assert "a tile of its own for each loop" in reason(func, "separate")
    a1, b1, a2, b2 = inputs()
    want = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for _ in range(rounds or 1):
        want = (want + a1.double() @ b1.double().T).clamp(min=0) + a2.double() @ b2.double().T
    for seed in (0, 2):
        c, last = torch.full((ROWS, COLUMNS), float("nan")), torch.zeros(128, 64).half()
        simulated(func, seed)(a1, b1, a2, b2, c, last)
        close(c, want, 10_000)


def test_tiles_that_do_not_fit_twice_stay_one():
    """As it was written, by one role, and the log says why."""
    small = dataclasses.replace(machine(2), shared_per_block=120 * 1024)
    func = summed().with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    func = decide(func, small)
    assert tiles(func) == {"a", "b"} and not read_roles(kernel_views(func)[0].info.block)
    assert "tried, but" in reason(func, "separate")
    a1, b1, a2, b2 = inputs()
    c, last = torch.full((ROWS, COLUMNS), float("nan")), torch.zeros(128, 64).half()
    simulated(func)(a1, b1, a2, b2, c, last)
    close(c, (a1.double() @ b1.double().T).clamp(min=0) + a2.double() @ b2.double().T, 10_000)


def test_a_tile_that_is_used_behind_the_loops_stays():
    """The last tile of the second loop is stored: ``a`` stays, ``b`` alone could be separated."""
    func = decided(summed(peek=True))
    assert "a_1" not in tiles(func)
    a1, b1, a2, b2 = inputs()
    c, last = torch.full((ROWS, COLUMNS), float("nan")), torch.zeros(128, 64).half()
    simulated(func)(a1, b1, a2, b2, c, last)
    close(c, (a1.double() @ b1.double().T).clamp(min=0) + a2.double() @ b2.double().T, 10_000)
    wanted = torch.zeros(128, 64).half()
    wanted[:, : SECOND - 320] = a2[:128, 320:]
    assert torch.equal(last, wanted)


def test_deciding_again_changes_nothing():
    func = decided(summed())
    assert structural_equal(func, decide(func, machine(2)))
