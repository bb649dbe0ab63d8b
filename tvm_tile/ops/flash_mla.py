"""Multi-head latent attention decode (DeepSeek-V2, 2024): one query a sequence, keys and values from one latent cache.

The keys are the latent vectors KV beside the rotary part K_pe, the values are KV again, so that a tile of the cache is
read once for both products. Long sequences are split over CTAs, whose partial results a second kernel combines
(flash-decoding).
"""

from __future__ import annotations

import math

from tvm import tirx

import tvm_tile.language as T

from ..errors import TileShapeError, TileTypeError
from .common import (
    KEPT_GROWTH,
    LN2,
    LOG2E,
    check_dtype,
    check_positive,
    dimension,
    divisor_tile,
    finish,
    lowest_score,
    next_power_of_two,
    pick,
    target_class,
)

__all__ = ["DTYPES", "default_splits", "default_tiles", "flash_mla"]

DTYPES = ("bfloat16", "float16", "float32")


def default_tiles(heads: int, dim: int, dtype: str = "bfloat16", target: str = "sm_90", pe_dim: int = 64) -> dict:
    """Tile sizes that suit a shape when nothing was tuned.

    Parameters
    ----------
    heads : int
        Query heads that share one head of the cache.
    dim : int
        Width of the latent vectors.
    dtype : str
        Element dtype.
    target : str
        ``"cpu"``, ``"sm_80"`` or ``"sm_90"``.
    pe_dim : int
        Width of the rotary part.

    Returns
    -------
    dict
        block_H (query heads), block_N (cache rows), num_stages, threads. Fewer heads than 64 take the next power of
        two, at least 16, the instructions' rows; the rows beyond ``heads`` are computed and dropped. At width 512 + 64
        two stages of 64 cache rows fill the 227 KB of sm_90, two of 32 the 163 KB of sm_80; three of 32 where fewer
        heads leave room, for whom the copies take most of the time.
    """
    tiles = {"block_H": max(16, min(64, next_power_of_two(heads))), "block_N": 64, "num_stages": 2, "threads": 256}
    if target == "cpu":
        tiles |= {"block_N": 128, "num_stages": 0, "threads": 128}
    elif dtype == "float32":
        tiles |= {"block_H": min(16, tiles["block_H"]), "block_N": 16, "num_stages": 1, "threads": 128}
    elif target == "sm_80" and dim > 256:
        room = (tiles["block_H"] + 3 * 32) * (dim + pe_dim) * 2 <= 150 * 1024
        tiles |= {"block_N": 32, "num_stages": 3 if room else 2}
    if tiles["block_H"] < 64:
        tiles["threads"] = 128
    return tiles


