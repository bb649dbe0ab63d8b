"""``dequant_gemm``, ``grouped_gemm``, ``softmax`` and ``rmsnorm``."""

from __future__ import annotations

import math

import pytest
import torch

import tvm_tile
from tests.ops.harness import check, compare, generator
from tvm_tile.errors import TileError
from tvm_tile.ops import dequant_gemm, grouped_gemm, rmsnorm, softmax

TILE = {"block_M": 16, "block_N": 32, "block_K": 32}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("m", "group_size"), [(1, 32), (20, 48), (33, 96)])
def test_dequant_gemm(dtype, zeros, m, group_size):
    shape = {"m": m, "n": 50, "k": 96, "group_size": group_size, "zeros": zeros}
    check("dequant_gemm", shape, dtype, **TILE)


def test_dequant_gemm_default_tiles_and_symbolic_rows():
    check("dequant_gemm", {"m": 7, "n": 200, "k": 384}, "float16")
    func = dequant_gemm(None, 24, 64, group_size=32)
    kernel = tvm_tile.compile(func, "llvm")
    packed = torch.full(
        (24, 32), 0x9A, dtype=torch.uint8
    )  # elements 2 (low half) and 1 (high half) above the zero point
    scales = torch.full((24, 2), 0.5, dtype=torch.float16)
    for m in (1, 21):
        a, c = torch.randn(m, 64, generator=generator(m)).half(), torch.full((m, 24), math.nan, dtype=torch.float16)
        kernel(a, packed, scales, c)
        want = (a[:, 0::2].float().sum(1) * 1.0 + a[:, 1::2].float().sum(1) * 0.5)[:, None].expand(m, 24)
        compare(c, want, (1e-3, 1e-3))


def test_dequant_gemm_reference_lowering():
    check("dequant_gemm", {"m": 5, "n": 20, "k": 64, "group_size": 32, "zeros": True}, "float16", "reference", **TILE)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 48}, "group_size=48 must be even and divide k=64"),
        ({"group_size": 1}, "must be even"),
        ({"dtype": "int8"}, "dtype='int8' is not possible"),
        ({"block_K": 17}, "block_K=17 is odd"),
    ],
    ids=str,
)
def test_dequant_gemm_refuses_mistakes(options, text):
    with pytest.raises(TileError, match=text):
        dequant_gemm(8, 32, 64, **{"group_size": 32, **options})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("total", "groups"), [(100, 7), (10, 12), (64, 1)])
@pytest.mark.parametrize("lowering", ["optimised", "reference"])
def test_grouped_gemm(dtype, total, groups, lowering):
    """Empty groups, groups smaller than a tile, one group."""
    check("grouped_gemm", {"total": total, "groups": groups, "n": 50, "k": 45}, dtype, lowering, **TILE)


def test_grouped_gemm_symbolic_rows_and_rows_without_group():
    kernel = tvm_tile.compile(grouped_gemm(None, 3, 20, 30, dtype="float32", **TILE), "llvm")
    w = torch.randn(3, 20, 30, generator=generator())
    for total, offsets in [(40, [0, 40, 40, 40]), (33, [2, 2, 19, 30])]:
        a, c = torch.randn(total, 30, generator=generator(total)), torch.full((total, 20), 7.0)
        want = torch.full((total, 20), 7.0, dtype=torch.float64)
        for g in range(3):
            rows = slice(offsets[g], offsets[g + 1])
            want[rows] = a[rows].double() @ w[g].double().T
        kernel(a, w, torch.tensor(offsets, dtype=torch.int32), c)
        compare(c, want, (1e-5, 1e-5))


@pytest.mark.parametrize("op", ["softmax", "rmsnorm"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [(1, 1), (13, 333), (8, 128), (3, 2000)], ids=str)
def test_row_wise(op, dtype, size):
    check(op, {"rows": size[0], "columns": size[1]}, dtype)


def test_row_wise_symbolic_sizes():
    x_kernel, y_kernel = (
        tvm_tile.compile(op(None, None, dtype="float32", block_N=64), "llvm") for op in (softmax, rmsnorm)
    )
    for rows, columns in [(1, 1), (7, 65), (20, 300)]:
        x, w = torch.randn(rows, columns), torch.randn(columns)
        y = torch.full_like(x, math.nan)
        x_kernel(x, y)
        compare(y, x.double().softmax(1), (1e-5, 1e-6))
        y_kernel(x, w, y)
        compare(y, x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt() * w.double(), (1e-5, 1e-6))


def test_softmax_edges():
    """Rows of -inf give 0, large values do not overflow, NaN stays in its row."""
    x = torch.randn(5, 100)
    x[0] = -math.inf
    x[1, :70] = -math.inf
    x[2] *= 1e4
    x[3] -= 1e5
    x[4, 50] = math.nan
    y = torch.full_like(x, math.nan)
    tvm_tile.compile(softmax(5, 100, dtype="float32", block_N=32), "llvm")(x, y)
    want = x.double().softmax(1)
    want[0] = 0
    compare(y, want, (1e-4, 1e-6))


def test_rmsnorm_eps():
    x, w, y = torch.zeros(2, 50), torch.ones(50), torch.full((2, 50), math.nan)
    x[1, 0] = 1.0
    tvm_tile.compile(rmsnorm(2, 50, dtype="float32", eps=0.25), "llvm")(x, w, y)
    compare(y, x.double() / math.sqrt(1 / 50 + 0.25), (1e-5, 1e-6))
