"""Mixture of experts: the tokens of each expert are multiplied with that expert's weights, in one kernel.

python examples/grouped_gemm.py
"""

import torch

import tvm_tile
from tvm_tile.ops import grouped_gemm

device = "cuda" if torch.cuda.is_available() else "cpu"
experts, n, k = 8, 256, 320

if __name__ == "__main__":
    kernel = tvm_tile.compile(grouped_gemm(None, experts, n, k, dtype="bfloat16"))  # any number of tokens
    w = torch.randn(experts, n, k, device=device).bfloat16()
    worst = 0.0
    for tokens in (1, 50, 700):
        expert = torch.randint(0, experts, (tokens,)).sort().values
        offsets = torch.searchsorted(expert, torch.arange(experts + 1)).to(torch.int32).to(device)
        a = torch.randn(tokens, k, device=device).bfloat16()
        c = torch.empty(tokens, n, device=device, dtype=torch.bfloat16)
        kernel(a, w, offsets, c)
        expected = torch.einsum("tk,tnk->tn", a.float(), w[expert.to(device)].float())
        worst = max(worst, ((c.float() - expected).abs().max() / expected.abs().max()).item())
    print(f"max error {worst:.2e} of the largest value")
    print("PASS" if worst < 1e-2 else "FAIL")
    raise SystemExit(worst >= 1e-2)
