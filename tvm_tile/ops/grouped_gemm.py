"""Grouped matrix product: each group of rows has weights of its own (mixture of experts)."""

from __future__ import annotations

from tvm import tirx

import tvm_tile.language as T

from .common import check_dtype, check_positive, dimension, pick, target_class
from .gemm import default_tiles

__all__ = ["DTYPES", "grouped_gemm"]

DTYPES = ("float16", "bfloat16", "float32")


def grouped_gemm(
    total,
    groups: int,
    n: int,
    k: int,
    *,
    dtype: str = "float16",
    block_M: int | None = None,
    block_N: int | None = None,
    block_K: int | None = None,
    num_stages: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``C[r] = A[r] W[g]^T`` for the rows r of each group g.

    The function's parameters are ``A [total, k], W [groups, n, k], Offsets int32 [groups + 1], C [total, n]``. Group g
    has the rows from ``Offsets[g]`` to ``Offsets[g + 1]``; a group may be empty. Rows that belong to no group are not
    written.

    Parameters
    ----------
    total : int, Var or None
        Rows of all groups; a ``T.dynamic`` variable, or None, for a symbolic size.
    groups, n, k : int
        Number of groups and sizes of the weights.
    dtype : str
        float16, bfloat16 or float32.
    block_M, block_N, block_K, num_stages, threads
        Tunables.
    target : str, optional
        Which default tile sizes to take; those of sm_80 without it.

    Raises
    ------
    TileError
        For sizes that are not positive.
    """
    op = "grouped_gemm"
    dtype = check_dtype(op, "dtype", dtype, DTYPES)
    check_positive(op, groups=groups, n=n, k=k)
    total = dimension(op, "total", total)
    rows = -(-total // groups) if isinstance(total, int) else 128
    tiles = default_tiles(rows, n, k, dtype, "sm_80" if target is None else target_class(target))
    tiles = pick(tiles, block_M=block_M, block_N=block_N, block_K=block_K, num_stages=num_stages, threads=threads)
    block_M, block_N, block_K = tiles["block_M"], tiles["block_N"], tiles["block_K"]
    num_stages, threads = tiles["num_stages"], tiles["threads"]
    check_positive(op, block_M=block_M, block_N=block_N, block_K=block_K, threads=threads)

    @T.prim_func
    def grouped_gemm(
        A: T.Tensor((total, k), dtype),
        W: T.Tensor((groups, n, k), dtype),
        Offsets: T.Tensor((groups + 1,), "int32"),
        C: T.Tensor((total, n), dtype),
    ):
        # every group can add one ragged tile
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(total, block_M) + groups, threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            W_shared = T.alloc_shared((block_N, block_K), dtype)
            C_local = T.alloc_fragment((block_M, block_N), "float32")

            # the group and the rows of tile number `by`; none for the last tiles
            tiles_before = T.alloc_var("int32", init=0)
            group = T.alloc_var("int32", init=0)
            row = T.alloc_var("int32", init=0)
            end = T.alloc_var("int32", init=0)
            for g in T.serial(groups):
                tiles_here = T.ceildiv(Offsets[g + 1] - Offsets[g], block_M)
                if by >= tiles_before and by < tiles_before + tiles_here:
                    group = g
                    row = Offsets[g] + (by - tiles_before) * block_M
                    end = Offsets[g + 1]
                tiles_before = tiles_before + tiles_here

            if row < end:
                T.clear(C_local)
                for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                    T.copy(A[row, ko * block_K], A_shared)
                    T.copy(W[group, bx * block_N, ko * block_K], W_shared)
                    T.gemm(A_shared, W_shared, C_local, transpose_B=True)
                for i, j in T.Parallel(block_M, block_N):
                    if row + i < end:
                        C[row + i, bx * block_N + j] = T.cast(C_local[i, j], dtype)

    return grouped_gemm
