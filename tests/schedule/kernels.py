"""Kernels whose decisions are interesting, as factories: each returns a PrimFunc."""

from __future__ import annotations

import tvm_tile.language as T


def product(
    m=64,
    n=64,
    k=64,
    dtype="float16",
    accum="float32",
    trans_a=False,
    trans_b=False,
    threads=128,
    policy="Square",
    **options,
):
    """One tile product: global to shared, gemm, fragment to global."""
    a_shape, b_shape = ((k, m) if trans_a else (m, k)), ((n, k) if trans_b else (k, n))

    @T.prim_func
    def product(A: T.Tensor(a_shape, dtype), B: T.Tensor(b_shape, dtype), C: T.Tensor((m, n), accum)):
        with T.Kernel(1, threads=threads) as bx:
            A_shared = T.alloc_shared(a_shape, dtype)
            B_shared = T.alloc_shared(b_shape, dtype)
            C_local = T.alloc_fragment((m, n), accum)
            T.copy(A, A_shared)
            T.copy(B, B_shared)
            T.gemm(A_shared, B_shared, C_local, trans_a, trans_b, policy=policy, clear_accum=True, **options)
            T.copy(C_local, C)

    return product


def pipelined(tiles=4, num_stages=2, m=64, n=64, k=32, dtype="float16", **schedule):
    """A product over ``tiles`` tiles of K."""

    @T.prim_func
    def pipelined(
        A: T.Tensor((m, k * tiles), dtype), B: T.Tensor((k * tiles, n), dtype), C: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(1, threads=128) as bx:
            A_shared = T.alloc_shared((m, k), dtype)
            B_shared = T.alloc_shared((k, n), dtype)
            C_local = T.alloc_fragment((m, n), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(tiles, num_stages=num_stages, **schedule):
                T.copy(A[0, ko * k], A_shared)
                T.copy(B[ko * k, 0], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C)

    return pipelined


def attention_step(policy_s="FullRow", policy_o="FullRow", m=64, n=64, d=64, through_shared=False):
    """Scores, softmax without a running maximum, output: two products with row vectors between."""

    @T.prim_func
    def attention_step(
        Q: T.Tensor((m, d), "float16"),
        K: T.Tensor((n, d), "float16"),
        V: T.Tensor((n, d), "float16"),
        Out: T.Tensor((m, d), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            Q_shared = T.alloc_shared((m, d), "float16")
            K_shared = T.alloc_shared((n, d), "float16")
            V_shared = T.alloc_shared((n, d), "float16")
            P_shared = T.alloc_shared((m, n), "float16")
            acc_s = T.alloc_fragment((m, n), "float32")
            acc_p = T.alloc_fragment((m, n), "float16")
            acc_o = T.alloc_fragment((m, d), "float32")
            top = T.alloc_fragment((m,), "float32")
            total = T.alloc_fragment((m,), "float32")
            T.copy(Q, Q_shared)
            T.copy(K, K_shared)
            T.copy(V, V_shared)
            T.gemm(Q_shared, K_shared, acc_s, transpose_B=True, policy=policy_s, clear_accum=True)
            T.reduce_max(acc_s, top, dim=1)
            for i, j in T.Parallel(m, n):
                acc_s[i, j] = T.exp2(acc_s[i, j] - top[i])
            T.reduce_sum(acc_s, total, dim=1)
            if through_shared:
                T.copy(acc_s, P_shared)
                T.gemm(P_shared, V_shared, acc_o, policy=policy_o, clear_accum=True)
            else:
                T.copy(acc_s, acc_p)
                T.gemm(acc_p, V_shared, acc_o, policy=policy_o, clear_accum=True)
            for i, j in T.Parallel(m, d):
                acc_o[i, j] = acc_o[i, j] / total[i]
            T.copy(acc_o, Out)

    return attention_step


def row_sums(m=48, n=100, threads=128, dtype="float32", source="fragment", dim=1):
    """Sums of a tile along a dimension, from a fragment or a shared tile."""
    kept = m if dim == 1 else n

    @T.prim_func
    def row_sums(A: T.Tensor((m, n), dtype), B: T.Tensor((kept,), "float32")):
        with T.Kernel(1, threads=threads) as bx:
            tile = T.alloc_shared((m, n), "float32") if source == "shared" else T.alloc_fragment((m, n), "float32")
            total = T.alloc_fragment((kept,), "float32")
            T.copy(A, tile)
            T.reduce_sum(tile, total, dim=dim)
            T.copy(total, B)

    return row_sums


def elementwise(m=33, n=77, threads=96, dtype="float16"):
    """Element-wise work over memory only, and a broadcast row vector in registers."""

    @T.prim_func
    def elementwise(A: T.Tensor((m, n), dtype), S: T.Tensor((n,), dtype), B: T.Tensor((m, n), dtype)):
        with T.Kernel(1, threads=threads) as bx:
            scale = T.alloc_fragment((n,), dtype)
            T.copy(S, scale)
            for i, j in T.Parallel(m, n):
                B[i, j] = A[i, j] * scale[j]

    return elementwise


def slices(m=64, n=64):
    """Slices of accumulators: two products into halves of one fragment, element-wise work and copies on the halves."""
    half = n // 2

    @T.prim_func
    def slices(A: T.Tensor((m, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(1, threads=128) as bx:
            A_shared = T.alloc_shared((m, 32), "float16")
            B_shared = T.alloc_shared((32, n), "float16")
            acc = T.alloc_fragment((m, n), "float32")
            T.copy(A, A_shared)
            T.copy(B, B_shared)
            T.gemm(A_shared, B_shared[:, 0:half], acc[:, 0:half], clear_accum=True)
            T.gemm(A_shared, B_shared[:, half:n], acc[:, half:n], clear_accum=True)
            for i, j in T.Parallel(m, half):
                acc[i, j + half] = acc[i, j + half] * 2.0
            T.copy(acc[:, 0:half], C[:, 0:half])
            T.copy(acc[:, half:n], C[:, half:n])

    return slices


def symbolic(dtype="float32", assume=0):
    """Element-wise work over a symbolic extent."""
    n = T.dynamic("n")

    @T.prim_func
    def symbolic(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        if assume:
            T.assume(n % assume == 0)
        with T.Kernel(T.ceildiv(n, 512), threads=128) as bx:
            tile = T.alloc_fragment((512,), dtype)
            T.copy(A[bx * 512], tile)
            for i in T.Parallel(512):
                tile[i] = tile[i] + 1
            T.copy(tile, B[bx * 512])

    return symbolic
