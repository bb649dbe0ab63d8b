"""Copies around tensor-core products: ldmatrix, stmatrix, staged stores and layout conversions."""

import pytest
import torch

import tvm_tile.language as T

from .emitters import DTYPES, close, poisoned, run


def _gemm(m, n, k, block_m, block_n, block_k, dtype, out, threads):
    @T.prim_func
    def gemm(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), C: T.Tensor((m, n), out)):
        with T.Kernel(T.ceildiv(n, block_n), T.ceildiv(m, block_m), threads=threads) as (bx, by):
            a = T.alloc_shared((block_m, block_k), dtype)
            b = T.alloc_shared((block_n, block_k), dtype)
            acc = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(acc)
            for step in T.serial(T.ceildiv(k, block_k)):
                T.copy(A[by * block_m, step * block_k], a)
                T.copy(B[bx * block_n, step * block_k], b)
                T.gemm(a, b, acc, transpose_B=True)
            T.copy(acc, C[by * block_m, bx * block_n])

    return gemm


@pytest.mark.parametrize(
    ("shape", "dtype", "out", "threads", "arch"),
    [
        ((128, 128, 64), "bfloat16", "bfloat16", 128, "sm_80"),
        ((100, 72, 40), "float16", "float32", 128, "sm_80"),
        ((60, 33, 40), "float16", "bfloat16", 64, "sm_80"),
    ],
)
def test_epilogue(shape, dtype, out, threads, arch):
    m, n, k = shape
    torch.manual_seed(m)
    a, b = torch.randn(m, k).to(DTYPES[dtype]), torch.randn(n, k).to(DTYPES[dtype])
    c = poisoned((m, n), out)
    report = run(_gemm(m, n, k, 32, 64, 32, dtype, out, threads), a, b, c, arch=arch, outputs=1)
    close(c, a.double() @ b.double().T, 0.05, 1e-2)
    assert report.bank_conflicts == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_operands_and_results_through_fragments(arch):
    dtype = "bfloat16"

    @T.prim_func
    def k(
        A: T.Tensor((64, 64), dtype),
        B: T.Tensor((64, 64), dtype),
        C: T.Tensor((64, 64), dtype),
        D: T.Tensor((64, 64), "float32"),
        E: T.Tensor((64, 64), dtype),
    ):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), dtype)
            b = T.alloc_shared((64, 64), dtype)
            c = T.alloc_shared((64, 64), dtype)
            held = T.alloc_fragment((64, 64), dtype)
            acc = T.alloc_fragment((64, 64), "float32")
            second = T.alloc_fragment((64, 64), "float32")
            low = T.alloc_fragment((64, 64), dtype)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(a, held)
            T.gemm(held, b, acc, transpose_B=True, clear_accum=True)
            T.copy(acc, c)
            T.copy(c, C)
            T.copy(acc, low)
            T.gemm(low, b, second, clear_accum=True)
            T.copy(low, c)
            T.copy(c, E)
            T.copy(second, D)

    torch.manual_seed(0)
    a, b = ((torch.randn(64, 64) / 4).bfloat16() for _ in range(2))
    c, e, d = poisoned((64, 64), dtype), poisoned((64, 64), dtype), poisoned((64, 64), "float32")
    report = run(k, a, b, c, d, e, arch=arch, outputs=3)
    product = a.float() @ b.float().T
    close(c, product, 0.02, 1e-2)
    close(e, product, 0.02, 1e-2)
    close(d, product.bfloat16().float() @ b.float(), 0.1, 2e-2)
    assert report.bank_conflicts == 0
    assert "ldmatrix" in repr(report) and ("stmatrix" in repr(report)) == (arch == "sm_90")
