"""A product that is added to a residual stream: C = R + A B^T, the second half of a transformer's MLP.

python examples/variations/gemm_residual.py
"""

from variation import Variation, main, normal, plain_gemm

import tvm_tile.language as T


def product(m, n, k, block_M=128, block_N=256, block_K=64, num_stages=4, threads=256):
    @T.prim_func
    def gemm_residual(
        A: T.Tensor((m, k), "bfloat16"),
        B: T.Tensor((n, k), "bfloat16"),
        R: T.Tensor((m, n), "bfloat16"),
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
                acc[i, j] += T.cast(R[by * block_M + i, bx * block_N + j], "float32")
            T.copy(acc, C[by * block_M, bx * block_N])

    return gemm_residual


def inputs(shape, generator):
    m, n, k = shape["m"], shape["n"], shape["k"]
    a, b = normal(m, k, generator=generator), normal(n, k, generator=generator, scale=k**-0.5)
    return [a, b, normal(m, n, generator=generator)]


VARIATIONS = [
    Variation(
        name="product with a residual",
        kernel=product,
        inputs=inputs,
        output=lambda s: (s["m"], s["n"]),
        reference=lambda shape, a, b, r: r.float() + a.float() @ b.float().T,
        flops=lambda s: 2 * s["m"] * s["n"] * s["k"],
        plain=plain_gemm,
        small={"m": 200, "n": 136, "k": 264},
        large={"m": 8192, "n": 8192, "k": 8192},
        tiles={"block_M": 64, "block_N": 64, "block_K": 64, "num_stages": 3, "threads": 128},
    )
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
