"""``ops.gemm``: dtypes, transposes, ragged and symbolic sizes, split-K, bias."""

from __future__ import annotations

import pytest
import torch

import tvm_tile
from tests.ops.harness import check, compare
from tvm_tile.errors import TileError
from tvm_tile.ops import gemm

TILE = {"block_M": 32, "block_N": 32, "block_K": 32}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("size", [(64, 96, 128), (65, 33, 77)], ids=["round", "ragged"])
def test_dtypes(dtype, size):
    check("gemm", dict(zip("mnk", size, strict=True)), dtype)


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transposes(trans_a, trans_b, dtype):
    check("gemm", {"m": 45, "n": 70, "k": 99, "trans_a": trans_a, "trans_b": trans_b}, dtype, **TILE)


@pytest.mark.parametrize("size", [(1, 1, 1), (1, 70, 5), (33, 1, 64), (7, 9, 31), (40, 40, 65)])
@pytest.mark.parametrize("lowering", ["optimised", "reference"])
def test_tiny_and_trip_counts(size, lowering):
    """K of 1, 2 and 3 tiles, sizes below a tile."""
    check("gemm", dict(zip("mnk", size, strict=True)), "float32", lowering, **TILE, num_stages=3)


@pytest.mark.parametrize("block_K", [8, 24, 40])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_block_k_that_is_no_multiple_of_an_instruction(block_K, dtype):
    """tilelang 2381: the tail of K must not be dropped."""
    check("gemm", {"m": 40, "n": 40, "k": 100}, dtype, block_M=32, block_N=32, block_K=block_K)


@pytest.mark.parametrize(
    ("split_k", "k"), [(2, 128), (3, 100), (5, 130), (4, 160)], ids=["even", "ragged", "empty slice", "uneven"]
)
def test_split_k(split_k, k):
    check("gemm", {"m": 33, "n": 45, "k": k, "split_k": split_k}, "float32", **TILE | {"block_K": 16})


def test_split_k_with_bias():
    check("gemm", {"m": 33, "n": 45, "k": 100, "split_k": 3, "bias": True}, "bfloat16", **TILE | {"block_K": 16})


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_bias(dtype):
    check("gemm", {"m": 33, "n": 45, "k": 50, "bias": True}, dtype, **TILE)


def test_symbolic_sizes():
    """One compiled kernel for every shape, odd ones included."""
    kernel = tvm_tile.compile(gemm(None, None, None, dtype="float32", **TILE), "llvm")
    for m, n, k in [(1, 1, 1), (7, 100, 33), (64, 32, 32), (101, 65, 1)]:
        a, b, c = torch.randn(m, k), torch.randn(n, k), torch.full((m, n), float("nan"))
        kernel(a, b, c)
        compare(c, a.double() @ b.double().T, (1e-5, 1e-5))


def test_one_symbolic_size():
    kernel = tvm_tile.compile(gemm(None, 40, 50, dtype="bfloat16", **TILE), "llvm")
    for m in (1, 33):
        a, b = torch.randn(m, 50).bfloat16(), torch.randn(40, 50).bfloat16()
        c = torch.full((m, 40), float("nan"), dtype=torch.bfloat16)
        kernel(a, b, c)
        compare(c, a.float() @ b.float().T, (8e-3, 1e-4))


@pytest.mark.parametrize(("out_dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 8e-3)])
def test_out_dtype(out_dtype, tolerance):
    kernel = tvm_tile.compile(gemm(20, 30, 40, dtype="float16", out_dtype=out_dtype), "llvm")
    a, b = torch.randn(20, 40).half(), torch.randn(30, 40).half()
    c = torch.full((20, 30), float("nan"), dtype=getattr(torch, out_dtype))
    kernel(a, b, c)
    compare(c, a.float() @ b.float().T, (tolerance, 1e-4))


def test_nan_stays_in_its_row_and_column():
    kernel = tvm_tile.compile(gemm(40, 40, 40, dtype="float32", **TILE), "llvm")
    a, b, c = torch.randn(40, 40), torch.randn(40, 40), torch.full((40, 40), float("nan"))
    a[3, 5] = float("nan")
    b[7, 39] = float("nan")
    kernel(a, b, c)
    compare(c, a.double() @ b.double().T, (1e-5, 1e-5))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gemm(0, 4, 4), "m=0 is not positive"),
        (lambda: gemm(4, 4.0, 4), "n must be an int, but it is 4.0"),
        (lambda: gemm(4, 4, 4, dtype="float61"), "dtype='float61' is not possible"),
        (lambda: gemm(4, 4, 4, dtype="int8", out_dtype="float16"), "out_dtype='float16' does not fit dtype='int8'"),
        (lambda: gemm(4, 4, 4, dtype="bfloat16", out_dtype="int32"), "does not fit"),
        (lambda: gemm(4, 4, 64, split_k=9), "has only 1 tiles of block_K"),
        (lambda: gemm(4, 4, 4, dtype="bfloat16", accum_dtype="float16"), "bfloat16"),
        (lambda: gemm(4, 4, 4, policy="Diagonal"), "Diagonal"),
    ],
)
def test_mistakes_are_refused(call, text):
    with pytest.raises(TileError, match=text):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_larger_than_the_default_tiles(dtype):
    check("gemm", {"m": 1000, "n": 1001, "k": 333}, dtype)
