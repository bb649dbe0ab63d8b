"""A product with 4-bit weights, two to a byte, a scale for each 128 of them.

python examples/dequant_gemm.py
"""

import torch

import tvm_tile
from tvm_tile.ops import dequant_gemm

device = "cuda" if torch.cuda.is_available() else "cpu"
m, n, k, group = 16, 512, 1024, 128

if __name__ == "__main__":
    # quantise random weights: q = round(w / scale) + 8, between 0 and 15
    w = torch.randn(n, k // group, group)
    scales = w.abs().amax(-1) / 7
    q = (torch.round(w / scales[..., None]) + 8).clamp(0, 15).to(torch.uint8).view(n, k)
    packed = (q[:, 0::2] | (q[:, 1::2] << 4)).to(device)
    scales = scales.half().to(device)

    kernel = tvm_tile.compile(dequant_gemm(m, n, k, group_size=group))
    a = torch.randn(m, k, device=device).half()
    c = torch.empty(m, n, device=device, dtype=torch.float16)
    kernel(a, packed, scales, c)

    weights = ((q.to(device).float() - 8) * scales.float().repeat_interleave(group, 1)).half()
    expected = a.float() @ weights.float().T
    error = ((c.float() - expected).abs().max() / expected.abs().max()).item()
    print(f"weights of {packed.numel() // 1024} KB instead of {2 * n * k // 1024}")
    print(f"max error {error:.2e} of the largest value")
    print("PASS" if error < 2e-3 else "FAIL")
    raise SystemExit(error >= 2e-3)
