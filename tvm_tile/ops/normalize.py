"""Row-wise normalisations: softmax and RMSNorm over rows of any length."""

from __future__ import annotations

from tvm import tirx

import tvm_tile.language as T

from .common import LOG2E, check_dtype, check_positive, dimension, lowest_score, next_power_of_two, target_class

__all__ = ["DTYPES", "default_tiles", "rmsnorm", "softmax"]

DTYPES = ("float16", "bfloat16", "float32")


def default_tiles(rows, columns, dtype: str = "float16", target: str = "sm_80") -> dict:
    """Tile sizes that suit a shape when nothing was tuned.

    Parameters
    ----------
    rows, columns : int or Var
        Sizes; a symbolic one counts as large.
    dtype : str
        Element dtype.
    target : str
        ``"cpu"``, ``"sm_80"`` or ``"sm_90"``.
    """
    width = next_power_of_two(columns) if isinstance(columns, int) else 1024
    block = min(1024, max(32, width))
    return {"block_M": max(1, min(8, 2048 // block)), "block_N": block, "threads": 128}


def softmax(
    rows,
    columns,
    *,
    dtype: str = "float16",
    block_M: int | None = None,
    block_N: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``Y[i, j] = exp(X[i, j]) / sum_j exp(X[i, j])``, reading X twice; a row of -inf gives 0.

    Parameters
    ----------
    rows, columns : int, Var or None
        Sizes of X and Y; a ``T.dynamic`` variable, or None, for symbolic ones.
    dtype : str
        float16, bfloat16 or float32, of X and Y; the sums are float32.
    block_M, block_N, threads
        Tunables: rows of a CTA, columns of a tile, CTA size.
    target : str, optional
        Which default tile sizes to take; those of sm_80 without it.
    """
    dtype = check_dtype("softmax", "dtype", dtype, DTYPES)
    rows, columns = dimension("softmax", "rows", rows), dimension("softmax", "columns", columns)
    block_M, block_N, threads = _tiles("softmax", rows, columns, dtype, target, block_M, block_N, threads)
    lowest = lowest_score(LOG2E)

    @T.prim_func
    def softmax(X: T.Tensor((rows, columns), dtype), Y: T.Tensor((rows, columns), dtype)):
        with T.Kernel(T.ceildiv(rows, block_M), threads=threads) as bx:
            x = T.alloc_fragment((block_M, block_N), "float32")
            top = T.alloc_fragment((block_M,), "float32")
            top_prev = T.alloc_fragment((block_M,), "float32")
            part = T.alloc_fragment((block_M,), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.annotate_safe_value({X: float("-inf")})
            T.fill(top, lowest)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(columns, block_N), num_stages=2):
                T.copy(X[bx * block_M, k * block_N], x)
                T.copy(top, top_prev)
                T.reduce_max(x, top, dim=1, clear=False)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.exp2((x[i, j] - top[i]) * LOG2E)
                T.reduce_sum(x, part, dim=1)
                for i in T.Parallel(block_M):
                    total[i] = total[i] * T.exp2((top_prev[i] - top[i]) * LOG2E) + part[i]
            for k in T.Pipelined(T.ceildiv(columns, block_N), num_stages=2):
                T.copy(X[bx * block_M, k * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = T.if_then_else(total[i] == 0, 0, T.exp2((x[i, j] - top[i]) * LOG2E) / total[i])
                T.copy(x, Y[bx * block_M, k * block_N])

    return softmax


def rmsnorm(
    rows,
    columns,
    *,
    dtype: str = "float16",
    eps: float = 1e-6,
    block_M: int | None = None,
    block_N: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``Y[i, j] = X[i, j] / sqrt(mean_j X[i, j]^2 + eps) * Weight[j]``, reading X twice.

    Parameters
    ----------
    rows, columns : int, Var or None
        Sizes of X and Y; a ``T.dynamic`` variable, or None, for symbolic ones.
    dtype : str
        float16, bfloat16 or float32, of X, Weight and Y; the sums are float32.
    eps : float
        Added to the mean of the squares.
    block_M, block_N, threads
        Tunables: rows of a CTA, columns of a tile, CTA size.
    target : str, optional
        Which default tile sizes to take; those of sm_80 without it.
    """
    dtype = check_dtype("rmsnorm", "dtype", dtype, DTYPES)
    rows, columns = dimension("rmsnorm", "rows", rows), dimension("rmsnorm", "columns", columns)
    block_M, block_N, threads = _tiles("rmsnorm", rows, columns, dtype, target, block_M, block_N, threads)

    @T.prim_func
    def rmsnorm(
        X: T.Tensor((rows, columns), dtype), Weight: T.Tensor((columns,), dtype), Y: T.Tensor((rows, columns), dtype)
    ):
        with T.Kernel(T.ceildiv(rows, block_M), threads=threads) as bx:
            x = T.alloc_fragment((block_M, block_N), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(columns, block_N), num_stages=2):
                T.copy(X[bx * block_M, k * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = x[i, j] * x[i, j]
                T.reduce_sum(x, total, dim=1, clear=False)
            for i in T.Parallel(block_M):
                total[i] = 1.0 / T.sqrt(total[i] / T.cast(columns, "float32") + eps)
            for k in T.Pipelined(T.ceildiv(columns, block_N), num_stages=2):
                T.copy(X[bx * block_M, k * block_N], x)
                for i, j in T.Parallel(block_M, block_N):
                    x[i, j] = x[i, j] * total[i] * T.cast(Weight[k * block_N + j], "float32")
                T.copy(x, Y[bx * block_M, k * block_N])

    return rmsnorm


def _tiles(op: str, rows, columns, dtype: str, target, block_M, block_N, threads) -> tuple[int, int, int]:
    default = default_tiles(rows, columns, dtype, "sm_80" if target is None else target_class(target))
    block_M = default["block_M"] if block_M is None else block_M
    block_N = default["block_N"] if block_N is None else block_N
    threads = default["threads"] if threads is None else threads
    check_positive(op, block_M=block_M, block_N=block_N, threads=threads)
    return block_M, block_N, threads
