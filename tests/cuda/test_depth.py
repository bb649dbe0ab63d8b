"""Products whose warps share sub-tiles along K: values, accumulators that are not cleared, races of the exchange."""

from __future__ import annotations

import pytest
import torch

import tvm_tile.language as T
from tvm_tile import hardware, ir
from tvm_tile.schedule import decide
from tvm_tile.schedule.decisions import read_partition

from .harness import Simulated, check, generator

case, heavy = pytest.param, pytest.mark.heavy
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
START = 1.0


def products(
    m=32,
    n=32,
    k=512,
    more=0,
    dtype="float16",
    trans_a=False,
    trans_b=True,
    clear=False,
    tiles=3,
    threads=128,
    num_stages=0,
    precision="ieee",
):
    """``tiles`` times a product of depth ``k`` and one of depth ``more`` into one accumulator, and the sum of it."""
    depth = k + more
    a_shape, b_shape = ((depth, m) if trans_a else (m, depth)), ((n, depth) if trans_b else (depth, n))

    @T.prim_func
    def products(
        A: T.Tensor((tiles, *a_shape), dtype), B: T.Tensor((tiles, *b_shape), dtype), C: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(1, threads=threads) as bx:
            A_shared = T.alloc_shared(a_shape, dtype)
            B_shared = T.alloc_shared(b_shape, dtype)
            A1 = A_shared[0:k, :] if trans_a else A_shared[:, 0:k]
            A2 = A_shared[k:depth, :] if trans_a else A_shared[:, k:depth]
            B1 = B_shared[:, 0:k] if trans_b else B_shared[0:k, :]
            B2 = B_shared[:, k:depth] if trans_b else B_shared[k:depth, :]
            C_local = T.alloc_fragment((m, n), "float32")
            total = T.alloc_fragment((m, n), "float32")
            T.fill(C_local, START)
            T.clear(total)
            for t in T.Pipelined(tiles, num_stages=num_stages):
                T.copy(A[t, :, :], A_shared)
                T.copy(B[t, :, :], B_shared)
                T.gemm(A1, B1, C_local, trans_a, trans_b, clear_accum=clear, precision=precision)
                if more:
                    T.gemm(A2, B2, C_local, trans_a, trans_b, precision=precision)
                for i, j in T.Parallel(m, n):
                    total[i, j] += C_local[i, j]
            T.copy(total, C)

    return products


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"more": 64, "dtype": "bfloat16", "num_stages": 2, "k": 256},
        {"clear": True, "threads": 256, "m": 64},
        {"more": 32, "clear": True, "m": 16, "n": 64, "trans_b": False, "dtype": "bfloat16"},
        case({"trans_a": True, "trans_b": False, "more": 96, "k": 256, "num_stages": 2}, marks=heavy),
        case({"trans_a": True, "m": 48, "n": 48, "threads": 64}, marks=heavy),
        case({"dtype": "float32", "precision": "tf32", "k": 256, "more": 16}, marks=heavy),
        case({"dtype": "float32", "precision": "tf32", "k": 256, "trans_a": True, "trans_b": False}, marks=heavy),
        case({"m": 64, "n": 32, "threads": 256, "k": 256, "more": 64, "num_stages": 2, "tiles": 1}, marks=heavy),
        case({"m": 48, "n": 64, "threads": 192, "tiles": 2}, marks=heavy),
    ],
    ids=str,
)
def test_products_along_split_k(device, options):
    func = products(**options)
    gemms = [op for op in ir.tile_ops(decide(func, hardware.lookup("sm_80")).body) if isinstance(op, ir.GemmOp)]
    assert [read_partition(g.annotations).k_groups for g in gemms] == [2] * (2 if options.get("more") else 1)
    dtype, random = TORCH[options.get("dtype", "float16")], generator()
    a_shape, b_shape = ([int(e) for e in p.ty.shape] for p in list(func.params)[:2])
    a, b = torch.randn(a_shape, generator=random).to(dtype), torch.randn(b_shape, generator=random).to(dtype)
    left = a.double().transpose(1, 2) if options.get("trans_a") else a.double()
    right = b.double().transpose(1, 2) if options.get("trans_b", True) else b.double()
    each = left @ right
    want = each.sum(0) if options.get("clear") else (START + each.cumsum(0)).sum(0)
    out = torch.full(want.shape, float("nan"))
    # tf32 keeps 10 bits of each factor
    tolerance = (1e-3, 0.3) if dtype == torch.float32 else (1e-4, 2e-3)
    check(device, func, [a, b, out], {2: want.float()}, tolerance)


def test_the_exchange_reads_less_and_has_no_conflicts(device):
    if not isinstance(device, Simulated):
        pytest.skip("the simulator counts")
    random = generator()
    a, b = (torch.randn(3, 32, 512, generator=random).half() for _ in range(2))
    report = device.compile(products())([a, b, torch.zeros(32, 32)]).report
    assert report.bank_conflicts == 0
    # 4 warps, 3 tiles, 16 steps of 16 x 32 sub-tiles: one load of A and two of B
    assert report.instructions["ldmatrix"] == 4 * 3 * 16 * 3
