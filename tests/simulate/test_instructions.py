"""Instructions beside a float64 reference: mma and wgmma types and layouts, conversions, access counts."""

from __future__ import annotations

import importlib.util
import pathlib

import ml_dtypes
import numpy as np
import pytest
import torch
from tvm.script import tirx as T

from tvm_tile import simulate as sim

_spec = importlib.util.spec_from_file_location("sim_kernels", pathlib.Path(__file__).with_name("kernels.py"))
K = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(K)
RNG = np.random.default_rng(3)
NUMPY = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8, "u8": np.uint8,
}  # fmt: skip
TVM = {
    "f16": "float16",
    "bf16": "bfloat16",
    "tf32": "float32",
    "e4m3": "uint8",
    "e5m2": "uint8",
    "s8": "int8",
    "u8": "uint8",
}


def values(kind, *shape):
    if kind == "s8":
        return RNG.integers(-128, 128, shape).astype(np.int8)
    if kind == "u8":
        return RNG.integers(0, 256, shape).astype(np.uint8)
    v = RNG.standard_normal(shape).astype(np.float32)
    if kind == "tf32":  # exactly representable, as the hardware truncates
        return (v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return v.astype(NUMPY[kind])


def mma_kernel(k, a, b, acc):
    per = {"tf32": 1, "f16": 2, "bf16": 2}.get(a, 4)
    na, nb, words = k // (4 * per) * 2, k // (4 * per), k // per
    nd = 2 if acc == "f16" else 4
    op = f"mma.sync.aligned.m16n8k{k}.row.col.{acc}.{a}.{b}.{acc}"
    dtype = "float32" if acc == "f32" else "uint32"

    @T.prim_func
    def main(pa: T.handle, pb: T.handle, pc: T.handle):
        A = T.match_buffer(pa, (16, words), "uint32")
        B = T.match_buffer(pb, (8, words), "uint32")
        C = T.match_buffer(pc, (32, nd), dtype)
        tx = T.launch_thread("threadIdx.x", 32)
        c = T.alloc_buffer((nd,), dtype, scope="local")
        for i in T.unroll(nd):
            c[i] = C[tx, i]
        T.ptx[op](
            *[c[i] for i in range(nd)],
            *[A[T.truncdiv(tx, 4) + 8 * (r % 2), r // 2 * 4 + tx % 4] for r in range(na)],
            *[B[T.truncdiv(tx, 4), r * 4 + tx % 4] for r in range(nb)],
            *[c[i] for i in range(nd)],
        )
        for i in T.unroll(nd):
            C[tx, i] = c[i]

    return main


@pytest.mark.parametrize(
    "k,a,b,acc",
    [(16, "bf16", "bf16", "f32"), (8, "bf16", "bf16", "f32"), (16, "f16", "f16", "f32"), (16, "f16", "f16", "f16"),
     (8, "f16", "f16", "f32"),
     (8, "tf32", "tf32", "f32"), (4, "tf32", "tf32", "f32"), (32, "s8", "s8", "s32"), (16, "u8", "s8", "s32"),
     (32, "e4m3", "e4m3", "f32"),
     (32, "e5m2", "e4m3", "f32")],
)  # fmt: skip
def test_mma(k, a, b, acc):
    x, y = values(a, 16, k), values(b, 8, k)
    if acc == "s32":
        c = RNG.integers(-1000, 1000, (16, 8)).astype(np.int32)
    else:
        c = RNG.standard_normal((16, 8)).astype(np.float16 if acc == "f16" else np.float32)
    lanes = np.arange(32)
    rows = np.stack([lanes // 4 + 8 * (i // 2) for i in range(4)], 1)
    cols = np.stack([lanes % 4 * 2 + i % 2 for i in range(4)], 1)
    frag = np.ascontiguousarray(c[rows, cols])
    packed = frag if acc == "f32" else frag.view(np.uint32)
    packed = packed.copy()
    sim.simulate_module(mma_kernel(k, a, b, acc), "sm_90a")(x.view(np.uint32).copy(), y.view(np.uint32).copy(), packed)
    got = packed.view({"f32": np.float32, "s32": np.int32, "f16": np.float16}[acc]).astype(np.float64)
    want = (x.astype(np.float64) @ y.astype(np.float64).T + c.astype(np.float64))[rows, cols]
    np.testing.assert_allclose(got, want, rtol=2e-3 if acc == "f16" else 1e-5, atol=2e-2 if acc == "f16" else 1e-4)


def wgmma_kernel(n, k_elems, kind, tvm_type, size, swizzle, acc, neg=1, trans_b=False):
    """One box of A [64, W bytes] and B through TMA, W / 32 wgmma instructions, accumulators stored by each thread."""
    width = {3: 128, 2: 64, 1: 32}[swizzle]
    steps = k_elems * size // 32
    layout = {3: 1, 2: 2, 1: 3}[swizzle]
    high, desc = layout, ((8 * width >> 4) << 32) | (1 << 16)  # the layout field is or-ed in: literals are below 2**63
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // size}.{acc}.{kind}.{kind}"
    nacc = n // 4 if acc == "f16" else n // 2
    dtype = "float32" if acc == "f32" else "uint32"
    imm = {"f16": (neg, 1, 0, int(trans_b)), "bf16": (neg, 1, 0, int(trans_b)), "s8": ()}.get(kind, (neg, 1))
    off_b = 64 * width
    b_bytes = n * k_elems * size
    b_shape = (k_elems, n) if trans_b else (n, k_elems)
    b_inner, b_outer = (64, k_elems) if trans_b else (k_elems, n)
    desc_b = ((64 << 32) | (((k_elems * 128) >> 4) << 16)) if trans_b else desc
    step_b = 2048 if trans_b else 32
    boxes = n // 64 if trans_b else 1

    @T.prim_func
    def main(pa: T.handle, pb: T.handle, pc: T.handle):
        A = T.match_buffer(pa, (64, k_elems), tvm_type, align=16)
        B = T.match_buffer(pb, b_shape, tvm_type, align=16)
        C = T.match_buffer(pc, (128, nacc), dtype)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            a_map,
            tvm_type,
            2,
            A.data,
            k_elems,
            64,
            k_elems * size,
            k_elems,
            64,
            1,
            1,
            0,
            swizzle,
            0,
            0,
        )
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            b_map,
            tvm_type,
            2,
            B.data,
            b_shape[1],
            b_shape[0],
            b_shape[1] * size,
            b_inner,
            b_outer,
            1,
            1,
            0,
            swizzle,
            0,
            0,
        )
        tx = T.launch_thread("threadIdx.x", 128)
        smem = T.alloc_buffer((off_b + b_bytes + 1032,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        at_b: T.let = base + T.uint32((off_b + 1023) // 1024 * 1024)
        bar: T.let = at_b + T.uint32(b_bytes)
        c = T.alloc_buffer((nacc,), dtype, scope="local")
        if tx == 0:
            T.ptx.mbarrier.init.shared.b64(bar, T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar, T.uint32(64 * width + b_bytes))
            T.ptx[K.TMA_LOAD](base, T.address_of(a_map), 0, 0, bar)
            for q in T.unroll(boxes):
                T.ptx[K.TMA_LOAD](at_b + T.uint32(q * k_elems * 128), T.address_of(b_map), q * 64, 0, bar)
        T.cuda.cta_sync()
        T.cuda.mbarrier_wait(bar, 0)
        T.ptx.wgmma.fence.sync.aligned()
        for s in T.unroll(steps):
            su: T.let = T.cast(s, "uint32")
            T.ptx[op](
                *[c[i] for i in range(nacc)],
                T.shift_left(T.uint64(high), T.uint64(62)) | T.uint64(desc)
                | T.cast(T.shift_right(base + T.uint32(32) * su, T.uint32(4)) & T.uint32(0x3FFF), "uint64"),
                T.shift_left(T.uint64(high), T.uint64(62)) | T.uint64(desc_b)
                | T.cast(T.shift_right(at_b + T.uint32(step_b) * su, T.uint32(4)) & T.uint32(0x3FFF), "uint64"),
                T.ptx.pred(s > 0), *imm,
            )  # fmt: skip
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        for i in T.unroll(nacc):
            C[tx, i] = c[i]

    return main


def run_wgmma(n, kind, swizzle, acc, neg=1, trans_b=False, k=None):
    size = np.dtype(NUMPY[kind]).itemsize
    width = {3: 128, 2: 64, 1: 32}[swizzle]
    k = k or width // size
    a, b = values(kind, 64, k), values(kind, n, k)
    c = np.full((128, n // 4 if acc == "f16" else n // 2), 0x7F, np.uint32)
    stored = np.ascontiguousarray(b.T) if trans_b else b
    tvm_type = TVM[kind]
    views = [
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if kind == "bf16"
        else x.view(np.uint8)
        if kind[0] == "e"
        else x
        for x in (a, stored)
    ]
    out = c.view(np.float32) if acc == "f32" else c
    sim.simulate_module(wgmma_kernel(n, k, kind, tvm_type, size, swizzle, acc, neg, trans_b), "sm_90a")(*views, out)
    want = neg * (a.astype(np.float64) @ b.astype(np.float64).T)
    t = np.arange(128)[:, None]
    i = np.arange(n // 2)[None]
    want = want[16 * (t // 32) + t % 32 // 4 + 8 * (i >> 1 & 1), 8 * (i // 4) + 2 * (t % 4) + (i & 1)]
    got = out.view({"f32": np.float32, "s32": np.int32, "f16": np.float16}[acc]).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=5e-3 if acc == "f16" else 1e-4, atol=5e-2 if acc == "f16" else 1e-3)


@pytest.mark.parametrize(
    "kind,acc",
    [("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32"), ("e4m3", "f32"), ("e5m2", "f32"), ("s8", "s32")],
)
def test_wgmma_types(kind, acc):
    run_wgmma(64, kind, 3, acc)


@pytest.mark.parametrize("swizzle", [1, 2, 3])
@pytest.mark.parametrize("n", [8, 24, 256])
def test_wgmma_swizzles_and_widths(swizzle, n):
    run_wgmma(n, "bf16", swizzle, "f32", neg=-1 if n == 24 else 1)


def test_wgmma_mn_major():
    run_wgmma(128, "bf16", 3, "f32", trans_b=True)


def test_bank_conflicts():
    a = torch.randn(1024)
    b = torch.full((1024,), float("nan"))
    report = sim.simulate_module(K.transpose(), "sm_80")(a, b)
    torch.testing.assert_close(b.view(32, 32), a.view(32, 32).T)
    assert report.bank_conflicts == 32 * 31  # 32 loads, each 32-way
    assert report.shared_loads == report.shared_stores == 32
    for form in (dict(pitch=33), dict(swizzle=True)):
        report = sim.simulate_module(K.transpose(**form), "sm_80")(a, b)
        torch.testing.assert_close(b.view(32, 32), a.view(32, 32).T)
        assert report.bank_conflicts == 0
    assert report.global_sectors == report.global_sectors_ideal == 2 * 32 * 4
    assert report.global_read_bytes == report.global_write_bytes == 4096
    assert "bank conflicts" in repr(report)


def strided(step):
    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32 * step,), "float32")
        B = T.match_buffer(b, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        B[tx] = A[tx * step]

    return main


@pytest.mark.parametrize("step,sectors", [(1, 4), (2, 8), (8, 32), (16, 32)])
def test_global_sectors(step, sectors):
    a, b = torch.randn(32 * step), torch.zeros(32)
    report = sim.simulate_module(strided(step), "sm_80")(a, b)
    assert report.global_sectors == sectors + 4


def convert(op, n_in, src, dst):
    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32, n_in), src)
        B = T.match_buffer(b, (32,), dst)
        tx = T.launch_thread("threadIdx.x", 32)
        v = T.alloc_buffer((1,), dst, scope="local")
        T.ptx[op](v[0], *[A[tx, i] for i in range(n_in)])
        B[tx] = v[0]

    return main


@pytest.mark.parametrize("op,dst,np_type", [
    ("cvt.rn.bf16x2.f32", "uint32", ml_dtypes.bfloat16), ("cvt.rn.f16x2.f32", "uint32", np.float16),
    ("cvt.rn.satfinite.e4m3x2.f32", "uint16", ml_dtypes.float8_e4m3fn),
    ("cvt.rn.satfinite.e5m2x2.f32", "uint16", ml_dtypes.float8_e5m2),
])  # fmt: skip
def test_packed_conversions(op, dst, np_type):
    a = (RNG.standard_normal((32, 2)) * 10.0 ** RNG.integers(-6, 2, (32, 2))).astype(np.float32)
    a[0] = [0.0, -0.0]
    b = np.full(32, 0x7F, dst)
    sim.simulate_module(convert(op, 2, "float32", dst), "sm_90a")(a, b)
    np.testing.assert_array_equal(
        b.view(np_type).reshape(32, 2).astype(np.float32), a[:, ::-1].astype(np_type).astype(np.float32)
    )


def test_saturation():
    a = np.tile(np.array([[1e9, -1e9]], np.float32), (32, 1))
    b = np.zeros(32, np.uint16)
    sim.simulate_module(convert("cvt.rn.satfinite.e4m3x2.f32", 2, "float32", "uint16"), "sm_90a")(a, b)
    np.testing.assert_array_equal(
        b.view(ml_dtypes.float8_e4m3fn).reshape(32, 2).astype(np.float32), np.tile([[-448.0, 448.0]], (32, 1))
    )


def test_unknown_instruction_is_named():
    @T.prim_func
    def main(a: T.handle):
        A = T.match_buffer(a, (32,), "uint32")
        tx = T.launch_thread("threadIdx.x", 32)
        v = T.alloc_buffer((1,), "uint32", scope="local")
        T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](v[0], A[tx])
        A[tx] = v[0]

    with pytest.raises(sim.UnsupportedInstructionError, match="movmatrix"):
        sim.simulate_module(main, "sm_90a")


def test_launch_limits():
    @T.prim_func
    def main(a: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        smem = T.alloc_buffer((200000,), "uint8", scope="shared.dyn", align=1024)
        smem[tx] = T.uint8(1)
        A[tx] = T.cast(smem[tx], "float32")

    a = torch.zeros(32)
    sim.simulate_module(main, "sm_90a")(a)
    assert a.sum() == 32
    with pytest.raises(sim.LaunchLimitError, match="200000"):
        sim.simulate_module(main, "sm_80")(a)
