"""A chain of three products in one kernel: C = relu(relu(A W1^T) W2^T) W3^T through a bottleneck that stays on chip.

python examples/variations/gemm_chain.py
"""

import torch
from variation import TOLERANCE, Variation, main, normal, plain_gemm

import tvm_tile.language as T


def chain(m, n, k, hidden=128, block_M=128, block_N=128, block_K=64, num_stages=4, threads=256):
    @T.prim_func
    def gemm_chain(
        A: T.Tensor((m, k), "bfloat16"),
        W1: T.Tensor((hidden, k), "bfloat16"),
        W2: T.Tensor((hidden, hidden), "bfloat16"),
        W3: T.Tensor((n, hidden), "bfloat16"),
        C: T.Tensor((m, n), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(m, block_M), threads=threads) as bx:
            A_shared = T.alloc_shared((block_M, block_K), "bfloat16")
            W1_shared = T.alloc_shared((hidden, block_K), "bfloat16")
            W2_shared = T.alloc_shared((hidden, hidden), "bfloat16")
            W3_shared = T.alloc_shared((block_N, hidden), "bfloat16")
            first = T.alloc_fragment((block_M, hidden), "float32")
            first_cast = T.alloc_fragment((block_M, hidden), "bfloat16")
            second = T.alloc_fragment((block_M, hidden), "float32")
            second_cast = T.alloc_fragment((block_M, hidden), "bfloat16")
            third = T.alloc_fragment((block_M, block_N), "float32")

            T.copy(W2, W2_shared)
            T.clear(first)
            for ko in T.Pipelined(T.ceildiv(k, block_K), num_stages=num_stages):
                T.copy(A[bx * block_M, ko * block_K], A_shared)
                T.copy(W1[0, ko * block_K], W1_shared)
                T.gemm(A_shared, W1_shared, first, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, hidden):
                first_cast[i, j] = T.cast(T.max(first[i, j], 0), "bfloat16")
            T.gemm(first_cast, W2_shared, second, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
            for i, j in T.Parallel(block_M, hidden):
                second_cast[i, j] = T.cast(T.max(second[i, j], 0), "bfloat16")
            for no in T.Pipelined(T.ceildiv(n, block_N), num_stages=2):
                T.copy(W3[no * block_N, 0], W3_shared)
                T.gemm(
                    second_cast, W3_shared, third, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True
                )
                T.copy(third, C[bx * block_M, no * block_N])

    return gemm_chain


def inputs(shape, generator):
    m, n, k, hidden = shape["m"], shape["n"], shape["k"], shape["hidden"]
    widths = [(hidden, k), (hidden, hidden), (n, hidden)]
    weights = [normal(*w, generator=generator, scale=(2 / w[1]) ** 0.5) for w in widths]
    return [normal(m, k, generator=generator), *weights]


def reference(shape, a, w1, w2, w3):
    first = torch.relu(a.float() @ w1.float().T).bfloat16().float()
    second = torch.relu(first @ w2.float().T).bfloat16().float()
    return second @ w3.float().T


VARIATIONS = [
    Variation(
        name="chain of three products",
        kernel=chain,
        inputs=inputs,
        output=lambda s: (s["m"], s["n"]),
        reference=reference,
        flops=lambda s: 2 * s["m"] * s["hidden"] * (s["k"] + s["hidden"] + s["n"]),
        # as many operations, and the same bytes to read and write
        plain=lambda s: plain_gemm(s, n=s["hidden"], k=s["k"] + s["hidden"] + s["n"]),
        small={"m": 200, "n": 136, "k": 264, "hidden": 64},
        # sums that differ in the last bit may round to other bfloat16 numbers, twice on the way
        tolerance=2 * TOLERANCE,
        large={"m": 33792, "n": 4096, "k": 4096, "hidden": 128},
        tiles={"block_M": 64, "block_N": 64, "block_K": 64, "num_stages": 3, "threads": 128},
    )
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
