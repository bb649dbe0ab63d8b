"""What surrounds the instructions: element types, printing, traps, TMA shapes, clusters, arguments."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import tvm_ffi
from tvm.script import tirx as T

from tvm_tile import simulate as sim
from tvm_tile.errors import CallError

GEN = torch.Generator().manual_seed(11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_arithmetic(dtype):
    @T.prim_func
    def main(a: T.handle, b: T.handle, c: T.handle):
        A = T.match_buffer(a, (256,), dtype)
        B = T.match_buffer(b, (256,), dtype)
        C = T.match_buffer(c, (256,), "float32")
        tx = T.launch_thread("threadIdx.x", 64)
        for v in T.vectorized(4):
            C[tx * 4 + v] = T.cast(A[tx * 4 + v], "float32") * T.float32(3)
        for v in T.vectorized(4):
            B[tx * 4 + v] = T.cast(C[tx * 4 + v], dtype)

    torch_type = getattr(torch, dtype)
    a = torch.randn(256, generator=GEN).to(torch_type)
    b, c = torch.full((256,), float("nan")).to(torch_type), torch.full((256,), float("nan"))
    sim.simulate_module(main, "sm_80")(a, b, c)
    assert torch.equal(c, a.float() * 3)
    assert torch.equal(b, (a.float() * 3).to(torch_type))


def test_math_functions():
    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        B = T.match_buffer(b, (8, 32), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        x: T.let = A[tx]
        B[0, tx] = T.exp(x)
        B[1, tx] = T.exp2(x)
        B[2, tx] = T.log(T.fabs(x))
        B[3, tx] = T.rsqrt(T.fabs(x))
        B[4, tx] = T.tanh(x)
        B[5, tx] = T.erf(x)
        B[6, tx] = T.max(x, T.float32(0))
        B[7, tx] = T.floor(x)

    a, b = torch.randn(32, generator=GEN), torch.full((8, 32), float("nan"))
    sim.simulate_module(main, "sm_80")(a, b)
    m = a.abs()
    want = torch.stack([a.exp(), a.exp2(), m.log(), m.rsqrt(), a.tanh(), a.erf(), a.relu(), a.floor()])
    torch.testing.assert_close(b, want, rtol=1e-5, atol=1e-6)


def test_trap_is_reported():
    @T.prim_func
    def main(a: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        T.cuda.trap_when_assert_failed(A[tx] >= T.float32(0))
        A[tx] = T.float32(1)

    a = torch.ones(32)
    sim.simulate_module(main, "sm_80")(a)
    a[7] = -1
    with pytest.raises(sim.KernelTrapError, match="thread 7 "):
        sim.simulate_module(main, "sm_80")(a)


def test_printf():
    @T.prim_func
    def main(a: T.handle):
        A = T.match_buffer(a, (32,), "float32")
        tx = T.launch_thread("threadIdx.x", 32)
        if tx == 3:
            T.cuda.printf("x[%d] = %f\n", tx, A[tx])

    a = torch.arange(32).float()
    assert sim.simulate_module(main, "sm_80")(a).output == "x[3] = 3.000000\n"


def box_copy(shape, box, at, back):
    """One TMA load of a box at ``at`` and one store of it at ``back``, without swizzle."""
    rank = len(shape)
    dims = list(reversed(shape))
    strides = [4 * int(np.prod(dims[:i])) for i in range(1, rank)]
    boxes = list(reversed(box))
    size = int(np.prod(box)) * 4
    load = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"

    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, shape, "float32", align=16)
        B = T.match_buffer(b, shape, "float32", align=16)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        b_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            a_map,
            "float32",
            rank,
            A.data,
            *dims,
            *strides,
            *boxes,
            *[1] * rank,
            0,
            0,
            0,
            0,
        )
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled",
            b_map,
            "float32",
            rank,
            B.data,
            *dims,
            *strides,
            *boxes,
            *[1] * rank,
            0,
            0,
            0,
            0,
        )
        tx = T.launch_thread("threadIdx.x", 32)
        smem = T.alloc_buffer((size + 1024,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        bar: T.let = base + T.uint32((size + 127) // 128 * 128)
        if tx == 0:
            T.ptx.mbarrier.init.shared.b64(bar, T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(bar, T.uint32(size))
            T.ptx[load](base, T.address_of(a_map), *reversed(at), bar)
            T.cuda.mbarrier_wait(bar, 0)
            T.ptx[store](T.address_of(b_map), *reversed(back), base)
            T.ptx.cp.async_.bulk.commit_group()
            T.ptx.cp.async_.bulk.wait_group(0)

    return main


@pytest.mark.parametrize(
    "shape,box,at,back",
    [((40,), (8,), (-3,), (20,)), ((9, 12), (4, 8), (7, 8), (-1, 8)), ((3, 5, 8), (2, 3, 4), (2, -1, 4), (0, 4, 0)),
     ((2, 3, 4, 8), (1, 2, 2, 8), (1, 2, 3, 0), (0, 0, 0, 0)),
     ((2, 2, 3, 3, 4), (2, 1, 2, 2, 4), (0, 1, 2, -1, 0), (0, 0, 0, 0, 0))],
)  # fmt: skip
def test_tma_boxes_at_the_edges(shape, box, at, back):
    a, b = torch.randn(shape, generator=GEN), torch.full(shape, 7.0)
    want = b.clone()
    sim.simulate_module(box_copy(shape, box, at, back), "sm_90a")(a, b)
    for i in np.ndindex(*box):
        src, dst = [p + q for p, q in zip(at, i, strict=True)], [p + q for p, q in zip(back, i, strict=True)]
        if all(0 <= p < s for p, s in zip(dst, shape, strict=True)):
            inside = all(0 <= p < s for p, s in zip(src, shape, strict=True))
            want[tuple(dst)] = a[tuple(src)] if inside else 0.0
    assert torch.equal(b, want)


def test_tensor_map_rules():
    with pytest.raises(sim.LaunchLimitError, match="multiple of 16"):
        sim.simulate_module(box_copy((9, 11), (4, 8), (0, 0), (0, 0)), "sm_90a")(torch.zeros(9, 11), torch.zeros(9, 11))


def test_cluster_reads_its_neighbour():
    @T.prim_func
    def main(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (64,), "float32")
        B = T.match_buffer(b, (64,), "float32")
        bx = T.launch_thread("blockIdx.x", 2)
        rank = T.launch_thread("clusterCtaIdx.x", 2)
        tx = T.launch_thread("threadIdx.x", 32)
        smem = T.alloc_buffer((1024,), "uint8", scope="shared.dyn", align=1024)
        base: T.let = T.cuda.cvta_generic_to_shared(smem.data)
        remote = T.alloc_buffer((1,), "uint32", scope="local")
        v = T.alloc_buffer((1,), "float32", scope="local")
        T.ptx["st.shared.f32"](base + T.cast(tx * 4, "uint32"), A[bx * 32 + tx])
        T.ptx.barrier.cluster.arrive.release.aligned()
        T.ptx.barrier.cluster.wait.acquire.aligned()
        T.ptx["mapa.shared::cluster.u32"](remote[0], base + T.cast(tx * 4, "uint32"), T.cast(1 - rank, "uint32"))
        T.ptx["ld.shared::cluster.f32"](v[0], remote[0])
        B[bx * 32 + tx] = v[0]
        T.ptx.barrier.cluster.arrive.release.aligned()
        T.ptx.barrier.cluster.wait.acquire.aligned()

    a, b = torch.randn(64, generator=GEN), torch.full((64,), float("nan"))
    sim.simulate_module(main, "sm_90a", seed=3)(a, b)
    assert torch.equal(b, torch.cat([a[32:], a[:32]]))


def symbolic():
    @T.prim_func
    def main(a: T.handle, b: T.handle, s: T.float32):
        n = T.int32()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (n,), "float32")
        bx = T.launch_thread("blockIdx.x", T.truncdiv(n + 31, 32))
        tx = T.launch_thread("threadIdx.x", 32)
        if bx * 32 + tx < n:
            B[bx * 32 + tx] = A[bx * 32 + tx] * s

    return main


@pytest.mark.parametrize("n", [1, 7, 100])
def test_symbolic_shapes_numpy_and_scalars(n):
    a, b = np.random.default_rng(n).standard_normal(n).astype(np.float32), np.full(n, np.nan, np.float32)
    report = sim.simulate_module(symbolic(), "sm_80")(a, b, 2.5)
    np.testing.assert_array_equal(b, a * np.float32(2.5))
    assert report.blocks == (n + 31) // 32


def test_in_place_and_views():
    x = torch.randn(200, generator=GEN)
    want = x.clone()
    want[50:150] *= 3
    sim.simulate_module(symbolic(), "sm_80")(x[50:150], x[50:150], 3.0)
    assert torch.equal(x, want)


def test_the_hosts_own_checks_stay():
    with pytest.raises(Exception, match="shape|ndim"):
        sim.simulate_module(symbolic(), "sm_80")(torch.zeros(3), torch.zeros(4), 1.0)
    with pytest.raises(CallError, match="list"):
        sim.simulate_module(symbolic(), "sm_80")([1.0], torch.zeros(1), 1.0)


def test_compile_callback_is_left_as_it_was():
    name = "tvm_callback_cuda_compile"
    before = tvm_ffi.get_global_func(name, allow_missing=True)
    marker = lambda code, *_: b"mine"  # noqa: E731
    tvm_ffi.register_global_func(name, marker, override=True)
    try:
        sim.simulate_module(symbolic(), "sm_80")
        assert tvm_ffi.get_global_func(name)("x") == b"mine"
    finally:
        if before is not None:
            tvm_ffi.register_global_func(name, before, override=True)


def test_a_missing_compiler_is_named():
    code = (
        "from tvm_tile.simulate import build\nfrom tvm_tile.errors import ToolchainError\n"
        "try: build.runtime_library()\nexcept ToolchainError as e: print('found', e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/nonexistent", "TVM_TILE_CACHE_DIR": "/tmp/none", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "g++" in out.stdout, out.stderr[-2000:]
