"""A product whose rows are normalised by their own mean square (RMSNorm): the sums are taken while the tiles pass by.

C = (A B^T) / sqrt(mean(A^2) + eps), the norm's weight being folded into B: a row's factor moves behind the product.

python examples/variations/gemm_rmsnorm.py
"""

import torch
from variation import Variation, main, normal, plain_gemm

import tvm_tile.language as T

EPS = 1e-6


def product(m, n, k, block_M=128, block_N=256, block_K=64, num_stages=4, threads=256):
    @T.prim_func
    def gemm_rmsnorm(
        A: T.Tensor((m, k), "bfloat16"),
        B: T.Tensor((n, k), "bfloat16"),
        C: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "bfloat16")
            B_shared = T.alloc_shared((block_N, block_K), "bfloat16")
            acc = T.alloc_fragment((block_M, block_N), "float32")
            squares = T.alloc_fragment((block_M, block_K), "float32")
            total = T.alloc_fragment((block_M,), "float32")
            T.use_swizzle(8)
            T.clear(acc)
            T.clear(squares)
            for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[bx * block_N, ko * block_K], B_shared)
                T.gemm(A_shared, B_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, j in T.Parallel(block_M, block_K):
                    squares[i, j] += T.cast(A_shared[i, j], "float32") * T.cast(A_shared[i, j], "float32")
            T.reduce_sum(squares, total, dim=1)
            for i in T.Parallel(block_M):
                total[i] = T.rsqrt(total[i] / k + EPS)
            for i, j in T.Parallel(block_M, block_N):
                acc[i, j] *= total[i]
            T.copy(acc, C[by * block_M, bx * block_N])

    return gemm_rmsnorm


def inputs(shape, generator):
    m, n, k = shape["m"], shape["n"], shape["k"]
    # rows of different sizes, which the norm makes alike
    a = torch.randn(m, k, generator=generator) * torch.rand(m, 1, generator=generator).mul(4).exp()
    return [a.bfloat16(), normal(n, k, generator=generator, scale=k**-0.5)]


def reference(shape, a, b):
    a = a.float()
    return (a * torch.rsqrt(a.square().mean(1, keepdim=True) + EPS)) @ b.float().T


VARIATIONS = [
    Variation(
        name="product of RMS-normalised rows",
        kernel=product,
        inputs=inputs,
        output=lambda s: (s["m"], s["n"]),
        reference=reference,
        flops=lambda s: 2 * s["m"] * s["n"] * s["k"],
        plain=plain_gemm,
        small={"m": 200, "n": 136, "k": 264},
        large={"m": 8192, "n": 8192, "k": 8192},
        tiles={"block_M": 64, "block_N": 64, "block_K": 64, "num_stages": 3, "threads": 128},
    )
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
