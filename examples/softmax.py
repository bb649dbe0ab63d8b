"""Softmax and RMSNorm of rows of any length: element-wise code and reductions without a matrix product.

python examples/softmax.py
"""

import torch

import tvm_tile
from tvm_tile.ops import rmsnorm, softmax

device = "cuda" if torch.cuda.is_available() else "cpu"

if __name__ == "__main__":
    x, weight = torch.randn(100, 3001, device=device), torch.randn(3001, device=device)
    y, z = torch.empty_like(x), torch.empty_like(x)
    tvm_tile.compile(softmax(None, None, dtype="float32"))(x, y)
    tvm_tile.compile(rmsnorm(None, None, dtype="float32"))(x, weight, z)

    expected = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    errors = {"softmax": (y - x.softmax(1)).abs().max().item(), "rmsnorm": (z - expected).abs().max().item()}
    for name, error in errors.items():
        print(f"{name}: max error {error:.2e}")
    passed = errors["softmax"] < 1e-6 and errors["rmsnorm"] < 1e-4
    print("PASS" if passed else "FAIL")
    raise SystemExit(not passed)
