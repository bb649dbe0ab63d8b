"""Persistent grids: every tile once, in any number of waves and iterations, without races."""

import pytest
import torch
import tvm

import tvm_tile.language as T
from tvm_tile.ops import gemm

from .harness import close, ctas, decided, reason, simulated, stores

SMALL = {"block_M": 128, "block_N": 64, "block_K": 64, "num_stages": 3, "threads": 256}


def product(shape, sms: int, seed: int = 0, dtype="bfloat16", **options):
    m, n, k = shape
    func = decided(gemm(m, n, k, dtype=dtype, **{**SMALL, **options}), sms)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    a, b = (torch.randn(rows, k, generator=generator).to(kind) for rows in (m, n))
    c = torch.full((m, n), float("nan"), dtype=kind)
    simulated(func, seed)(a, b, c)
    close(c, a.double() @ b.double().T, k)
    return func


@pytest.mark.parametrize(
    ("shape", "sms"),
    [
        ((256, 192, 64), 4),  # a wave and a half, one iteration a tile
        ((250, 200, 200), 3),  # ragged in all dimensions
        ((128, 320, 328), 1),  # one CTA does everything; iterations are no multiple of the stages
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_tile_once(shape, sms, seed):
    func = product(shape, sms, seed)
    assert ctas(func) == sms


@pytest.mark.parametrize("panel", [1, 2, 3])
def test_panels(panel):
    assert ctas(product((380, 200, 64), 2, panel=panel)) == 2


def test_ring_of_boxes_beside_full_rings():
    """Four boxes a warpgroup pass through two slots: the loads' tiles leave no room for more."""
    tile = {"block_M": 128, "block_N": 256, "block_K": 64, "num_stages": 4}
    func = product((250, 520, 136), 2, **tile)
    assert ctas(func) == 2
    assert stores(func)["C"] == ("tma", 2, None)


def kernel_of_trips(stages: int):
    """A product over the first ``trips`` tiles of K; the trip count is a parameter."""

    @T.prim_func
    def main(
        A: T.Tensor((128, 512), "float16"), B: T.Tensor((192, 512), "float16"), C: T.Tensor((128, 192), "float32"),
        trips: T.int32,
    ):  # fmt: skip
        with T.Kernel(3, 1, threads=256) as (bx, by):
            A_s = T.alloc_shared((128, 64), "float16")
            B_s = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((128, 64), "float32")
            T.clear(acc)
            for ko in T.Pipelined(trips, num_stages=stages):
                T.copy(A[by * 128, ko * 64], A_s)
                T.copy(B[bx * 64, ko * 64], B_s)
                T.gemm(A_s, B_s, acc, transpose_B=True)
            T.copy(acc, C[by * 128, bx * 64])

    return main


@pytest.mark.parametrize("trips", [0, 1, 2, 4, 5])
def test_trip_counts(trips):
    func = decided(kernel_of_trips(3), 2)
    assert ctas(func) == 2
    a, b = torch.randn(128, 512).half(), torch.randn(192, 512).half()
    c = torch.full((128, 192), float("nan"))
    simulated(func, trips)(a, b, c, trips)
    k = trips * 64
    close(c, a[:, :k].double() @ b[:, :k].double().T, max(k, 1))


def test_one_wave_stays_as_it_is():
    func = decided(gemm(128, 128, 64, dtype="bfloat16", **SMALL), 2)
    assert ctas(func) is None
    assert "no more than one wave" in reason(func, "persistent")


def test_uneven_tiles_are_left_to_the_hardware():
    func = decided(gemm(256, 256, 640, dtype="bfloat16", split_k=2, **SMALL), 2)
    assert ctas(func) is None
    assert "depend on the tile" in reason(func, "persistent")


def test_one_role_is_not_persistent():
    func = decided(gemm(256, 256, 77, dtype="bfloat16", **SMALL), 2)
    assert ctas(func) is None
    assert "no warps of their own" in reason(func, "persistent")


@pytest.mark.parametrize("sms", [2, 132])
def test_deciding_again_changes_nothing(sms):
    once = decided(gemm(256, 256, 64, dtype="bfloat16", **SMALL), sms)
    tvm.ir.assert_structural_equal(decided(once, sms), once)


def test_given_grid_is_kept():
    func = gemm(256, 256, 64, dtype="bfloat16", **SMALL)
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": func}))
    schedule.annotate(schedule.get_sblock("kernel", "main"), "tile.persistent", 0)
    func = decided(schedule.mod["main"], 2)
    assert ctas(func) == 0
    a, b = torch.randn(256, 64).bfloat16(), torch.randn(256, 64).bfloat16()
    c = torch.full((256, 256), float("nan"), dtype=torch.bfloat16)
    report = simulated(func)(a, b, c)
    close(c, a.double() @ b.double().T, 64)
    assert report.blocks == 8


def test_accumulators_too_large_for_four_warpgroups():
    """ptxas wants 154 registers for an accumulator of 128, and 512 threads are launched with 128."""
    tile = {"block_M": 192, "block_N": 256, "block_K": 64, "num_stages": 3, "threads": 384, "policy": "FullRow"}
    func = decided(gemm(4000, 4104, 1000, dtype="bfloat16", **tile), 132)
    assert "accumulates 128 registers" in reason(func, "roles")
    assert ctas(func) is None
