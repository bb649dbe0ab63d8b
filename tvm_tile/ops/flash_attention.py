"""Attention with an online softmax (FlashAttention-2): causal, sliding window, block-sparse, bias, variable length.

Source of the algorithm: T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
2023; the online softmax is from M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018.
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
    round_up,
    spread,
    target_class,
)

__all__ = ["DTYPES", "default_threads", "default_tiles", "flash_attention"]

DTYPES = ("float16", "bfloat16", "float32")

#: About as many CTAs as a large GPU runs at a time.
_BLOCKS_AT_ONCE = 128


def default_tiles(
    seq_q,
    seq_kv,
    dim: int,
    dtype: str = "float16",
    target: str = "sm_80",
    heads: int = 1,
    *,
    skips: bool = True,
    bias: bool = False,
) -> dict:
    """Tile sizes that suit a shape when nothing was tuned.

    Parameters
    ----------
    seq_q, seq_kv : int or Var
        Lengths; a symbolic one counts as large.
    dim : int
        Width of a head.
    dtype : str
        Element dtype.
    target : str
        ``"cpu"``, ``"sm_80"`` or ``"sm_90"``.
    heads : int
        Heads of all sequences, each with CTAs of its own: a CPU's tiles have fewer rows where some cores got none.
    skips : bool
        Whether tiles of keys are skipped or masked (causal, a window, a block mask): narrower ones then waste less.
    bias : bool
        Whether a bias is added, which takes registers.

    Returns
    -------
    dict
        block_M (query rows), block_N (keys), num_stages, threads. Wide heads and float32 take narrower tiles, because
        Q, K, V and the accumulator grow with them.
    """
    wide = dim > 128 or dtype == "float32"
    if target == "cpu":
        tiles = {"block_M": 256, "block_N": 256, "num_stages": 0}
    elif dtype == "float32":
        tiles = {"block_M": 64, "block_N": 32, "num_stages": 1}
    elif target == "sm_90":
        tiles = {**_hopper_tiles(dim, skips, bias), "num_stages": 2}
    else:
        tiles = {"block_M": 64 if wide else 128, "block_N": 64, "num_stages": 1 if wide else 2}
    for name, size in (("block_M", seq_q), ("block_N", seq_kv)):
        if isinstance(size, int) and size < tiles[name]:
            tiles[name] = min(tiles[name], max(16, next_power_of_two(size)))
    if target == "cpu":
        tiles["block_M"] = spread(tiles["block_M"], seq_q, heads)
    return {**tiles, "threads": default_threads(tiles["block_M"], target)}


def _hopper_tiles(dim: int, skips: bool, bias: bool) -> dict:
    """Tiles of two or three warpgroups with 64 rows each, as many keys as the registers of a warpgroup hold."""
    if dim <= 64 and not bias:
        return {"block_M": 192, "block_N": 128}
    if dim <= 128:
        return {"block_M": 128, "block_N": 128 if skips else 176}
    return {"block_M": 128, "block_N": 80}


def default_threads(block_M: int, target: str = "sm_80") -> int:
    """CTA size for a number of query rows: warps split the rows alone, so that a row's softmax stays in one warp.

    Parameters
    ----------
    block_M : int
        Query rows of a tile.
    target : str
        ``"sm_90"``: a warpgroup for each 64 rows, three at most; else a warp for each 16 rows, four at most.
    """
    if target == "sm_90" and block_M % 64 == 0:
        return 128 * max(n for n in (1, 2, 3) if block_M % (64 * n) == 0)
    return 32 * max(w for w in (1, 2, 4) if w == 1 or block_M % (16 * w) == 0)


def flash_attention(
    batch: int,
    heads: int,
    seq_q,
    seq_kv,
    dim: int,
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    window: int | None = None,
    dtype: str = "float16",
    block_mask: int | None = None,
    bias: bool | tuple[int, int] = False,
    varlen: bool = False,
    lse: bool = True,
    sm_scale: float | None = None,
    block_M: int | None = None,
    block_N: int | None = None,
    num_stages: int | None = None,
    threads: int | None = None,
    target=None,
) -> tirx.PrimFunc:
    """``O = softmax(sm_scale Q K^T + bias) V`` for each batch and head, and the logarithm of the softmax's sum.

    The function's parameters are ``Q, K, V, [CuQ, CuK], [Bias], [BlockMask], O, [Lse]``. Q and O are ``[batch, seq_q,
    heads, dim]``, K and V ``[batch, seq_kv, kv_heads, dim]``, Lse is ``[batch, heads, seq_q]`` in float32 (natural
    logarithm).

    Query row i stands at position ``i + seq_kv - seq_q``: the last query sees the last key (bottom-right alignment). A
    row with no valid key gives 0, and -inf in Lse. A NaN in a row of Q gives NaN in that row only; one in K reaches the
    rows that see that key. One in V reaches, besides the rows that see it, other rows of the same tile: their weight is
    0, and 0 * NaN is NaN, as in the plain formula.

    Parameters
    ----------
    batch, heads, dim : int
        Sizes; any ``dim`` from 1 to 256.
    seq_q, seq_kv : int, Var or None
        Lengths; a ``T.dynamic`` variable, or None, for symbolic ones.
    kv_heads : int, optional
        Heads of K and V, a divisor of ``heads`` (grouped-query attention; 1 is multi-query); ``heads`` by default.
    causal : bool
        A query sees no key after its own position.
    window : int, optional
        A query at position p sees keys p - window + 1 to p; without ``causal`` also those up to p + window - 1.
    dtype : str
        float16, bfloat16 or float32, of Q, K, V, O and Bias.
    block_mask : int, optional
        Block-sparse attention with blocks of this many rows and keys: BlockMask is int8 ``[batch, heads, ceil(seq_q /
        block_mask), ceil(seq_kv / block_mask)]``, and a block whose entry is 0 is skipped. The tiles are divisors of
        it.
    bias : bool or (int, int)
        Bias ``[B', H', seq_q, seq_kv]`` is added to the scaled scores; the pair gives B' (1 or batch) and H' (1 or
        heads), True stands for (1, heads). -inf masks.
    varlen : bool
        The sequences of a batch have different lengths and lie one after another: Q and O are ``[seq_q, heads, dim]``,
        K and V ``[seq_kv, kv_heads, dim]``, Lse ``[heads, seq_q]``, where ``seq_q`` and ``seq_kv`` are the sums. CuQ
        and CuK (int32 ``[batch + 1]``) are the running sums of the lengths, from 0.
    lse : bool
        Write Lse.
    sm_scale : float, optional
        Positive factor of the scores, ``dim ** -0.5`` by default.
    block_M, block_N, num_stages, threads
        Tunables: query rows and keys of a tile, pipeline depth, CTA size.
    target : str, optional
        Which default tile sizes to take (see :func:`default_tiles`); those of sm_80 without it.

    Raises
    ------
    TileError
        For sizes or options that do not fit each other.
    """
    op = "flash_attention"
    dtype = check_dtype(op, "dtype", dtype, DTYPES)
    kv_heads = heads if kv_heads is None else kv_heads
    check_positive(op, batch=batch, heads=heads, dim=dim, kv_heads=kv_heads)
    seq_q, seq_kv = dimension(op, "seq_q", seq_q), dimension(op, "seq_kv", seq_kv)
    if heads % kv_heads:
        raise TileShapeError(f"{op}: kv_heads={kv_heads} does not divide heads={heads}")
    if dim > 256:
        raise TileShapeError(f"{op}: dim={dim} is above 256", advice="flash_mla is for wide latent heads")
    if window is not None:
        check_positive(op, window=window)
    scale = _scale(sm_scale, dim)
    bias_shape = _bias_shape(bias, batch, heads)
    if varlen and (bias or block_mask):
        raise TileTypeError(f"{op}: varlen cannot be combined with {'bias' if bias else 'block_mask'}")
    where = "sm_80" if target is None else target_class(target)
    skips = causal or window is not None or block_mask is not None
    tiles = default_tiles(seq_q, seq_kv, dim, dtype, where, batch * heads, skips=skips, bias=bool(bias))
    if block_mask:
        check_positive(op, block_mask=block_mask)
        tiles |= {name: divisor_tile(block_mask, tiles[name]) for name in ("block_M", "block_N")}
    tiles["threads"] = default_threads(block_M or tiles["block_M"], where)
    tiles = pick(tiles, block_M=block_M, block_N=block_N, num_stages=num_stages, threads=threads)
    block_M, block_N, threads = tiles["block_M"], tiles["block_N"], tiles["threads"]
    num_stages = tiles["num_stages"]
    check_positive(op, block_M=block_M, block_N=block_N, threads=threads)
    sparse = block_mask or 1
    for name, size in (("block_M", block_M), ("block_N", block_N)):
        if block_mask and block_mask % size:
            raise TileShapeError(f"{op}: {name}={size} does not divide block_mask={block_mask}")

    group = heads // kv_heads
    width = round_up(dim, 16)  # the instructions' k; what is beyond dim is zero
    # with a bias the scores are scaled when it is added, else inside exp2
    score_scale = 1.0 if bias else scale * LOG2E
    lowest = lowest_score(score_scale)
    Q_shape = (seq_q, heads, dim) if varlen else (batch, seq_q, heads, dim)
    K_shape = (seq_kv, kv_heads, dim) if varlen else (batch, seq_kv, kv_heads, dim)
    lse_shape = (heads, seq_q) if varlen else (batch, heads, seq_q)
    # Whether a key beyond the end can be in a tile: its scores must then be masked.
    ragged_kv = varlen or not isinstance(seq_kv, int) or seq_kv % block_N != 0
    masked = ragged_kv or causal or window is not None
    # Causal: from the last tile down. Blocks of rows start one after another, the longest first, and so read the same
    # tiles at the same time.
    descending = causal and not varlen
    beside = _heads_beside(seq_q, block_M, heads) if causal and not varlen and where != "cpu" else 1

    @T.prim_func
    def flash_attention(
        Q: T.Tensor(Q_shape, dtype),
        K: T.Tensor(K_shape, dtype),
        V: T.Tensor(K_shape, dtype),
        CuQ: T.Tensor((batch + 1,), "int32"),
        CuK: T.Tensor((batch + 1,), "int32"),
        Bias: T.Tensor((*bias_shape, seq_q, seq_kv), dtype),
        BlockMask: T.Tensor((batch, heads, T.ceildiv(seq_q, sparse), T.ceildiv(seq_kv, sparse)), "int8"),
        Out: T.Tensor(Q_shape, dtype),
        Lse: T.Tensor(lse_shape, "float32"),
    ):
        with T.Kernel(T.ceildiv(seq_q, block_M) * beside, heads // beside, batch, threads=threads) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, width), dtype)
            K_shared = T.alloc_shared((block_N, width), dtype)
            V_shared = T.alloc_shared((block_N, width), dtype)
            acc_s = T.alloc_fragment((block_M, block_N), "float32")
            acc_s_cast = T.alloc_fragment((block_M, block_N), dtype)
            acc_o = T.alloc_fragment((block_M, width), "float32")
            scores_max = T.alloc_fragment((block_M,), "float32")
            scores_max_prev = T.alloc_fragment((block_M,), "float32")
            scores_scale = T.alloc_fragment((block_M,), "float32")
            scores_sum = T.alloc_fragment((block_M,), "float32")
            logsum = T.alloc_fragment((block_M,), "float32")

            head = by * beside + bx % beside
            rows = bx // beside
            # where the sequence starts and how long it is
            q_start = CuQ[bz] if varlen else 0
            k_start = CuK[bz] if varlen else 0
            len_q = CuQ[bz + 1] - q_start if varlen else seq_q
            len_kv = CuK[bz + 1] - k_start if varlen else seq_kv
            # causal rows differ in length: the longest first fill the last wave best
            row0 = ((T.ceildiv(seq_q, block_M) - 1 - rows) if causal else rows) * block_M
            offset = len_kv - len_q  # position of query row 0 among the keys

            if varlen:
                T.copy(Q[q_start + row0 : q_start + row0 + block_M, head, 0:width], Q_shared)
            else:
                T.copy(Q[bz, row0 : row0 + block_M, head, 0:width], Q_shared)
            T.clear(acc_o)
            T.clear(logsum)
            T.fill(scores_max, lowest)

            # the tiles with a key that some row of this block sees
            last = len_kv
            if causal:
                last = T.min(last, row0 + block_M + offset)
            elif window is not None:
                last = T.min(last, row0 + block_M + offset + window - 1)
            first = T.max(row0 + offset - window + 1, 0) if window is not None else 0
            lo = first // block_N
            hi = T.max(T.ceildiv(last, block_N), lo)
            if varlen:
                hi = T.if_then_else(row0 < len_q, hi, lo)

            for k in T.Pipelined(range(lo, hi), num_stages):
                key0 = (lo + hi - 1 - k if descending else k) * block_N
                active = True
                if block_mask:
                    active = BlockMask[bz, head, row0 // sparse, key0 // sparse] != 0
                if active:
                    if varlen:
                        T.copy(K[k_start + key0 : k_start + key0 + block_N, head // group, 0:width], K_shared)
                    else:
                        T.copy(K[bz, key0 : key0 + block_N, head // group, 0:width], K_shared)
                    T.gemm(
                        Q_shared,
                        K_shared,
                        acc_s,
                        transpose_B=True,
                        policy=T.GemmWarpPolicy.FullRow,
                        clear_accum=True,
                    )
                    if bias:
                        for i, j in T.Parallel(block_M, block_N):
                            acc_s[i, j] = acc_s[i, j] * (scale * LOG2E) + LOG2E * T.cast(
                                Bias[
                                    bz if bias_shape[0] > 1 else 0,
                                    head if bias_shape[1] > 1 else 0,
                                    row0 + i,
                                    key0 + j,
                                ],
                                "float32",
                            )
                    if masked:
                        # tiles that every row sees whole need no mask
                        partial = key0 + block_N > len_kv
                        if causal:
                            partial = T.Or(partial, key0 + block_N - 1 > row0 + offset)
                        elif window is not None:
                            partial = T.Or(partial, key0 + block_N > row0 + offset + window)
                        if window is not None:
                            partial = T.Or(partial, key0 <= row0 + block_M - 1 + offset - window)
                        if partial:
                            for i, j in T.Parallel(block_M, block_N):
                                position = row0 + i + offset
                                seen = key0 + j < len_kv
                                if causal:
                                    seen = T.And(seen, key0 + j <= position)
                                elif window is not None:
                                    seen = T.And(seen, key0 + j < position + window)
                                if window is not None:
                                    seen = T.And(seen, key0 + j > position - window)
                                acc_s[i, j] = T.if_then_else(seen, acc_s[i, j], -T.infinity("float32"))
                    T.copy(scores_max, scores_max_prev)
                    T.reduce_max(acc_s, scores_max, dim=1, clear=False)
                    for i in T.Parallel(block_M):
                        # a maximum that grew by little stays as it was, so that the accumulator does too
                        grown = (scores_max[i] - scores_max_prev[i]) * score_scale > KEPT_GROWTH
                        scores_max[i] = T.if_then_else(grown, scores_max[i], scores_max_prev[i])
                    for i in T.Parallel(block_M):
                        scores_scale[i] = T.exp2((scores_max_prev[i] - scores_max[i]) * score_scale)
                    for i, j in T.Parallel(block_M, block_N):
                        acc_s[i, j] = T.exp2(acc_s[i, j] * score_scale - scores_max[i] * score_scale)
                    T.reduce_sum(acc_s, scores_sum, dim=1)
                    for i in T.Parallel(block_M):
                        logsum[i] = logsum[i] * scores_scale[i] + scores_sum[i]
                    T.copy(acc_s, acc_s_cast)
                    for i, j in T.Parallel(block_M, width):
                        acc_o[i, j] *= scores_scale[i]
                    if varlen:
                        # the rows beyond the end belong to the next sequence: a NaN there must not enter 0 * V
                        T.copy(V[k_start + key0 : k_start + key0 + block_N, head // group, 0:width], V_shared)
                        if key0 + block_N > len_kv:
                            for i, j in T.Parallel(block_N, width):
                                if key0 + i >= len_kv:
                                    V_shared[i, j] = 0
                    else:
                        T.copy(V[bz, key0 : key0 + block_N, head // group, 0:width], V_shared)
                    T.gemm(acc_s_cast, V_shared, acc_o, policy=T.GemmWarpPolicy.FullRow)

            # a row without any valid key has logsum 0
            for i in T.Parallel(block_M):
                scores_scale[i] = T.if_then_else(logsum[i] == 0, 0, 1 / logsum[i])
            for i, j in T.Parallel(block_M, width):
                acc_o[i, j] *= scores_scale[i]
            for i in T.Parallel(block_M):
                logsum[i] = (T.log2(logsum[i]) + scores_max[i] * score_scale) * LN2
            if varlen:
                for i, j in T.Parallel(block_M, dim):
                    if row0 + i < len_q:
                        Out[q_start + row0 + i, head, j] = T.cast(acc_o[i, j], dtype)
                if lse:
                    for i in T.Parallel(block_M):
                        if row0 + i < len_q:
                            Lse[head, q_start + row0 + i] = logsum[i]
            else:
                T.copy(acc_o, Out[bz, row0 : row0 + block_M, head, 0:width])
                if lse:
                    T.copy(logsum, Lse[bz, head, row0 : row0 + block_M])

    return finish(flash_attention, optional=("CuQ", "CuK", "Bias", "BlockMask", "Lse"))


def _heads_beside(seq_q, block_M: int, heads: int) -> int:
    """Heads whose blocks of rows are launched together, the longest of all of them first.

    Head by head, the last head's longest rows would start when little else is left to do. As many blocks as run at once
    are enough to even that out, and the keys and values of so few heads stay in L2.
    """
    if not isinstance(seq_q, int):
        return 1
    blocks = -(-seq_q // block_M)
    return next((n for n in range(1, heads + 1) if heads % n == 0 and n * blocks >= _BLOCKS_AT_ONCE), heads)


def _scale(sm_scale: float | None, dim: int) -> float:
    if sm_scale is None:
        return dim**-0.5
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float):
        raise TileTypeError(f"flash_attention: sm_scale must be a number, but it is {sm_scale!r}")
    if not (sm_scale > 0 and math.isfinite(sm_scale)):
        raise TileShapeError(
            f"flash_attention: sm_scale={sm_scale} must be positive and finite", advice="negate Q for a negative scale"
        )
    return float(sm_scale)


def _bias_shape(bias, batch: int, heads: int) -> tuple[int, int]:
    if isinstance(bias, bool) or bias is None:
        return (1, heads)
    if not (isinstance(bias, tuple) and len(bias) == 2 and bias[0] in (1, batch) and bias[1] in (1, heads)):
        raise TileShapeError(
            f"flash_attention: bias={bias!r} must be True or a pair of 1 or batch={batch} and 1 or heads={heads}"
        )
    return bias
