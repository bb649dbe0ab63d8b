"""Prefix-LM attention (T5, PaliGemma): causal, and each query sees all of the prefix, whose length is an input.

python examples/variations/attention_prefix.py
"""

import math

import torch
from variation import (
    Variation,
    attention_inputs,
    causal_mask,
    main,
    plain_attention,
    softmax_attention,
)

import tvm_tile.language as T


def attention(batch, heads, seq, dim, block_M=128, block_N=128, num_stages=2, threads=256):
    outer = dim**-0.5 * math.log2(math.e)  # the exponentials are in base 2

    @T.prim_func
    def attention_prefix(
        Q: T.Tensor((batch, seq, heads, dim), "bfloat16"),
        K: T.Tensor((batch, seq, heads, dim), "bfloat16"),
        V: T.Tensor((batch, seq, heads, dim), "bfloat16"),
        Prefix: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, seq, heads, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(seq, block_M), heads, batch, threads=threads) as (bx, by, bz):
            Q_shared = T.alloc_shared((block_M, dim), "bfloat16")
            K_shared = T.alloc_shared((block_N, dim), "bfloat16")
            V_shared = T.alloc_shared((block_N, dim), "bfloat16")
            scores = T.alloc_fragment((block_M, block_N), "float32")
            weights = T.alloc_fragment((block_M, block_N), "bfloat16")
            out = T.alloc_fragment((block_M, dim), "float32")
            row_max = T.alloc_fragment((block_M,), "float32")
            old_max = T.alloc_fragment((block_M,), "float32")
            rescale = T.alloc_fragment((block_M,), "float32")
            row_sum = T.alloc_fragment((block_M,), "float32")
            total = T.alloc_fragment((block_M,), "float32")

            row0 = (T.ceildiv(seq, block_M) - 1 - bx) * block_M  # long rows first
            T.copy(Q[bz, row0 : row0 + block_M, by, :], Q_shared)
            T.clear(out)
            T.clear(total)
            T.fill(row_max, -T.infinity("float32"))  # each row sees key 0, which is in the first tile
            prefix = Prefix[bz]
            keys = T.min(T.max(row0 + block_M, prefix), seq)
            for k in T.Pipelined(T.ceildiv(keys, block_N), num_stages=num_stages):
                T.copy(K[bz, k * block_N : (k + 1) * block_N, by, :], K_shared)
                T.gemm(Q_shared, K_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow, clear_accum=True)
                if (k + 1) * block_N > T.max(row0, prefix):
                    for i, j in T.Parallel(block_M, block_N):
                        key = k * block_N + j
                        scores[i, j] = T.if_then_else(
                            T.Or(key <= row0 + i, key < prefix), scores[i, j], -T.infinity("float32")
                        )
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

    return attention_prefix


def prefixes(shape):
    """A prefix of another length for each sequence, the first without one."""
    return [shape["seq"] * b // shape["batch"] for b in range(shape["batch"])]


def inputs(shape, generator):
    return [*attention_inputs(shape, generator), torch.tensor(prefixes(shape), dtype=torch.int32)]


def flops(shape):
    """Of the products, for the keys that are seen."""
    rows = shape["seq"]
    pairs = sum(rows * (rows + 1) / 2 + prefix * (prefix - 1) / 2 for prefix in prefixes(shape))
    return 4 * shape["heads"] * shape["dim"] * pairs


def reference(shape, q, k, v, prefix):
    key = torch.arange(shape["seq"], device=q.device)
    seen = causal_mask(shape["seq"], q.device) | (key < prefix[:, None])[:, None, :]
    return softmax_attention(q, k, v, lambda scores, head: scores.masked_fill(~seen, -math.inf))


VARIATIONS = [
    Variation(
        name="prefix-LM attention",
        kernel=attention,
        inputs=inputs,
        output=lambda s: (s["batch"], s["seq"], s["heads"], s["dim"]),
        reference=reference,
        flops=flops,
        plain=plain_attention(causal=True),
        small={"batch": 3, "heads": 2, "seq": 200, "dim": 64},
        large={"batch": 4, "heads": 32, "seq": 4096, "dim": 128},
        tiles={"block_M": 64, "block_N": 64, "threads": 128},
    )
]

if __name__ == "__main__":
    raise SystemExit(main(*VARIATIONS))
