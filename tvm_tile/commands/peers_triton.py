"""Plain Triton kernels of the two main ops, as a Triton user would write them first: peers of ``tvm-tile bench``.

Needs Triton; :mod:`.peers` imports it only then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["attention", "matmul"]


@triton.jit
def _matmul(a, b, c, m, n, k, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, panel: tl.constexpr):
    # panels of rows, so that neighbouring programs share columns of B in L2
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(m, block_m), tl.cdiv(n, block_n)
    first = pid // (panel * columns) * panel
    height = min(rows - first, panel)
    row = first + pid % (panel * columns) % height
    column = pid % (panel * columns) // height
    i = (row * block_m + tl.arange(0, block_m)) % m
    j = (column * block_n + tl.arange(0, block_n)) % n
    kk = tl.arange(0, block_k)
    a_at = a + i[:, None].to(tl.int64) * k + kk[None, :]
    b_at = b + j[None, :].to(tl.int64) * k + kk[:, None]
    acc = tl.zeros((block_m, block_n), tl.float32)
    for step in range(0, tl.cdiv(k, block_k)):
        left = k - step * block_k
        x = tl.load(a_at, mask=kk[None, :] < left, other=0.0)
        y = tl.load(b_at, mask=kk[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
        a_at += block_k
        b_at += block_k
    i = row * block_m + tl.arange(0, block_m)
    j = column * block_n + tl.arange(0, block_n)
    inside = (i[:, None] < m) & (j[None, :] < n)
    tl.store(c + i[:, None].to(tl.int64) * n + j[None, :], acc.to(c.dtype.element_ty), mask=inside)


def matmul(a, b, c) -> None:
    """``c = a @ b.T``, contiguous tensors ``(m, k)``, ``(n, k)``, ``(m, n)``."""
    (m, k), n = a.shape, b.shape[0]
    # few rows: narrow columns, so that there are programs for all SMs
    block_m, block_n, block_k, stages, warps = (128, 256, 64, 3, 8) if m > 128 else (64, 64, 128, 4, 4)
    if a.dtype.itemsize == 1:
        block_k *= 2
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    _matmul[grid](a, b, c, m, n, k, block_m, block_n, block_k, 8, num_stages=stages, num_warps=warps)


@triton.jit
def _attention(
    q, k, v, out, scale, seq, seq_kv, heads, group,
    causal: tl.constexpr, dim: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
):  # fmt: skip
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * block_m  # long rows first
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    kv_heads = heads // group
    i, d, j = row0 + tl.arange(0, block_m), tl.arange(0, dim), tl.arange(0, block_n)
    q_at = ((batch * seq + i[:, None]) * heads + head) * dim + d[None, :]
    kv_at = ((batch * seq_kv + j[:, None]) * kv_heads + head // group) * dim + d[None, :]
    queries = tl.load(q + q_at, mask=i[:, None] < seq, other=0.0)
    best = tl.full((block_m,), -1e30, tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    acc = tl.zeros((block_m, dim), tl.float32)
    last = min(seq_kv, row0 + block_m + seq_kv - seq) if causal else seq_kv
    for start in range(0, last, block_n):
        at = kv_at + start * kv_heads * dim
        inside = start + j[:, None] < seq_kv
        scores = tl.dot(queries, tl.trans(tl.load(k + at, mask=inside, other=0.0))) * scale
        seen = start + j[None, :] < seq_kv
        if causal:
            seen = seen & (start + j[None, :] <= i[:, None] + seq_kv - seq)
        scores = tl.where(seen, scores, -1e30)
        highest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        rescale = tl.exp2(best - highest)
        total = total * rescale + tl.sum(weights, 1)
        values = tl.load(v + at, mask=inside, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None])
        best = highest
    tl.store(out + q_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=i[:, None] < seq)


def attention(q, k, v, out, causal: bool) -> None:
    """Attention of contiguous ``[batch, seq, heads, dim]`` tensors, ``dim`` a power of two."""
    batch, seq, heads, dim = q.shape
    group = heads // k.shape[2]
    block_m, block_n, warps = 128, 128 if dim <= 64 else 64, 8 if dim > 64 else 4
    scale = dim**-0.5 * 1.4426950408889634  # exponentials in base 2
    grid = (triton.cdiv(seq, block_m), heads, batch)
    _attention[grid](
        q, k, v, out, scale, seq, k.shape[1], heads, group, causal, dim, block_m, block_n,
        num_stages=3, num_warps=warps,
    )  # fmt: skip


def check_dtype(dtype: str) -> None:
    """Refuse what the kernels above do not take."""
    if getattr(torch, dtype) not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"the Triton kernels here do not take {dtype}")