def default_splits(batch: int, heads: int, kv_len: int, block_H: int, block_N: int, workers: int = 132) -> int:
    """Slices of the cache that finish soonest when every worker (SM, core) runs one CTA at a time.

    The estimate counts tiles of the cache: those of a slice and about four for its start and end, in each wave of CTAs,
    and a tenth for each slice that is combined.

    Parameters
    ----------
    batch, heads, kv_len : int
        Sizes.
    block_H, block_N : int
        Tile sizes.
    workers : int
        CTAs that run at once.
    """
    ctas, tiles = batch * -(-heads // block_H), max(1, -(-kv_len // block_N))

    def time(splits: int) -> float:
        combine = 0.0 if splits == 1 else 0.1 * splits
        return -(-ctas * splits // workers) * (-(-tiles // splits) + 4) + combine

    return min(range(1, min(tiles, workers) + 1), key=time)


def flash_mla(
    batch: int,
    heads: int,
    kv_len,
    *,
    kv_heads: int = 1,
    dim: int = 512,
    pe_dim: int = 64,
    dtype: str = "bfloat16",
    packed: bool = False,
    page_size: int | None = None,
    num_pages: int | None = None,
    finite_cache: bool = False,
    num_splits: int | None = 1,
    sm_scale: float | None = None,
    block_H: int | None = None,
    block_N: int | None = None,
    num_stages: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``Output = softmax(sm_scale (Q KV^T + Q_pe K_pe^T)) KV`` over the valid rows of each sequence's cache.

    The function's parameters are ``Q, [Q_pe], KV, [K_pe], [BlockTable], Lengths, [glse, Output_partial], Output, Lse``:

    - Q ``[batch, heads, dim]`` and Q_pe ``[batch, heads, pe_dim]``, or with ``packed`` one Q of width dim + pe_dim
    - KV ``[batch, kv_len, kv_heads, dim]`` and K_pe ``[batch, kv_len, kv_heads, pe_dim]``, or with ``packed`` one cache
      of width dim + pe_dim; with ``page_size`` the leading dimensions are ``[num_pages, page_size]``
    - BlockTable int32 ``[batch, ceil(kv_len / page_size)]``: the page that holds each piece of a sequence
    - Lengths int32 ``[batch]``, each from 0 to kv_len: the valid rows, the first ones
    - glse ``[batch, heads, num_splits]`` and Output_partial ``[batch, heads, num_splits, dim]``, float32: workspaces
      with ``num_splits > 1``, which the caller allocates
    - Output ``[batch, heads, dim]`` and Lse ``[batch, heads]`` in float32 (natural logarithm)

    A sequence of length 0 gives 0, and -inf in Lse. What is stored in the cache beyond a sequence's length does not
    matter.

    Parameters
    ----------
    batch, heads : int
        Sizes.
    kv_len : int, Var or None
        Rows of the cache for a sequence at most; a ``T.dynamic`` variable, or None, for a symbolic size.
    kv_heads : int
        Heads of the cache, a divisor of ``heads``.
    dim, pe_dim : int
        Width of the latent and of the rotary part, multiples of 16.
    dtype : str
        bfloat16, float16 or float32, of all tensors but the workspaces and Lse.
    packed : bool
        One query tensor and one cache tensor, the rotary part last.
    page_size, num_pages : int, optional
        A paged cache: rows of a page (a multiple of block_N) and number of pages (``batch * ceil(kv_len / page_size)``
        by default).
    finite_cache : bool
        The caller promises that the cache holds no NaN or infinity beyond the lengths, which saves the kernel from
        clearing these rows of a tile.
    num_splits : int, optional
        Slices of a sequence that run in parallel; None chooses by :func:`default_splits`.
    sm_scale : float, optional
        Positive factor of the scores, ``(dim + pe_dim) ** -0.5`` by default.
    block_H, block_N, num_stages, threads
        Tunables: query heads and cache rows of a tile, pipeline depth, CTA size.
    target : str, optional
        Which default tile sizes to take (see :func:`default_tiles`); those of sm_90 without it.

    Raises
    ------
    TileError
        For sizes or options that do not fit each other.
    """
    op = "flash_mla"
    dtype = check_dtype(op, "dtype", dtype, DTYPES)
    check_positive(op, batch=batch, heads=heads, kv_heads=kv_heads, dim=dim, pe_dim=pe_dim)
    kv_len = dimension(op, "kv_len", kv_len)
    if heads % kv_heads:
        raise TileShapeError(f"{op}: kv_heads={kv_heads} does not divide heads={heads}")
    for name, size in (("dim", dim), ("pe_dim", pe_dim)):
        if size % 16:
            raise TileShapeError(
                f"{op}: {name}={size} is not a multiple of 16", advice=f"pad it with zeros to {-(-size // 16) * 16}"
            )
    kv_group_num = heads // kv_heads
    where = "sm_90" if target is None else target_class(target)
    tiles = default_tiles(kv_group_num, dim, dtype, where, pe_dim)
    if isinstance(page_size, int) and page_size > 0:
        tiles["block_N"] = divisor_tile(page_size, tiles["block_N"])
    tiles = pick(tiles, block_H=block_H, block_N=block_N, num_stages=num_stages, threads=threads)
    block_H, block_N, threads = tiles["block_H"], tiles["block_N"], tiles["threads"]
    num_stages = tiles["num_stages"]
    check_positive(op, block_H=block_H, block_N=block_N, threads=threads)
    page_size, num_pages, table = _pages(page_size, num_pages, batch, kv_len, block_N)
    if num_splits is None:
        if not isinstance(kv_len, int):
            raise TileTypeError(f"{op}: num_splits must be given for a symbolic kv_len")
        num_splits = default_splits(batch, heads, kv_len, block_H, block_N)
    check_positive(op, num_splits=num_splits)
    if sm_scale is not None and not (isinstance(sm_scale, int | float) and sm_scale > 0 and math.isfinite(sm_scale)):
        raise TileTypeError(f"{op}: sm_scale={sm_scale!r} must be a positive, finite number")

    # the warps of mma.sync read least of shared memory for square parts of the scores; narrow tiles have no others
    squares = where == "sm_80" or block_N % (threads // 4) != 0
    paged = page_size is not None
    # heads of one head of the cache that a CTA handles, and CTAs for all heads
    valid_block_H = divisor_tile(kv_group_num, block_H)
    blocks = heads // valid_block_H
    accum_dtype = "float32"
    scale = float(sm_scale if sm_scale is not None else (dim + pe_dim) ** -0.5) * LOG2E
    lowest = lowest_score(scale)
    pe = dim if packed else 0  # where the rotary part begins
    width = dim + pe_dim if packed else dim
    rows = (num_pages, page_size) if paged else (batch, kv_len)

    @T.prim_func
    def flash_mla(
        Q: T.Tensor((batch, heads, width), dtype),
        Q_pe: T.Tensor((batch, heads, pe_dim), dtype),
        KV: T.Tensor((*rows, kv_heads, width), dtype),
        K_pe: T.Tensor((*rows, kv_heads, pe_dim), dtype),
        BlockTable: T.Tensor((batch, table), "int32"),
        Lengths: T.Tensor((batch,), "int32"),
        glse: T.Tensor((batch, heads, num_splits), accum_dtype),
        Output_partial: T.Tensor((batch, heads, num_splits, dim), accum_dtype),
        Output: T.Tensor((batch, heads, dim), dtype),
        Lse: T.Tensor((batch, heads), accum_dtype),
    ):
        with T.Kernel(blocks, batch, num_splits, threads=threads) as (hid, bid, sid):
            Q_shared = T.alloc_shared([block_H, dim], dtype)
            Q_pe_shared = T.alloc_shared([block_H, pe_dim], dtype)
            KV_shared = T.alloc_shared([block_N, dim], dtype)
            K_pe_shared = T.alloc_shared([block_N, pe_dim], dtype)
            S_shared = T.alloc_shared([block_H, block_N], dtype)
            acc_s = T.alloc_fragment([block_H, block_N], accum_dtype)
            acc_o = T.alloc_fragment([block_H, dim], accum_dtype)
            scores_max = T.alloc_fragment([block_H], accum_dtype)
            scores_max_prev = T.alloc_fragment([block_H], accum_dtype)
            scores_scale = T.alloc_fragment([block_H], accum_dtype)
            scores_sum = T.alloc_fragment([block_H], accum_dtype)
            logsum = T.alloc_fragment([block_H], accum_dtype)
            T.use_swizzle(10)

            Q_rope = Q if packed else Q_pe
            K_rope = KV if packed else K_pe
            head0 = hid * valid_block_H
            cur_kv_head = hid // (kv_group_num // valid_block_H)
            T.copy(Q[bid, head0 : head0 + block_H, 0:dim], Q_shared)
            T.copy(Q_rope[bid, head0 : head0 + block_H, pe : pe + pe_dim], Q_pe_shared)
            T.clear(acc_o)
            T.clear(logsum)
            T.fill(scores_max, lowest)

            # the tiles of this split
            seqlen_kv = T.max(T.min(Lengths[bid], kv_len), 0)
            tiles_kv = T.ceildiv(seqlen_kv, block_N)
            tiles_split = T.ceildiv(tiles_kv, num_splits)
            first = T.min(sid * tiles_split, tiles_kv)
            loop_range = T.min(tiles_kv - first, tiles_split)

            for k in T.Pipelined(loop_range, num_stages=num_stages):
                start = (first + k) * block_N
                if paged:
                    page = BlockTable[bid, start // page_size]
                    row = start % page_size
                    T.copy(KV[page, row : row + block_N, cur_kv_head, 0:dim], KV_shared)
                    T.copy(K_rope[page, row : row + block_N, cur_kv_head, pe : pe + pe_dim], K_pe_shared)
                else:
                    T.copy(KV[bid, start : start + block_N, cur_kv_head, 0:dim], KV_shared)
                    T.copy(K_rope[bid, start : start + block_N, cur_kv_head, pe : pe + pe_dim], K_pe_shared)
                if squares:
                    T.gemm(Q_shared, KV_shared, acc_s, transpose_B=True, clear_accum=True)
                    T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True)
                else:
                    T.gemm(
                        Q_shared, KV_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol, clear_accum=True
                    )
                    T.gemm(Q_pe_shared, K_pe_shared, acc_s, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                if start + block_N > seqlen_kv:
                    for i, j in T.Parallel(block_H, block_N):
                        acc_s[i, j] = T.if_then_else(start + j < seqlen_kv, acc_s[i, j], -T.infinity(accum_dtype))
                    if not finite_cache:
                        # a NaN left in the cache must not enter 0 * KV
                        for i, j in T.Parallel(block_N, dim):
                            if start + i >= seqlen_kv:
                                KV_shared[i, j] = 0
                T.copy(scores_max, scores_max_prev)
                T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                for i in T.Parallel(block_H):
                    # a maximum that grew by little stays as it was, so that the accumulator does too
                    grown = (scores_max[i] - scores_max_prev[i]) * scale > KEPT_GROWTH
                    scores_max[i] = T.if_then_else(grown, scores_max[i], scores_max_prev[i])
                for i in T.Parallel(block_H):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * scale)
                for i, j in T.Parallel(block_H, block_N):
                    acc_s[i, j] = T.exp2(acc_s[i, j] * scale - scores_max[i] * scale)
                T.reduce_sum(acc_s, scores_sum, dim=1)
                T.copy(acc_s, S_shared)
                for i in T.Parallel(block_H):
                    logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]
                for i, j in T.Parallel(block_H, dim):
                    acc_o[i, j] *= scores_scale[i]
                T.gemm(S_shared, KV_shared, acc_o, policy=T.GemmWarpPolicy.FullCol)

            # no valid row in this split: logsum is 0, and its logarithm -inf
            for i, j in T.Parallel(block_H, dim):
                acc_o[i, j] = T.if_then_else(logsum[i] == 0, 0, acc_o[i, j] / logsum[i])
            for i in T.Parallel(block_H):
                logsum[i] = T.log2(logsum[i]) + scores_max[i] * scale
            if num_splits > 1:
                for i, j in T.Parallel(valid_block_H, dim):
                    Output_partial[bid, head0 + i, sid, j] = acc_o[i, j]
                for i in T.Parallel(valid_block_H):
                    glse[bid, head0 + i, sid] = logsum[i]
            else:
                O_shared = T.alloc_shared([block_H, dim], dtype)
                T.copy(acc_o, O_shared)
                T.copy(O_shared[0:valid_block_H, :], Output[bid, head0 : head0 + valid_block_H, :])
                for i in T.Parallel(valid_block_H):
                    Lse[bid, head0 + i] = logsum[i] * LN2

        if num_splits > 1:
            with T.Kernel(heads, batch, threads=128) as (head, bid):
                o_accum = T.alloc_fragment([dim], accum_dtype)
                lse_max = T.alloc_var(accum_dtype, init=lowest)
                lse_sum = T.alloc_var(accum_dtype, init=0)
                T.clear(o_accum)
                for k in T.serial(num_splits):
                    lse_max = T.max(lse_max, glse[bid, head, k])
                for k in T.serial(num_splits):
                    weight = T.exp2(glse[bid, head, k] - lse_max)
                    lse_sum += weight
                    for i in T.Parallel(dim):
                        o_accum[i] += Output_partial[bid, head, k, i] * weight
                for i in T.Parallel(dim):
                    Output[bid, head, i] = T.cast(T.if_then_else(lse_sum == 0, 0, o_accum[i] / lse_sum), dtype)
                Lse[bid, head] = (T.log2(lse_sum) + lse_max) * LN2

    return finish(flash_mla, optional=("Q_pe", "K_pe", "BlockTable", "glse", "Output_partial"))


def _pages(page_size, num_pages, batch: int, kv_len, block_N: int):
    """(page_size, num_pages, columns of the block table); (None, None, 1) for a dense cache."""
    if page_size is None:
        if num_pages is not None:
            raise TileTypeError("flash_mla: num_pages needs page_size")
        return None, None, 1
    check_positive("flash_mla", page_size=page_size)
    if not isinstance(kv_len, int):
        raise TileTypeError("flash_mla: a paged cache needs an int kv_len, the most rows of a sequence")
    if page_size % block_N:
        raise TileShapeError(
            f"flash_mla: page_size={page_size} is not a multiple of block_N={block_N}",
            advice=f"use block_N={divisor_tile(page_size, block_N)}",
        )
    columns = -(-kv_len // page_size)
    if num_pages is None:
        num_pages = batch * columns
    check_positive("flash_mla", num_pages=num_pages)
    return page_size, num_pages, columns
