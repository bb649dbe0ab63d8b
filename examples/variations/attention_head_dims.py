"""Attention with heads of other sizes: queries and keys wider than values (192 and 128: DeepSeek), and 80.

python examples/variations/attention_head_dims.py
"""

import math

from variation import (
    Variation,
    attention_flops,
    attention_inputs,
    main,
    plain_attention,
    softmax_attention,
)

import tvm_tile.language as T


def attention(batch, heads, seq, dim_qk, dim, block_M=128, block_N=128, num_stages=2, threads=256):
    outer = dim_qk**-0.5 * math.log2(math.e)  # the exponentials are in base 2

    @T.prim_func
    def attention_head_dims(
        Q: T.Tensor((batch, seq, heads, dim_qk), "bfloat16"),
        K: T.Tensor((batch, seq, heads, dim_qk), "bfloat16"),
        V: T.Tensor((batch, seq, heads, dim), "bfloat16"),
        Out: T.Tensor((batch, seq, heads, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(seq, block_M), heads, batch, threads=threads) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, dim_qk), "bfloat16")
            K_shared = T.alloc_shared((block_N, dim_qk), "bfloat16")
            V_shared = T.alloc_shared((block_N, dim), "bfloat16")
            scores = T.alloc_fragment((block_M, block_N), "float32")
            weights = T.alloc_fragment((block_M, block_N), "bfloat16")
            out = T.alloc_fragment((block_M, dim), "float32")
            row_max = T.alloc_fragment((block_M,), "float32")
            old_max = T.alloc_fragment((block_M,), "float32")
            rescale = T.alloc_fragment((block_M,), "float32")
            row_sum = T.alloc_fragment((block_M,), "float32")
            total = T.alloc_fragment((block_M,), "float32")

            row0 = bx * block_M
            T.copy(Q[bz, row0 : row0 + block_M, by, :], Q_shared)
            T.clear(out)
            T.clear(total)
            T.fill(row_max, -T.infinity("float32"))  # each row sees the first tile
            for k in T.Pipelined(T.ceildiv(seq, block_N), num_stages=num_stages):
                T.copy(K[bz, k * block_N : (k + 1) * block_N, by, :], K_shared)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                if (k + 1) * block_N > seq:
                    for i, j in T.Parallel(block_M, block_N):
                        scores[i, j] = T.if_then_else(k * block_N + j < seq, scores[i, j], -T.infinity("float32"))
                T.copy(row_max, old_max)
                T.reduce_max(scores, row_max, dim=1, clear=False)
                for i in T.Parallel(block_M):
                    rescale[i] = T.exp2((old_max[i] - row_max[i]) * outer)
                for i, j in T.Parallel(block_M, block_N):
                    scores[i, j] = T.exp2(scores[i, j] * outer - row_max[i] * outer)
                T.reduce_sum(scores, row_sum, dim=1)
                for i in T.Parallel(block_M):
                    total[i] = total[i] * rescale[i] + row_sum[i]
                T.copy(scores, weights)
                for i, j in T.Parallel(block_M, dim):
                    out[i, j] *= rescale[i]
                T.copy(V[bz, k * block_N : (k + 1) * block_N, by, :], V_shared)
                T.gemm(weights, V_shared, out, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] /= total[i]
            T.copy(out, Out[bz, row0 : row0 + block_M, by, :])

    return attention_head_dims


def inputs(shape, generator):
    return attention_inputs(shape, generator, shape["dim_qk"])


def reference(shape, q, k, v):
    return softmax_attention(q, k, v)


def variation(name, small, large):
    return Variation(
        name=name,
        kernel=attention,
        inputs=inputs,
        output=lambda s: (s["batch"], s["seq"], s["heads"], s["dim"]),
        reference=reference,
        flops=lambda s: attention_flops(s, False, s["dim_qk"], s["dim"]),
        plain=plain_attention(causal=False, dim=128),
        small={"batch": 1, "heads": 2, "seq": 200, **small},
        large={"batch": 4, "heads": 32, "seq": 4096, **large},
        tiles={"block_M": 64, "block_N": 64, "threads": 128},
    )


VARIATIONS = [
    variation("attention with heads of 192 and 128", {"dim_qk": 96, "dim": 64}, {"dim_qk": 192, "dim": 128}),
    variation("attention with heads of 80", {"dim_qk": 80, "dim": 80}, {"dim_qk": 80, "dim": 80}),
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
