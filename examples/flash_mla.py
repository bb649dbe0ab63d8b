"""DeepSeek's multi-head latent attention, one decoding step: sequences of different lengths, the cache read in slices.

python examples/flash_mla.py
"""

import torch

import tvm_tile
from tvm_tile.ops import flash_mla

device = "cuda" if torch.cuda.is_available() else "cpu"
batch, heads, kv_len, dim, pe_dim, splits = 4, 64, 1000, 512, 64, 2


def reference(q, q_pe, kv, k_pe, lengths):
    """Softmax attention over the valid rows of each sequence, in float32."""
    out = torch.zeros(batch, heads, dim, device=device)
    for b, length in enumerate(lengths.tolist()):
        if length:
            values = kv[b, :length, 0].float()
            scores = q[b].float() @ values.T + q_pe[b].float() @ k_pe[b, :length, 0].float().T
            out[b] = (scores * (dim + pe_dim) ** -0.5).softmax(-1) @ values
    return out


if __name__ == "__main__":
    kernel = tvm_tile.compile(flash_mla(batch, heads, kv_len, dim=dim, pe_dim=pe_dim, num_splits=splits))

    options = {"device": device, "dtype": torch.bfloat16}
    q, q_pe = torch.randn(batch, heads, dim, **options), torch.randn(batch, heads, pe_dim, **options)
    kv, k_pe = torch.randn(batch, kv_len, 1, dim, **options), torch.randn(batch, kv_len, 1, pe_dim, **options)
    lengths = torch.tensor([1000, 1, 0, 517], dtype=torch.int32, device=device)
    glse = torch.empty(batch, heads, splits, device=device)  # workspaces of the split
    partial = torch.empty(batch, heads, splits, dim, device=device)
    out, lse = torch.empty(batch, heads, dim, **options), torch.empty(batch, heads, device=device)
    kernel(q, q_pe, kv, k_pe, lengths, glse, partial, out, lse)

    error = (out.float() - reference(q, q_pe, kv, k_pe, lengths)).abs().max().item()
    print(f"max error {error:.2e}; the empty sequence gives {out[2].abs().max().item()} and lse {lse[2, 0].item()}")
    print("PASS" if error < 2e-2 else "FAIL")
    raise SystemExit(error >= 2e-2)
