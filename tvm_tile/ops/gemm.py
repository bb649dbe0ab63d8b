"""Matrix product: ``C = op(A) op(B) (+ bias)`` with ragged or symbolic sizes, transposes and split-K."""

from __future__ import annotations

from tvm import tirx

import tvm_tile.language as T

from ..errors import TileShapeError, TileTypeError
from .common import check_dtype, check_positive, dimension, finish, next_power_of_two, pick, spread, target_class
from .hopper_tiles import hopper_tiles

__all__ = ["DTYPES", "default_tiles", "gemm"]

DTYPES = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
_OUT = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_OUT_CHOICES = ("float16", "bfloat16", "float32", "int32")


def default_tiles(m, n, k, dtype: str = "float16", target: str = "sm_80") -> dict:
    """Tile sizes that suit a shape when nothing was tuned.

    Parameters
    ----------
    m, n, k : int or Var
        Sizes; a symbolic one counts as large.
    dtype : str
        Element dtype of A and B.
    target : str
        ``"cpu"``, ``"sm_80"`` or ``"sm_90"``.

    Returns
    -------
    dict
        block_M, block_N, block_K, num_stages, threads. On sm_90 what :func:`.hopper_tiles.hopper_tiles` estimates
        (float32 excepted). On other GPUs a 128 x 128 tile with 128 bytes of K a row (the widest
        swizzle) and four warps a 64 rows; on CPUs larger tiles, since they live in the L2 cache: one packed B tile
        serves many rows. Small sizes shrink the tile to the next power of two, and on a CPU it shrinks until each core
        has one.
    """
    size = {name: value if isinstance(value, int) else 1 << 20 for name, value in (("m", m), ("n", n), ("k", k))}
    if target == "sm_90" and dtype != "float32":
        return hopper_tiles(size["m"], size["n"], size["k"], dtype)
    bytes_each = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
    if target == "cpu":
        block_m, block_n, block_k = 256, 256, 256
        stages, threads, least = 0, 128, 16
    else:
        block_m, block_n, block_k = 128, 128, 128 // bytes_each
        stages, threads, least = 3, 256, 32
        if dtype == "float32":
            # IEEE float32 runs on the vector units: registers limit the tile
            block_m, block_n, block_k, stages = 64, 64, 16, 2
    block_m = min(block_m, max(16, next_power_of_two(size["m"])))
    block_n = min(block_n, max(16, next_power_of_two(size["n"])))
    block_k = min(block_k, max(least, next_power_of_two(size["k"])))
    if target == "cpu":
        block_m = spread(block_m, size["m"], -(-size["n"] // block_n))
        block_n = spread(block_n, size["n"], -(-size["m"] // block_m))
    elif block_m * block_n <= 64 * 64:
        # no more warps than instruction tiles (16 x 8)
        threads = min(128, 32 * (block_m // 16) * (block_n // 8))
    return {"block_M": block_m, "block_N": block_n, "block_K": block_k, "num_stages": stages, "threads": threads}


def gemm(
    m,
    n,
    k,
    *,
    dtype: str = "float16",
    out_dtype: str | None = None,
    accum_dtype: str | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: bool = False,
    scaled: bool = False,
    split_k: int = 1,
    precision: str = "ieee",
    block_M: int | None = None,
    block_N: int | None = None,
    block_K: int | None = None,
    num_stages: int | None = None,
    threads: int | None = None,
    policy=T.GemmWarpPolicy.Square,
    panel: int = 8,
    target=None,
) -> tirx.PrimFunc:
    """``C[m, n] = scale op(A) op(B) + bias``.

    The function's parameters are ``A, B, [scale_a (1,), scale_b (1,)], [bias (n,)], [partial (split_k, m, n)], C``. A
    is ``(m, k)``, or ``(k, m)`` with ``trans_a``; B is ``(n, k)`` with ``trans_b``, else ``(k, n)``. With
    ``split_k > 1`` each slice of K is summed into ``partial``, a workspace that the caller allocates in
    ``accum_dtype``, and a second kernel adds the slices in a fixed order.

    Parameters
    ----------
    m, n, k : int, Var or None
        Sizes; a ``T.dynamic`` variable, or None for a symbolic size of that name.
    dtype : str
        float16, bfloat16, float32, int8, float8_e4m3fn or float8_e5m2.
    out_dtype, accum_dtype : str, optional
        Of C (default: ``dtype``; int32 for int8, bfloat16 for fp8) and of the sums (float32; int32 for int8).
    trans_a, trans_b : bool
        Whether A is stored ``(k, m)`` and B ``(n, k)``.
    bias : bool
        Add a row vector of ``out_dtype``.
    scaled : bool
        Multiply by two float32 factors, those of float8 tensors (any float dtype may have them).
    split_k : int
        Slices of K that run in parallel.
    precision : str
        ``"tf32"`` allows tensor cores for float32.
    block_M, block_N, block_K, num_stages, threads, policy, panel
        Tunables: tile sizes, pipeline depth, CTA size, warp policy, width of the rasterisation panels (1: none).
    target : str, optional
        Which default tile sizes to take (see :func:`default_tiles`); those of sm_80 without it. Any tile is right on
        any target that has room for it.

    Raises
    ------
    TileError
        For sizes, dtypes or options that do not exist or do not fit.
    """
    dtype = check_dtype("gemm", "dtype", dtype, DTYPES)
    integer = dtype == "int8"
    accum = accum_dtype or ("int32" if integer else "float32")
    accum = check_dtype("gemm", "accum_dtype", accum, ("int32",) if integer else ("float32", "float16"))
    out = check_dtype("gemm", "out_dtype", out_dtype or _OUT.get(dtype, dtype), _OUT_CHOICES)
    if integer != (out == "int32"):
        raise TileTypeError(
            f"gemm: out_dtype={out!r} does not fit dtype={dtype!r}", advice="int8 sums are int32, others floats"
        )
    if scaled and integer:
        raise TileTypeError("gemm: scaled=True does not fit dtype='int8'", advice="int32 sums have no scale")
    m, n, k = dimension("gemm", "m", m), dimension("gemm", "n", n), dimension("gemm", "k", k)
    tiles = default_tiles(m, n, k, dtype, "sm_80" if target is None else target_class(target))
    tiles = pick(tiles, block_M=block_M, block_N=block_N, block_K=block_K, num_stages=num_stages, threads=threads)
    block_M, block_N, block_K = tiles["block_M"], tiles["block_N"], tiles["block_K"]
    num_stages, threads = tiles["num_stages"], tiles["threads"]
    check_positive(
        "gemm", split_k=split_k, block_M=block_M, block_N=block_N, block_K=block_K, threads=threads, panel=panel
    )
    if isinstance(k, int) and split_k > -(-k // block_K):
        raise TileShapeError(
            f"gemm: split_k={split_k}, but K = {k} has only {-(-k // block_K)} tiles of block_K = {block_K}",
            advice="split K less, or lower block_K",
        )
    A_shape, A_tile = ((k, m), (block_K, block_M)) if trans_a else ((m, k), (block_M, block_K))
    B_shape, B_tile = ((n, k), (block_N, block_K)) if trans_b else ((k, n), (block_K, block_N))

    @T.prim_func
    def gemm(
        A: T.Tensor(A_shape, dtype),
        B: T.Tensor(B_shape, dtype),
        Scale_A: T.Tensor((1,), "float32"),
        Scale_B: T.Tensor((1,), "float32"),
        Bias: T.Tensor((n,), out),
        Partial: T.Tensor((split_k, m, n), accum),
        C: T.Tensor((m, n), out),
    ):
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, block_M), split_k, threads=threads) as (bx, by, bz):
            A_shared = T.alloc_shared(A_tile, dtype)
            B_shared = T.alloc_shared(B_tile, dtype)
            C_local = T.alloc_fragment((block_M, block_N), accum)
            T.use_swizzle(panel, enable=panel > 1)
            T.clear(C_local)
            steps = T.ceildiv(k, block_K)
            each = T.ceildiv(steps, split_k)  # K tiles of a slice; the last slices may have fewer, or none
            for ko in T.Pipelined(
                T.max(T.min(each, steps - bz * each), 0) if split_k > 1 else steps, num_stages=num_stages
            ):
                k0 = (bz * each + ko) * block_K
                if trans_a:
                    T.copy(A[k0, by * block_M], A_shared)
                else:
                    T.copy(A[by * block_M, k0], A_shared)
                if trans_b:
                    T.copy(B[bx * block_N, k0], B_shared)
                else:
                    T.copy(B[k0, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local, trans_a, trans_b, policy=policy, precision=precision)
            if split_k > 1:
                T.copy(C_local, Partial[bz, by * block_M, bx * block_N])
            else:
                if scaled:
                    for i, j in T.Parallel(block_M, block_N):
                        C_local[i, j] *= T.cast(Scale_A[0] * Scale_B[0], accum)
                if bias:
                    for i, j in T.Parallel(block_M, block_N):
                        C_local[i, j] += T.cast(Bias[bx * block_N + j], accum)
                T.copy(C_local, C[by * block_M, bx * block_N])

        if split_k > 1:
            rows = 8
            with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, rows), threads=128) as (bx, by):
                total = T.alloc_fragment((rows, block_N), accum)
                T.clear(total)
                for s in T.serial(split_k):
                    for i, j in T.Parallel(rows, block_N):
                        total[i, j] += Partial[s, by * rows + i, bx * block_N + j]
                if scaled:
                    for i, j in T.Parallel(rows, block_N):
                        total[i, j] *= T.cast(Scale_A[0] * Scale_B[0], accum)
                if bias:
                    for i, j in T.Parallel(rows, block_N):
                        total[i, j] += T.cast(Bias[bx * block_N + j], accum)
                T.copy(total, C[by * rows, bx * block_N])

    return finish(gemm, optional=("Scale_A", "Scale_B", "Bias", "Partial"))
