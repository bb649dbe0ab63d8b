"""A small flash-attention kernel in lowered form: TMA producer, wgmma Q K from shared memory, P V from registers."""

from __future__ import annotations

import math

import numpy as np
from tvm.script import tirx as T

DESC_K128 = 0x4000004000010000
BOX = (64, 64, 1, 1, 0, 3, 0, 0)  # box, element strides, interleave, 128-byte swizzle, L2, fill
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"


def attention(seq=128, causal=False, early_release=False, pv_wait=True):
    """O[64, 64] = softmax(Q K^T / 8) V for one block of 64 queries and ``seq`` keys, head dimension 64, bf16.

    ``early_release`` frees V's stage before the product has read it; ``pv_wait`` off reads O in flight.
    """
    blocks = seq // 64
    tile = 8192
    off_k, off_v = tile, tile * 3
    off_bar = tile * 5
    size = off_bar + 72
    c = float(np.float32(math.log2(math.e) / 8))
    qk = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
    desc_v = (1 << 62) | (64 << 32) | ((tile >> 4) << 16)  # MN-major: 1024 bytes between groups of 8 keys

    @T.prim_func
    def main(q: T.handle, k: T.handle, v: T.handle, o: T.handle):
        Q = T.match_buffer(q, (64, 64), "bfloat16", align=16)
        Kb = T.match_buffer(k, (seq, 64), "bfloat16", align=16)
        V = T.match_buffer(v, (seq, 64), "bfloat16", align=16)
        Ob = T.match_buffer(o, (64, 64), "float32", align=16)
        q_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        k_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        v_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", q_map, "bfloat16", 2, Q.data, 64, 64, 128, *BOX)
        T.call_packed("runtime.cuTensorMapEncodeTiled", k_map, "bfloat16", 2, Kb.data, 64, seq, 128, *BOX)
        T.call_packed("runtime.cuTensorMapEncodeTiled", v_map, "bfloat16", 2, V.data, 64, seq, 128, *BOX)
        tx = T.launch_thread("threadIdx.x", 256)
        smem = T.alloc_buffer((size,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        bar: T.let = base + T.uint32(off_bar)  # Q full, K full x2, V full x2, empty x2
        if tx == 0:
            for i in T.unroll(7):
                T.ptx.mbarrier.init.shared.b64(bar + T.uint32(8 * i), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        if tx >= 128:
            if tx == 128:
                T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar, T.uint32(tile))
                T.ptx[TMA_LOAD](base, T.address_of(q_map), 0, 0, bar)
                for j in T.serial(blocks, unroll=False):
                    s: T.let = T.cast(j % 2, "uint32")
                    T.cuda.mbarrier_wait(bar + T.uint32(40) + s * T.uint32(8), (T.truncdiv(j, 2) & 1) ^ 1)
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar + T.uint32(8) + s * T.uint32(8), T.uint32(tile))
                    T.ptx[TMA_LOAD](
                        base + T.uint32(off_k) + s * T.uint32(tile),
                        T.address_of(k_map),
                        0,
                        j * 64,
                        bar + T.uint32(8) + s * T.uint32(8),
                    )
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar + T.uint32(24) + s * T.uint32(8), T.uint32(tile))
                    T.ptx[TMA_LOAD](
                        base + T.uint32(off_v) + s * T.uint32(tile),
                        T.address_of(v_map),
                        0,
                        j * 64,
                        bar + T.uint32(24) + s * T.uint32(8),
                    )
        else:
            S = T.alloc_buffer((32,), "float32", scope="local")
            acc = T.alloc_buffer((32,), "float32", scope="local")
            P = T.alloc_buffer((16,), "uint32", scope="local")
            m = T.alloc_buffer((2,), "float32", scope="local")
            den = T.alloc_buffer((2,), "float32", scope="local")
            mn = T.alloc_buffer((2,), "float32", scope="local")
            al = T.alloc_buffer((2,), "float32", scope="local")
            lane: T.let = tx % 32
            row: T.let = T.truncdiv(tx, 32) * 16 + T.truncdiv(lane, 4)
            for i in T.unroll(32):
                acc[i] = T.float32(0)
            for h in T.unroll(2):
                m[h] = T.float32(-1e30)
                den[h] = T.float32(0)
            T.cuda.mbarrier_wait(bar, 0)
            for j in T.serial(blocks):
                s: T.let = T.cast(j % 2, "uint32")
                ph: T.let = T.truncdiv(j, 2) & 1
                lq: T.let = T.shift_right(base, T.uint32(4)) & T.uint32(0x3FFF)
                lk: T.let = T.shift_right(base + T.uint32(off_k) + s * T.uint32(tile), T.uint32(4)) & T.uint32(0x3FFF)
                lv: T.let = T.shift_right(base + T.uint32(off_v) + s * T.uint32(tile), T.uint32(4)) & T.uint32(0x3FFF)
                T.cuda.mbarrier_wait(bar + T.uint32(8) + s * T.uint32(8), ph)
                T.ptx.wgmma.fence.sync.aligned()
                for ki in T.unroll(4):
                    T.ptx[qk](
                        *[S[i] for i in range(32)],
                        T.uint64(DESC_K128) | T.cast(lq + T.uint32(2) * T.cast(ki, "uint32"), "uint64"),
                        T.uint64(DESC_K128) | T.cast(lk + T.uint32(2) * T.cast(ki, "uint32"), "uint64"),
                        ki > 0, 1, 1, 0, 0,
                    )  # fmt: skip
                T.ptx.wgmma.commit_group.sync.aligned()
                T.ptx.wgmma.wait_group.sync.aligned(0)
                if causal:
                    for i in T.unroll(32):
                        if j * 64 + (i // 4) * 8 + (lane % 4) * 2 + i % 2 > seq - 64 + row + (i // 2) % 2 * 8:
                            S[i] = T.float32(-1e30)
                for h in T.unroll(2):
                    mn[h] = m[h]
                    for i in T.unroll(8):
                        mn[h] = T.max(mn[h], T.max(S[i * 4 + h * 2], S[i * 4 + h * 2 + 1]))
                    mn[h] = T.max(mn[h], T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), mn[h], 1, 32))
                    mn[h] = T.max(mn[h], T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), mn[h], 2, 32))
                    T.ptx["ex2.approx.ftz.f32"](al[h], (m[h] - mn[h]) * T.float32(c))
                    m[h] = mn[h]
                    den[h] = den[h] * al[h]
                for i in T.unroll(32):
                    T.ptx["ex2.approx.ftz.f32"](S[i], (S[i] - m[(i // 2) % 2]) * T.float32(c))
                    den[(i // 2) % 2] = den[(i // 2) % 2] + S[i]
                    acc[i] = acc[i] * al[(i // 2) % 2]
                for i in T.unroll(16):
                    T.ptx["cvt.rn.bf16x2.f32"](P[i], S[2 * i + 1], S[2 * i])
                T.cuda.mbarrier_wait(bar + T.uint32(24) + s * T.uint32(8), ph)
                if early_release:
                    if tx == 0:
                        T.ptx.mbarrier.arrive.shared.b64(bar + T.uint32(40) + s * T.uint32(8), T.uint32(1))
                T.ptx.wgmma.fence.sync.aligned()
                for ki in T.unroll(4):
                    T.ptx[qk](
                        *[acc[i] for i in range(32)], *[P[ki * 4 + e] for e in range(4)],
                        T.uint64(desc_v) | T.cast(lv + T.uint32(128) * T.cast(ki, "uint32"), "uint64"), True, 1, 1, 1,
                    )  # fmt: skip
                T.ptx.wgmma.commit_group.sync.aligned()
                if pv_wait:
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                if early_release == False:  # noqa: E712  (the script parser knows no `not`)
                    if tx == 0:
                        T.ptx.mbarrier.arrive.shared.b64(bar + T.uint32(40) + s * T.uint32(8), T.uint32(1))
            for h in T.unroll(2):
                den[h] = den[h] + T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), den[h], 1, 32)
                den[h] = den[h] + T.cuda.__shfl_xor_sync(T.uint32(0xFFFFFFFF), den[h], 2, 32)
            for i in T.unroll(32):
                Ob[row + (i // 2) % 2 * 8, (i // 4) * 8 + (lane % 4) * 2 + i % 2] = acc[i] / den[(i // 2) % 2]

    return main
