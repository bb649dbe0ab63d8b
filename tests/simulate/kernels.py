"""Small lowered kernels for the simulator's tests; keyword arguments plant one fault each."""

from __future__ import annotations

from tvm.script import tirx as T

DESC_K128 = 0x4000004000010000  # K-major, 128-byte swizzle, 1024 bytes between groups of 8 rows
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
LDM = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"


def exchange(threads=64, sync=True, shift=0, read=0, write=0, skip_store=False):
    """B[tx] = A reversed through shared memory."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (threads,), "float32")
        B = T.match_buffer(b, (threads,), "float32")
        tx = T.launch_thread("threadIdx.x", threads)
        S = T.alloc_buffer((threads,), "float32", scope="shared")
        if skip_store:
            if tx != 3:
                S[tx] = A[tx + read]
        else:
            S[tx] = A[tx + read]
        if sync:
            T.cuda.cta_sync()
        B[tx + write] = S[threads - 1 - tx + shift]

    return main


def diverge(sync_below=32):
    """Only threads below ``sync_below`` reach the barrier."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (64,), "float32")
        B = T.match_buffer(b, (64,), "float32")
        tx = T.launch_thread("threadIdx.x", 64)
        if tx < sync_below:
            T.cuda.cta_sync()
        B[tx] = A[tx]

    return main


