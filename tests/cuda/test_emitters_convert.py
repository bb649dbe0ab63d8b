"""Conversions on the device: every path of T.copy and T.cast agrees with torch, special values included."""

import pytest
import torch

import tvm_tile.language as T

from .emitters import DTYPES, poisoned, run

ROWS, COLS = 12, 32
SPECIAL = [
    *(0.0, -0.0, float("inf"), float("-inf"), float("nan"), 448.0, 464.0, 465.0, 500.0, 61440.0, 60000.0, 65504.0),
    *(70000.0, 1e-8, -1e-6, 0.001, 2.0**-9, 2.0**-10, 1.5 * 2.0**-10, 2.0**-17, 3e38, 127.0, -128.0, 1.5, -1.5, 2.5),
    *(0.017578125, -0.0009765625),
]


def values(dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    count = ROWS * COLS
    if dtype.startswith(("float", "bfloat")):
        out = torch.randn(count, generator=generator, dtype=torch.float64) * 50
        out[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
        return out.to(torch.float32).to(DTYPES[dtype]).reshape(ROWS, COLS)
    if dtype == "bool":
        return torch.randint(0, 2, (ROWS, COLS), generator=generator).bool()
    low, high = (0, 200) if dtype.startswith("u") else (-128, 128)
    return torch.randint(low, high, (ROWS, COLS), generator=generator).to(DTYPES[dtype])


def expected(x: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype.startswith("float8"):  # conversions saturate
        limit = 448.0 if dtype == "float8_e4m3fn" else 57344.0
        return x.float().clamp(-limit, limit).to(DTYPES[dtype])
    return x.float() != 0 if dtype == "bool" else x.to(DTYPES[dtype])


def kernel(src: str, dst: str):
    @T.prim_func
    def convert(A: T.Tensor((ROWS, COLS), src), C: T.Tensor((ROWS, COLS), dst), D: T.Tensor((ROWS, COLS), dst)):
        with T.Kernel(1, threads=64) as bx:
            held = T.alloc_shared((ROWS, COLS), src)
            f = T.alloc_fragment((ROWS, COLS), src)
            g = T.alloc_fragment((ROWS, COLS), dst)
            made = T.alloc_shared((ROWS, COLS), dst)
            T.copy(A, held)
            T.copy(held, f)
            T.copy(f, g)
            T.copy(g, made)
            T.copy(made, C)
            for i, j in T.Parallel(ROWS, COLS):
                D[i, j] = T.cast(A[i, j], dst)

    return convert


@pytest.mark.parametrize(
    ("src", "dst", "arch"),
    [
        ("float32", "float16", "sm_80"),
        ("float32", "bfloat16", "sm_80"),
        ("float32", "float8_e4m3fn", "sm_80"),
        ("float32", "float8_e5m2", "sm_80"),
        ("float32", "float8_e4m3fn", "sm_90"),
        ("float32", "float8_e5m2", "sm_90"),
        ("float8_e4m3fn", "float32", "sm_80"),
        ("float8_e5m2", "bfloat16", "sm_80"),
        ("bfloat16", "float16", "sm_80"),
        ("float32", "int8", "sm_80"),
        ("float32", "bool", "sm_80"),
        ("int8", "bfloat16", "sm_80"),
        ("bool", "int8", "sm_80"),
        ("float64", "float32", "sm_80"),
    ],
)
def test_conversion_agrees_with_torch(src, dst, arch):
    a = values(src)
    through_tiles, element_wise = poisoned((ROWS, COLS), dst), poisoned((ROWS, COLS), dst)
    run(kernel(src, dst), a, through_tiles, element_wise, arch=arch, outputs=2)
    want = expected(a, dst).double()
    comparable = torch.ones_like(a, dtype=torch.bool)
    if dst == "int8" and src.startswith("float"):  # out of range is undefined in C
        comparable = a.abs() < 128
    for out in (through_tiles.double(), element_wise.double()):
        same = (out == want) | (out.isnan() & want.isnan())
        assert bool((same | ~comparable).all()), a[~same & comparable]
