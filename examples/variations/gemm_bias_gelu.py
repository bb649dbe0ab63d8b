"""A product with a bias and GELU in its epilogue: C = gelu(A B^T + bias), the first half of a transformer's MLP.

python examples/variations/gemm_bias_gelu.py
"""

import math

import torch
from variation import Variation, main, normal, plain_gemm

import tvm_tile.language as T


def product(m, n, k, block_M=128, block_N=256, block_K=64, num_stages=4, threads=256):
    @T.prim_func
    def gemm_bias_gelu(
        A: T.Tensor((m, k), "bfloat16"),
        B: T.Tensor((n, k), "bfloat16"),
        Bias: T.Tensor((n,), "float32"),
        C: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "bfloat16")
            B_shared = T.alloc_shared((block_N, block_K), "bfloat16")
            acc = T.alloc_fragment((block_M, block_N), "float32")
            T.use_swizzle(8)
            T.clear(acc)
            for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[bx * block_N, ko * block_K], B_shared)
                T.gemm(A_shared, B_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, block_N):
                x = acc[i, j] + Bias[bx * block_N + j]
                acc[i, j] = 0.5 * x * (1 + T.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
            T.copy(acc, C[by * block_M, bx * block_N])

    return gemm_bias_gelu


def inputs(shape, generator):
    m, n, k = shape["m"], shape["n"], shape["k"]
    a, b = normal(m, k, generator=generator), normal(n, k, generator=generator, scale=k**-0.5)
    return [a, b, torch.randn(n, generator=generator)]


def reference(shape, a, b, bias):
    return torch.nn.functional.gelu(a.float() @ b.float().T + bias, approximate="tanh")


VARIATIONS = [
    Variation(
        name="product with bias and GELU",
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
