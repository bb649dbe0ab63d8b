"""The library's GEMM: one compiled kernel for any number of rows, and a bfloat16 one with split-K.

python examples/gemm.py
"""

import torch

import tvm_tile
from tvm_tile.ops import gemm

device = "cuda" if torch.cuda.is_available() else "cpu"


def error_of(result, expected):
    """Largest error, relative to the largest value."""
    return ((result.float() - expected).abs().max() / expected.abs().max()).item()


def symbolic_rows():
    """The number of rows is a symbolic size: None."""
    n, k = 512, 384
    kernel = tvm_tile.compile(gemm(None, n, k, dtype="float32"))
    weights = torch.randn(n, k, device=device)
    worst = 0.0
    for m in (1, 100, 513):
        a, c = torch.randn(m, k, device=device), torch.empty(m, n, device=device)
        kernel(a, weights, c)
        worst = max(worst, error_of(c, a @ weights.T))
    return worst


def split_k():
    """Few tiles and a long K: four slices of K run in parallel and are then added."""
    m, n, k, slices = 64, 128, 4096, 4
    kernel = tvm_tile.compile(gemm(m, n, k, dtype="bfloat16", split_k=slices))
    a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
    partial = torch.empty(slices, m, n, device=device)
    c = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    kernel(a, b, partial, c)
    return error_of(c, a.float() @ b.float().T)


if __name__ == "__main__":
    errors = {"float32, any number of rows": symbolic_rows(), "bfloat16, split-K": split_k()}
    for name, error in errors.items():
        print(f"{name}: max error {error:.2e} of the largest value")
    passed = errors["float32, any number of rows"] < 1e-5 and errors["bfloat16, split-K"] < 1e-2
    print("PASS" if passed else "FAIL")
    raise SystemExit(not passed)
