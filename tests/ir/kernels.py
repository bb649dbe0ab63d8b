"""Kernels that between them use every construct of the language; hypothesis draws small ones."""

from __future__ import annotations

import tvm_tile.language as T
from tvm_tile.layout import SharedLayout


def everything():
    m, n = T.dynamic("m, n")

    @T.prim_func
    def kernel(
        A: T.Tensor((m, 48), "float16"), B: T.Tensor((n, 48), "float16"), C: T.Tensor((m, n), "float32"),
        Flags: T.Tensor((8,), "int32"), Count: T.Tensor((2,), "int32"), scale: T.float32, lo: T.int32,
    ):  # fmt: skip
        T.assume(lo >= 0, "lo counts blocks")
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(m, 32), threads=256) as (bx, by):
            a = T.alloc_shared((32, 16), "float16")
            b = T.alloc_shared((32, 16), "float16")
            c = T.alloc_fragment((32, 32), "float32")
            mask = T.alloc_fragment((32, 32), "bool")
            best = T.alloc_fragment((32,), "float32")
            total = T.alloc_fragment((32, 1), "float32")
            seen = T.alloc_var("int32", init=0)
            table = T.alloc_local((2,), "int32")
            T.use_swizzle(8)
            T.annotate_layout({a: SharedLayout.row_major((32, 16), 16)})
            T.annotate_safe_value({A: float("-inf")})
            table[0] = Flags[1]
            table[1] = table[0] + 1
            T.clear(c)
            T.fill(best, -T.infinity("float32"))
            for k in T.Pipelined(lo, 3, num_stages=2):
                if Flags[k] != 0:
                    T.copy(A[by * 32, k * 16], a)
                    T.copy(B[bx * 32, k * 16], b)
                    T.gemm(a, b, c, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                    seen = seen + 1
            for k in T.Pipelined(3, order=[0, 1], stage=[0, 1]):
                T.copy(A[by * 32, k * 16], a)
                T.gemm(a, b, c, transpose_B=True, mask=scale > 0.0)
            for i, j in T.Parallel(32, 32):
                value = c[i, j] * scale
                mask[i, j] = value > 0.0 and i != j
                if j < seen:
                    c[i, j] = T.exp2(value - best[i])
                else:
                    c[i, j] = T.if_then_else(i < table[1], value, 0.0)
            T.gemm(a, b, c, transpose_B=True, mask=mask, mask_value=-1.0, clear_accum=True)
            T.gemm(a, b, c, transpose_B=True, mask=mask)
            T.reduce_max(c, best, dim=1, clear=False)
            T.reduce_sum(c, total, dim=1)
            T.reduce_absmax(c[0:16, :], best[0:16], dim=1)
            T.cumsum(c, dim=1, reverse=True)
            flat = T.reshape(a, (16, 32))
            bytes_ = T.view(a, (1024,), "uint8")
            T.clear(flat[0:8, :])
            for i in T.Parallel(1024):
                bytes_[i] = bytes_[i] ^ T.uint8(3)
            if T.any_of(mask):
                T.atomic_add(Count[0], seen)
            old = T.atomic_max(Count[1], 5, return_prev=True)
            T.print(old, "old")
            T.device_assert(old >= 0, "negative")
            for i in T.serial(2):
                for j in T.unroll(2):
                    Flags[i * 2 + j] = seen
            while seen > 0:
                seen = seen - 1
            with T.ws(0):
                T.fill(total, 1.0)
            T.sync_threads()
            for u, v in T.Persistent([2, T.ceildiv(m, 32)], 4, bx):
                T.print(u + v)
            T.copy(c, C[by * 32, bx * 32])
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(8):
                Flags[i] += 1

    return kernel


def copies(m, n, block, dtype, scope):
    @T.prim_func
    def kernel(A: T.Tensor((m, n), dtype), B: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), threads=64) as (bx, by):
            if scope == "shared":
                tile = T.alloc_shared((block, block), dtype)
            else:
                tile = T.alloc_fragment((block, block), dtype)
            T.copy(A[by * block, bx * block], tile)
            T.copy(tile, B[by * block, bx * block])

    return kernel


def elementwise(size, stride, offset, dtype, loops):
    @T.prim_func
    def kernel(A: T.Tensor((size,), dtype), B: T.Tensor((size,), dtype)):
        with T.Kernel(T.ceildiv(size, 16), threads=32) as bx:
            for k in T.Pipelined(loops, num_stages=2):
                for i in T.Parallel(16):
                    x = A[(bx * 16 + i) * stride + offset]
                    B[bx * 16 + i] = x + T.cast(k, dtype)

    return kernel


def reductions(rows, columns, kind, dim, dtype):
    out = columns if dim == 0 else rows
    reduce = getattr(T, f"reduce_{kind}")

    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), dtype), B: T.Tensor((out,), dtype)):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_fragment((rows, columns), dtype)
            result = T.alloc_fragment((out,), dtype)
            T.copy(A, tile)
            reduce(tile, result, dim=dim)
            T.copy(result, B)

    return kernel
