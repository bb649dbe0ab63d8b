"""bfloat16 and float8 on every path: named values, rounding at casts, every bit pattern, views, atomics, prints."""

from __future__ import annotations

import pytest
import torch

import tvm_tile
from tvm_tile import T
from tvm_tile.simulate import simulate

SMALL = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _on(path: str, func):
    if path.startswith("sm_"):
        return simulate(func, path)
    return tvm_tile.compile(func, "llvm", lowering=path)


@pytest.mark.parametrize("path", ["reference", "optimised", "sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", SMALL)
def test_named_values_of_small_floats(path, dtype):
    """TVM's bfloat16 legalisation skipped Bind: garbage, and a segfault where the load was guarded."""

    @T.prim_func
    def squares(X: T.Tensor((20,), dtype), Y: T.Tensor((20,), "float32"), Z: T.Tensor((20,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(32):
                x = T.cast(X[i], "float32")
                Y[i] = x * x
            for i in T.Parallel(32):
                x = X[i]
                Z[i] = T.cast(x, "float32") + 1.0

    x = torch.randn(20, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    y, z = torch.full((20,), torch.nan), torch.full((20,), torch.nan)
    _on(path, squares)(x, y, z)
    torch.testing.assert_close(y, x.float() ** 2, rtol=0, atol=0)
    torch.testing.assert_close(z, x.float() + 1, rtol=0, atol=0)


@pytest.mark.parametrize("path", ["reference", "optimised"])
@pytest.mark.parametrize("dtype", SMALL)
def test_every_bit_pattern_and_rounding(path, dtype):
    """TVM's float8 legalisation read 0.0 as 2**-7, subnormals and NaN wrong; its casts did not round."""
    bits = torch.uint16 if dtype == "bfloat16" else torch.uint8
    count = 1 << (16 if dtype == "bfloat16" else 8)
    torch_type = getattr(torch, dtype)

    @T.prim_func
    def convert(
        X: T.Tensor((count,), dtype),
        Y: T.Tensor((count,), "float32"),
        A: T.Tensor((999,), "float32"),
        Z: T.Tensor((999,), dtype),
        R: T.Tensor((999,), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            for i in T.Parallel(count):
                Y[i] = T.cast(X[i], "float32")
            for i in T.Parallel(999):
                Z[i] = T.cast(A[i], dtype)
            for i in T.Parallel(999):
                R[i] = T.cast(T.cast(A[i], dtype), "float32")

    x = torch.arange(count, dtype=torch.int32).to(bits).view(torch_type)
    a = torch.randn(999, generator=torch.Generator().manual_seed(2)) * 2.0 ** torch.linspace(-20, 5, 999)
    y, r = torch.full((count,), 7.0), torch.full((999,), torch.nan)
    z = torch.full((999,), 0x7F, dtype=torch.uint8).repeat(x.element_size()).view(torch_type)
    _on(path, convert)(x, y, a, z, r)
    torch.testing.assert_close(y, x.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(z.float(), a.to(torch_type).float(), rtol=0, atol=0)
    torch.testing.assert_close(r, a.to(torch_type).float(), rtol=0, atol=0)


@pytest.mark.parametrize("path", ["reference", "optimised"])
def test_views_atomics_and_conditions_of_small_floats(path):
    @T.prim_func
    def mixed(
        X: T.Tensor((4, 8), "float8_e4m3fn"), B: T.Tensor((32,), "uint8"), S: T.Tensor((1,), "bfloat16"),
        P: T.Tensor((32,), "bfloat16"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((4, 8), "float8_e4m3fn")
            T.copy(X, tile)
            flat = T.view(tile, (32,), "uint8")
            T.copy(flat, B)
            values = T.reshape(tile, (32,))
            for i in T.Parallel(32):
                P[i] = T.if_then_else(values[i] > T.cast(0.5, "float8_e4m3fn"), T.cast(values[i], "bfloat16"), -1.0)
            T.atomic_add(S[0], T.cast(2.5, "bfloat16"))

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    b, s, p = torch.zeros(32, dtype=torch.uint8), torch.ones(1).bfloat16(), torch.full((32,), torch.nan).bfloat16()
    _on(path, mixed)(x, b, s, p)
    assert torch.equal(b.view(4, 8), x.view(torch.uint8))
    assert s.item() == 3.5
    want = x.float().flatten()
    torch.testing.assert_close(p.float(), torch.where(want > 0.5, want, -1.0), rtol=0, atol=0)
