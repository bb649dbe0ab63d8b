"""Matrix product with 4-bit weights: packed two to a byte, with a scale (and a zero point) for each group of them."""

from __future__ import annotations

from tvm import tirx

import tvm_tile.language as T

from ..errors import TileShapeError
from .common import check_dtype, check_positive, dimension, finish, next_power_of_two, pick, target_class

__all__ = ["DTYPES", "default_tiles", "dequant_gemm"]

DTYPES = ("float16", "bfloat16")


def default_tiles(m, n: int, k: int, target: str = "sm_80") -> dict:
    """Tile sizes that suit a shape when nothing was tuned; a symbolic m counts as small (decoding).

    Parameters
    ----------
    m, n, k : int or Var
        Sizes.
    target : str
        ``"cpu"``, ``"sm_80"`` or ``"sm_90"``.
    """
    rows = max(16, next_power_of_two(m)) if isinstance(m, int) else 16
    if target == "cpu":
        return {"block_M": min(rows, 256), "block_N": 128, "block_K": 256, "num_stages": 0, "threads": 128}
    return {"block_M": min(rows, 128), "block_N": 128, "block_K": 64, "num_stages": 2, "threads": 128}


def dequant_gemm(
    m,
    n: int,
    k: int,
    *,
    dtype: str = "float16",
    group_size: int = 128,
    zeros: bool = False,
    block_M: int | None = None,
    block_N: int | None = None,
    block_K: int | None = None,
    num_stages: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``C[m, n] = A W^T`` with ``W[n, k] = (q - zero) * scale``, where q is an unsigned 4-bit number.

    The function's parameters are ``A [m, k], Packed uint8 [n, k / 2], Scales [n, k / group_size], [Zeros uint8 [n, k /
    group_size]], C [m, n]``. The low half of byte j of a row is element 2 j, the high half element 2 j + 1. Without
    ``zeros`` the zero point is 8. The weights are rounded to ``dtype`` and the sums are float32.

    Parameters
    ----------
    m : int, Var or None
        Rows; a ``T.dynamic`` variable, or None, for a symbolic size.
    n, k : int
        Sizes of the weights.
    dtype : str
        float16 or bfloat16, of A, Scales and C.
    group_size : int
        Weights of a row that share a scale: even, a divisor of k.
    zeros : bool
        A zero point for each group.
    block_M, block_N, block_K, num_stages, threads
        Tunables.
    target : str, optional
        Which default tile sizes to take; those of sm_80 without it.

    Raises
    ------
    TileError
        For sizes that do not fit each other.
    """
    op = "dequant_gemm"
    dtype = check_dtype(op, "dtype", dtype, DTYPES)
    check_positive(op, n=n, k=k, group_size=group_size)
    m = dimension(op, "m", m)
    if group_size % 2 or k % group_size:
        raise TileShapeError(f"{op}: group_size={group_size} must be even and divide k={k}")
    tiles = default_tiles(m, n, k, "sm_80" if target is None else target_class(target))
    tiles = pick(tiles, block_M=block_M, block_N=block_N, block_K=block_K, num_stages=num_stages, threads=threads)
    block_M, block_N, block_K = tiles["block_M"], tiles["block_N"], tiles["block_K"]
    num_stages, threads = tiles["num_stages"], tiles["threads"]
    check_positive(op, block_M=block_M, block_N=block_N, block_K=block_K, threads=threads)
    if block_K % 2:
        raise TileShapeError(f"{op}: block_K={block_K} is odd, but two weights share a byte")
    groups = k // group_size

    @T.prim_func
    def dequant_gemm(
        A: T.Tensor((m, k), dtype),
        Packed: T.Tensor((n, k // 2), "uint8"),
        Scales: T.Tensor((n, groups), dtype),
        Zeros: T.Tensor((n, groups), "uint8"),
        C: T.Tensor((m, n), dtype),
    ):
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), dtype)
            Packed_shared = T.alloc_shared((block_N, block_K // 2), "uint8")
            W_shared = T.alloc_shared((block_N, block_K), dtype)
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(Packed[bx * block_N, ko * (block_K // 2)], Packed_shared)
                for i, j in T.Parallel(block_N, block_K // 2):
                    group = (ko * block_K + 2 * j) // group_size
                    scale = T.cast(Scales[bx * block_N + i, group], "float32")
                    zero = T.cast(Zeros[bx * block_N + i, group], "float32") if zeros else T.float32(8)
                    byte = T.cast(Packed_shared[i, j], "int32")
                    low = T.cast(T.bitwise_and(byte, 15), "float32")
                    high = T.cast(T.shift_right(byte, 4), "float32")
                    W_shared[i, 2 * j] = T.cast((low - zero) * scale, dtype)
                    W_shared[i, 2 * j + 1] = T.cast((high - zero) * scale, dtype)
                T.gemm(A_shared, W_shared, C_local, transpose_B=True)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return finish(dequant_gemm, optional=("Zeros",))
