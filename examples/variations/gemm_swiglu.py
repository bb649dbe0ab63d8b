"""Two products of the same rows and SiLU between them (SwiGLU): C = silu(A G^T) * (A U^T), without writing either.

python examples/variations/gemm_swiglu.py
"""

import math

import torch
from variation import Variation, main, normal, plain_gemm

import tvm_tile.language as T


def product(m, n, k, block_M=128, block_N=128, block_K=64, num_stages=4, threads=256):
    @T.prim_func
    def gemm_swiglu(
        A: T.Tensor((m, k), "bfloat16"),
        Gate: T.Tensor((n, k), "bfloat16"),
        Up: T.Tensor((n, k), "bfloat16"),
        C: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, block_N), T.ceildiv(m, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "bfloat16")
            G_shared = T.alloc_shared((block_N, block_K), "bfloat16")
            U_shared = T.alloc_shared((block_N, block_K), "bfloat16")
            gate = T.alloc_fragment((block_M, block_N), "float32")
            up = T.alloc_fragment((block_M, block_N), "float32")
            T.use_swizzle(8)
            T.clear(gate)
            T.clear(up)
            for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(Gate[bx * block_N, ko * block_K], G_shared)
                T.copy(Up[bx * block_N, ko * block_K], U_shared)
                T.gemm(A_shared, G_shared, gate, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.gemm(A_shared, U_shared, up, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, block_N):
                up[i, j] *= gate[i, j] / (1 + T.exp2(-math.log2(math.e) * gate[i, j]))
            T.copy(up, C[by * block_M, bx * block_N])

    return gemm_swiglu


def inputs(shape, generator):
    m, n, k = shape["m"], shape["n"], shape["k"]
    weights = [normal(n, k, generator=generator, scale=k**-0.5) for _ in range(2)]
    return [normal(m, k, generator=generator), *weights]


def reference(shape, a, gate, up):
    return torch.nn.functional.silu(a.float() @ gate.float().T) * (a.float() @ up.float().T)


VARIATIONS = [
    Variation(
        name="SwiGLU of two products",
        kernel=product,
        inputs=inputs,
        output=lambda s: (s["m"], s["n"]),
        reference=reference,
        flops=lambda s: 4 * s["m"] * s["n"] * s["k"],
        # one product with as many operations
        plain=lambda s: plain_gemm(s, n=2 * s["n"]),
        small={"m": 200, "n": 136, "k": 264},
        large={"m": 8192, "n": 8192, "k": 4096},
        tiles={"block_M": 64, "block_N": 64, "block_K": 64, "num_stages": 3, "threads": 128},
    )
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
