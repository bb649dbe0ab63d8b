"""Causal grouped-query attention with a sliding window, and a batch of sequences of different lengths.

python examples/flash_attention.py
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

import tvm_tile
from tvm_tile.ops import flash_attention

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16


def sliding_window():
    """Every query sees the 100 keys up to its own."""
    batch, heads, kv_heads, seq, dim, window = 2, 8, 2, 500, 64, 100
    kernel = tvm_tile.compile(
        flash_attention(batch, heads, seq, seq, dim, kv_heads=kv_heads, causal=True, window=window, dtype="float16")
    )
    q = torch.randn(batch, seq, heads, dim, device=device, dtype=dtype)
    k, v = (torch.randn(batch, seq, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    out, lse = torch.empty_like(q), torch.empty(batch, heads, seq, device=device)
    kernel(q, k, v, out, lse)

    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)[None, :]
    mask = (distance >= 0) & (distance < window)
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return (out.transpose(1, 2).float() - expected).abs().max().item()


def variable_length():
    """Three sequences, one after another, without padding."""
    heads, dim, lengths = 4, 64, [70, 1, 200]
    starts = [0, 70, 71, 271]
    kernel = tvm_tile.compile(
        flash_attention(len(lengths), heads, None, None, dim, causal=True, varlen=True, dtype="float16")
    )
    q, k, v = (torch.randn(sum(lengths), heads, dim, device=device, dtype=dtype) for _ in range(3))
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    out, lse = torch.empty_like(q), torch.empty(heads, sum(lengths), device=device)
    kernel(q, k, v, cu, cu, out, lse)

    error = 0.0
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        one = (t[start:stop].transpose(0, 1)[None].float() for t in (q, k, v))
        expected = scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1)
        error = max(error, (out[start:stop].float() - expected).abs().max().item())
    return error


if __name__ == "__main__":
    errors = {"sliding window": sliding_window(), "variable length": variable_length()}
    for name, error in errors.items():
        print(f"{name}: max error {error:.2e}")
    passed = max(errors.values()) < 5e-3
    print("PASS" if passed else "FAIL")
    raise SystemExit(not passed)