def shuffle(lanes=32, mask=0xFFFFFFFF):
    """Butterfly sum of a warp; with ``lanes`` < 32 the others never come."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        B = T.match_buffer(b, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        v = T.alloc_buffer((1,), "float32", scope="local")
        v[0] = A[tx]
        if tx < lanes:
            for d in T.unroll(5):
                v[0] = v[0] + T.cuda.__shfl_xor_sync(T.uint32(mask), v[0], T.shift_left(1, d), 32)
        B[tx] = v[0]

    return main


def vector_copy(offset=0):
    """16-byte shared-memory accesses through PTX, at ``offset`` bytes."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (128,), "uint32")
        B = T.match_buffer(b, (128,), "uint32")
        tx = T.launch_thread("threadIdx.x", 32)
        smem = T.alloc_buffer((1024,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        v = T.alloc_buffer((4,), "uint32", scope="local")
        at: T.let = base + T.cast(tx * 16 + offset, "uint32")
        T.ptx["st.shared.v4.b32"](at, A[tx * 4], A[tx * 4 + 1], A[tx * 4 + 2], A[tx * 4 + 3])
        T.cuda.warp_sync()
        T.ptx["ld.shared.v4.b32"](v[0], v[1], v[2], v[3], at)
        for i in T.unroll(4):
            B[tx * 4 + i] = v[i]

    return main


def transpose(pitch=32, swizzle=False):
    """A 32 x 32 tile written by rows and read by columns, for bank conflicts."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (1024,), "float32")
        B = T.match_buffer(b, (1024,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        S = T.alloc_buffer((32 * pitch,), "float32", scope="shared")
        for i in T.serial(32):
            S[i * pitch + (tx ^ i if swizzle else tx)] = A[i * 32 + tx]
        T.cuda.cta_sync()
        for i in T.serial(32):
            B[i * 32 + tx] = S[tx * pitch + (i ^ tx if swizzle else i)]

    return main


def double_buffer(steps=4, wait=True, sync=True, reuse_sync=True, stale=False):
    """Sum of ``steps`` rows of 512 bytes through a cp.async double buffer."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (steps * 128,), "float32")
        B = T.match_buffer(b, (128,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        smem = T.alloc_buffer((1024,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        acc = T.alloc_buffer((4,), "float32", scope="local")
        v = T.alloc_buffer((4,), "float32", scope="local")
        for i in T.unroll(4):
            acc[i] = T.float32(0)
        T.ptx["cp.async.cg.shared.global"](base + T.cast(tx * 16, "uint32"), A.ptr_to([tx * 4]), 16)
        T.ptx.cp.async_.commit_group()
        for k in T.serial(steps):
            if k + 1 < steps:
                T.ptx["cp.async.cg.shared.global"](
                    base + T.cast(((k + 1) % 2) * 512 + tx * 16, "uint32"), A.ptr_to([(k + 1) * 128 + tx * 4]), 16
                )
            T.ptx.cp.async_.commit_group()
            if wait:
                T.ptx.cp.async_.wait_group(1)
            if sync:
                T.cuda.cta_sync()
            # each thread reads what its neighbour has copied
            T.ptx["ld.shared.v4.f32"](
                v[0],
                v[1],
                v[2],
                v[3],
                base + T.cast(((k + 1 if stale else k) % 2) * 512 + ((tx + 1) % 32) * 16, "uint32"),
            )
            for i in T.unroll(4):
                acc[i] = acc[i] + v[i]
            if sync and reuse_sync:
                T.cuda.cta_sync()
        for i in T.unroll(4):
            B[((tx + 1) % 32) * 4 + i] = acc[i]

    return main


def mma_gemm(m=64, n=64, k=128, stages=3, wait_slack=0, reuse_sync=True):
    """C = A B^T in bf16 with a cp.async ring, ldmatrix and mma.sync; one block of 4 warps, tile 64 x 64 x 64."""
    stage_bytes = 16384

    @T.prim_func
    def main(a: T.handle, b: T.handle, c: T.handle):
        A = T.match_buffer(a, (m, k), "bfloat16", align=16)
        B = T.match_buffer(b, (n, k), "bfloat16", align=16)
        C = T.match_buffer(c, (m, n), "float32", align=16)
        tx = T.launch_thread("threadIdx.x", 128)
        smem = T.alloc_buffer((stages * stage_bytes,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        lane: T.let = tx % 32
        warp: T.let = T.truncdiv(tx, 32)
        row: T.let = T.truncdiv(tx, 8)
        chunk: T.let = tx % 8
        acc = T.alloc_buffer((32,), "float32", scope="local")
        af = T.alloc_buffer((4,), "uint32", scope="local")
        bf = T.alloc_buffer((4,), "uint32", scope="local")
        for i in T.unroll(32):
            acc[i] = T.float32(0)

        @T.inline
        def load(kt):
            dst: T.let = base + T.cast((kt % stages) * stage_bytes + row * 128 + (chunk ^ (row % 8)) * 16, "uint32")
            for i in T.unroll(4):
                T.ptx["cp.async.cg.shared.global"](
                    dst + T.uint32(i * 2048), A.ptr_to([row + i * 16, kt * 64 + chunk * 8]), 16
                )
                T.ptx["cp.async.cg.shared.global"](
                    dst + T.uint32(8192 + i * 2048), B.ptr_to([row + i * 16, kt * 64 + chunk * 8]), 16
                )

        for s in T.unroll(stages - 1):
            if s < k // 64:
                load(s)
            T.ptx.cp.async_.commit_group()
        for kt in T.serial(k // 64):
            T.ptx.cp.async_.wait_group(stages - 2 + wait_slack)
            if reuse_sync:
                T.cuda.cta_sync()
            if kt + stages - 1 < k // 64:
                load(kt + stages - 1)
            T.ptx.cp.async_.commit_group()
            tile: T.let = base + T.cast((kt % stages) * stage_bytes, "uint32")
            for ki in T.unroll(4):
                T.ptx[LDM](
                    af[0], af[1], af[2], af[3],
                    tile
                    + T.cast((warp * 16 + lane % 16) * 128, "uint32")
                    + T.cast(((ki * 2 + T.truncdiv(lane, 16)) ^ (lane % 8)) * 16, "uint32"),
                )  # fmt: skip
                for j in T.unroll(4):
                    T.ptx[LDM](
                        bf[0], bf[1], bf[2], bf[3],
                        tile + T.uint32(8192)
                        + T.cast((j * 16 + lane % 8 + T.truncdiv(lane, 16) * 8) * 128, "uint32")
                        + T.cast(((ki * 2 + T.truncdiv(lane, 8) % 2) ^ (lane % 8)) * 16, "uint32"),
                    )  # fmt: skip
                    for h in T.unroll(2):
                        T.ptx[MMA](
                            *[acc[(j * 2 + h) * 4 + e] for e in range(4)], *[af[e] for e in range(4)],
                            bf[h * 2], bf[h * 2 + 1], *[acc[(j * 2 + h) * 4 + e] for e in range(4)],
                        )  # fmt: skip
        for j in T.unroll(8):
            for e in T.unroll(4):
                C[warp * 16 + T.truncdiv(lane, 4) + T.truncdiv(e, 2) * 8, j * 8 + (lane % 4) * 2 + e % 2] = acc[
                    j * 4 + e
                ]

    return main


def wgmma_gemm(
    k=256, n=128, stages=2, phase=0, tx_delta=0, proxy_fence=True, wgmma_fence=True, wgmma_wait=True, release=True,
    empty_wait=True, full_wait=True, wrong_swizzle=False, store_wait=True, init_count=1, misaligned=0,
    zero_init=True, late_release=True,
    dst_offset=0, extra_arrive=False,
):  # fmt: skip
    """C[64, n] = A[64, k] B[n, k]^T: a TMA producer, one consumer warpgroup, a ring, a TMA store."""
    a_bytes, b_bytes = 64 * 128, n * 128
    stage = a_bytes + b_bytes
    off_c = stages * stage
    off_bar = off_c + 64 * n * 2
    size = off_bar + 16 * stages
    steps = k // 64
    nacc = n // 2
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"

    @T.prim_func
    def main(a: T.handle, b: T.handle, c: T.handle):
        A = T.match_buffer(a, (64, k), "bfloat16", align=16)
        B = T.match_buffer(b, (n, k), "bfloat16", align=16)
        C = T.match_buffer(c, (64, n), "bfloat16", align=16)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        c_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            a_map,
            "bfloat16",
            2,
            A.data,
            k,
            64,
            k * 2,
            64,
            64,
            1,
            1,
            0,
            0 if wrong_swizzle else 3,
            2,
            0,
        )
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled", b_map, "bfloat16", 2, B.data, k, n, k * 2, 64, n, 1, 1, 0, 3, 2, 0
        )
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled", c_map, "bfloat16", 2, C.data, n, 64, n * 2, 64, 64, 1, 1, 0, 3, 0, 0
        )
        tx = T.launch_thread("threadIdx.x", 256)
        smem = T.alloc_buffer((size,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        wg: T.let = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), T.truncdiv(tx, 128), 0, 32)
        full: T.let = base + T.uint32(off_bar)
        empty: T.let = base + T.uint32(off_bar + 8 * stages)
        if tx == 0:
            for i in T.unroll(stages):
                T.ptx.mbarrier.init.shared.b64(full + T.uint32(8 * i), T.uint32(1))
                T.ptx.mbarrier.init.shared.b64(empty + T.uint32(8 * i), T.uint32(init_count))
            T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        if wg == 0:
            if tx == 0:
                for ko in T.serial(steps, unroll=False):
                    s: T.let = T.cast(ko % stages, "uint32")
                    if empty_wait:
                        T.cuda.mbarrier_wait(empty + s * T.uint32(8), (T.truncdiv(ko, stages) & 1) ^ 1)
                    T.ptx.mbarrier.arrive.expect_tx.shared.b64(full + s * T.uint32(8), T.uint32(stage + tx_delta))
                    if extra_arrive:
                        T.ptx.mbarrier.arrive.shared.b64(full + s * T.uint32(8), T.uint32(1))
                    T.ptx[TMA_LOAD](
                        base + s * T.uint32(stage) + T.uint32(misaligned),
                        T.address_of(a_map),
                        ko * 64,
                        0,
                        full + s * T.uint32(8),
                    )
                    T.ptx[TMA_LOAD](
                        base + s * T.uint32(stage) + T.uint32(a_bytes + dst_offset),
                        T.address_of(b_map),
                        ko * 64,
                        0,
                        full + s * T.uint32(8),
                    )
        else:
            acc = T.alloc_buffer((nacc,), "float32", scope="local")
            packed = T.alloc_buffer((4,), "uint32", scope="local")
            wtx: T.let = tx % 128
            lane: T.let = tx % 32
            warp: T.let = T.truncdiv(wtx, 32)
            if zero_init:
                for i in T.unroll(nacc):
                    acc[i] = T.float32(0)
            for ko in T.serial(steps):
                s: T.let = T.cast(ko % stages, "uint32")
                if full_wait:
                    T.cuda.mbarrier_wait(full + s * T.uint32(8), (T.truncdiv(ko, stages) & 1) ^ phase)
                la: T.let = T.shift_right(base + s * T.uint32(stage), T.uint32(4)) & T.uint32(0x3FFF)
                lb: T.let = T.shift_right(base + s * T.uint32(stage) + T.uint32(a_bytes), T.uint32(4)) & T.uint32(
                    0x3FFF
                )
                if not late_release:
                    if wtx == 0:
                        T.ptx.mbarrier.arrive.shared.b64(empty + s * T.uint32(8), T.uint32(1))
                if wgmma_fence:
                    T.ptx.wgmma.fence.sync.aligned()
                for ki in T.unroll(4):
                    T.ptx[op](
                        *[acc[i] for i in range(nacc)],
                        T.uint64(DESC_K128) | T.cast(la + T.cast(2 * ki, "uint32"), "uint64"),
                        T.uint64(DESC_K128) | T.cast(lb + T.cast(2 * ki, "uint32"), "uint64"),
                        T.ptx.pred(True), 1, 1, 0, 0,
                    )  # fmt: skip
                T.ptx.wgmma.commit_group.sync.aligned()
                if wgmma_wait:
                    T.ptx.wgmma.wait_group.sync.aligned(0)
                if release and late_release:
                    if wtx == 0:
                        T.ptx.mbarrier.arrive.shared.b64(empty + s * T.uint32(8), T.uint32(1))
            for q in T.unroll(n // 64):
                for jj in T.unroll(4):
                    for e in T.unroll(4):
                        T.ptx["cvt.rn.bf16x2.f32"](
                            packed[e], acc[q * 32 + jj * 8 + e * 2 + 1], acc[q * 32 + jj * 8 + e * 2]
                        )
                    T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](
                        base + T.uint32(off_c + q * 8192)
                        + T.cast((warp * 16 + lane % 16) * 128, "uint32")
                        + T.cast(((jj * 2 + T.truncdiv(lane, 16)) ^ (lane % 8)) * 16, "uint32"),
                        packed[0], packed[1], packed[2], packed[3],
                    )  # fmt: skip
            if proxy_fence:
                T.ptx.fence.proxy.async_.shared__cta()
            T.ptx.bar.sync(T.uint32(1), T.uint32(128))
            if wtx == 0:
                for q in T.unroll(n // 64):
                    T.ptx[TMA_STORE](T.address_of(c_map), q * 64, 0, base + T.uint32(off_c + q * 8192))
                T.ptx.cp.async_.bulk.commit_group()
                if store_wait:
                    T.ptx.cp.async_.bulk.wait_group(0)

    return main


def named_barrier(arrive=True, count=64):
    """Warp 0 hands 32 values to warp 1 through a named barrier."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        B = T.match_buffer(b, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 64)
        S = T.alloc_buffer((32,), "float32", scope="shared")
        if tx < 32:
            S[tx] = A[tx]
            if arrive:
                T.ptx.bar.arrive(T.uint32(3), T.uint32(count))
        else:
            T.ptx.bar.sync(T.uint32(3), T.uint32(64))
            B[tx - 32] = S[63 - tx]

    return main


def accumulate(blocks=4, atomic=True):
    """Every block adds its number to C[0]; without atomics, blocks race."""

    @T.prim_func
    def main(c: T.handle):
        C = T.match_buffer(c, (1,), "float32")
        bx = T.launch_thread("blockIdx.x", blocks)
        tx = T.launch_thread("threadIdx.x", 32)
        if tx == 0:
            if atomic:
                T.evaluate(T.cuda.atomic_add(T.address_of(C[0]), T.cast(bx + 1, "float32")))
            else:
                C[0] = C[0] + T.cast(bx + 1, "float32")

    return main


def local_array(init=True):
    """B[tx] = sum of a local array whose last element may be left unset."""

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (128,), "float32")
        B = T.match_buffer(b, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        v = T.alloc_buffer((4,), "float32", scope="local")
        for i in T.serial(4 if init else 3):
            v[i] = A[tx * 4 + i]
        B[tx] = v[0] + v[1] + v[2] + v[3]

    return main
