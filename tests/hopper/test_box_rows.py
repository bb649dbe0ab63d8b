"""Loads of tiles that are taller than their tensor bring its rows only; the rest is zero as the language says."""

import pytest
import torch

import tvm_tile.language as T
from tvm_tile.lower.cuda import kernel as lowering
from tvm_tile.ops import gemm
from tvm_tile.simulate import SimulationError

from .harness import close, decided, reason, simulated, stores

TILE = {"block_M": 64, "block_N": 64, "block_K": 128, "num_stages": 3, "threads": 128}


@pytest.mark.parametrize(("m", "n"), [(1, 128), (17, 40), (63, 8), (64, 64)])
def test_few_rows(m, n):
    k = 392
    func = decided(gemm(m, n, k, dtype="float16", **TILE), 132)
    plans = stores(func)
    assert plans["A_shared"][2] == (m if m < 64 else None)
    assert plans["B_shared"][2] == (n if n < 64 else None)
    a, b = torch.randn(m, k).half(), torch.randn(n, k).half()
    c = torch.full((m, n), float("nan"), dtype=torch.float16)
    simulated(func)(a, b, c)
    close(c, a.double() @ b.double().T, k)


def test_zeros_reach_the_result():
    @T.prim_func
    def main(A: T.Tensor((5, 64), "float16"), B: T.Tensor((64, 64), "float16"), S: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as bx:
            A_s = T.alloc_shared((64, 64), "float16")
            B_s = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            total = T.alloc_fragment((64,), "float32")
            T.clear(acc)
            for _ in T.Pipelined(1, num_stages=2):
                T.copy(A[bx * 64, 0], A_s)
                T.copy(B, B_s)
                T.gemm(A_s, B_s, acc, transpose_B=True)
            T.reduce_sum(acc, total, dim=0)
            T.copy(total, S)

    func = decided(main, 132)
    assert stores(func)["A_s"][2] == 5
    a, b = torch.randn(5, 64).half(), torch.randn(64, 64).half()
    s = torch.full((64,), float("nan"))
    simulated(func)(a, b, s)
    close(s, (a.double() @ b.double().T).sum(0), 320)


def test_rows_are_cleared(monkeypatch):
    """Without the clearing the products read memory that nothing wrote."""
    monkeypatch.setattr(lowering, "clear_rows", lambda *_: None)
    func = decided(gemm(3, 64, 128, dtype="float16", **TILE), 132)
    with pytest.raises(SimulationError):
        simulated(func)(torch.randn(3, 128).half(), torch.randn(64, 128).half(), torch.empty(3, 64).half())


def test_reason_without_such_tiles():
    func = decided(gemm(64, 64, 128, dtype="float16", **TILE), 132)
    assert "no load is taller" in reason(func, "box_rows")
