"""Kernels as a whole: launches, loops, atomics, views, printing, expert control."""

import numpy as np
import pytest

import tvm_tile
import tvm_tile.language as T
from tvm_tile import ir, layout

from .harness import out, rand, run
from .interpreter import DeviceAssertion


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("stages", [0, 1, 2, 4])
def test_every_pipelined_iteration_runs_once(count, stages):
    # tilelang-ascend 1378: fewer iterations than stages, not a multiple of them, start != 0
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), B: T.Tensor((3, 8), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((8,), "float32")
            total = T.alloc_fragment((3, 8), "float32")
            T.clear(total)
            for k in T.Pipelined(hi - lo, num_stages=stages):
                T.copy(A[k * 8], tile)
                for i in T.Parallel(8):
                    total[0, i] += tile[i]
            for k in T.Pipelined(lo, hi, stages):
                T.copy(A[k * 8], tile)
                for i in T.Parallel(8):
                    total[1, i] += tile[i]
            for k in T.Pipelined(range(lo, hi), stages):
                T.copy(A[k * 8], tile)
                for i in T.Parallel(8):
                    total[2, i] += tile[i]
            T.copy(total, B)

    a, b = rand(np.random.default_rng(0), 64), out((3, 8))
    run(kernel, a, b, 1, 1 + count)
    rows = a.reshape(8, 8)
    np.testing.assert_allclose(b[0], rows[:count].sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(b[1], rows[1 : 1 + count].sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(b[1], b[2])


def test_last_pipelined_tile_is_read_after_the_loop():
    # tilelang 3039
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((8,), "float32")
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[k, 0], tile)
            T.copy(tile, B)

    a, b = rand(np.random.default_rng(0), (4, 8)), out(8)
    run(kernel, a, b)
    np.testing.assert_array_equal(b, a[3])


def test_block_mask_around_copies_and_products():
    # tilelang 2876
    @T.prim_func
    def kernel(A: T.Tensor((4, 16, 16), "float16"), Mask: T.Tensor((4,), "int8"), C: T.Tensor((16, 16), "float32")):
        with T.Kernel(1, threads=32) as bx:
            a = T.alloc_shared((16, 16), "float16")
            c = T.alloc_fragment((16, 16), "float32")
            T.clear(c)
            for k in T.Pipelined(4, num_stages=2):
                if Mask[k] != 0:
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
            T.copy(c, C)

    a, c = rand(np.random.default_rng(0), (4, 16, 16), "float16"), out((16, 16))
    run(kernel, a, np.array([1, 0, 0, 3], "int8"), c)
    wide = a.astype("float32")
    np.testing.assert_allclose(c, wide[0] @ wide[0] + wide[3] @ wide[3], rtol=1e-4, atol=1e-4)


def test_manual_order_and_stage():
    @T.prim_func
    def kernel(A: T.Tensor((4, 8), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((8,), "float32")
            total = T.alloc_fragment((8,), "float32")
            n = T.alloc_var("int32", init=0)
            T.clear(total)
            for k in T.Pipelined(4, order=[0, 2, 1], stage=[0, 1, 1]):
                row = k  # an alias is no statement
                T.copy(A[row, 0], tile)
                for i in T.Parallel(8):
                    total[i] += tile[i]
                n = n + 1
            T.copy(total, B)

    a, b = rand(np.random.default_rng(0), (4, 8)), out(8)
    run(kernel, a, b)
    np.testing.assert_allclose(b, a.sum(0), rtol=1e-5, atol=1e-6)
    assert 'annotations={"tile.num_stages": 2, "tile.order": [0, 2, 1], "tile.stage": [0, 1, 1]}' in kernel.script()
    assert [op.statement for op in ir.tile_ops(kernel.body)] == [None, 0, 1, None]


def test_several_kernels_run_one_after_another():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), Part: T.Tensor((4,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_fragment((8,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(A[bx * 8], tile)
            T.reduce_sum(tile, total)
            T.copy(total, Part[bx])
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_fragment((4,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(Part, tile)
            T.reduce_sum(tile, total)
            T.copy(total, B)

    a, part, b = rand(np.random.default_rng(0), 27), out(4), out(1)
    run(kernel, a, part, b)
    np.testing.assert_allclose(b[0], a.sum(), rtol=1e-5)
    assert [k.name for k in ir.kernels_of(kernel)] == ["kernel", "kernel_1"]


def test_output_before_its_input_in_the_signature():
    # tilelang 3017
    @T.prim_func
    def kernel(B: T.Tensor((9,), "float32"), s: T.float32, A: T.Tensor((9,), "float32")):
        with T.Kernel(3, 3, 1, threads=32) as (bx, by, bz):
            B[bx * 3 + by] = A[by + 3 * bx + bz] * s

    a, b = rand(np.random.default_rng(0), 9), out(9)
    run(kernel, b, 2.0, a)
    np.testing.assert_array_equal(b, a * 2)


@pytest.mark.parametrize("dtype", ["int32", "float32", "int64", "uint32", "float64"])
@pytest.mark.parametrize("op", ["add", "max", "min"])
def test_atomics(op, dtype):
    if op != "add" and dtype == "float64":
        pytest.skip("no such atomic")
    update = getattr(T, f"atomic_{op}")

    @T.prim_func
    def kernel(A: T.Tensor((50,), dtype), B: T.Tensor((4,), dtype), C: T.Tensor((5,), dtype)):
        with T.Kernel(5, threads=32) as bx:
            near = T.alloc_shared((2,), dtype)
            tile = T.alloc_shared((5,), dtype)
            T.fill(near, B[3])
            for i in T.Parallel(10):
                update(B[i % 3], A[bx * 10 + i])
                update(near[0], A[bx * 10 + i])
            update(B[3], near[0])  # once a CTA
            T.copy(A[bx * 10], tile)
            update(C, tile)  # a tile

    a, b, c = rand(np.random.default_rng(0), 50, dtype, 0, 9), np.ones(4, dtype), np.ones(5, dtype)
    first = b.copy()
    run(kernel, a, b, c)
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum}[op]
    expected = first.copy()
    for n, value in enumerate(a):
        expected[n % 10 % 3] = combine(expected[n % 10 % 3], value)
    np.testing.assert_allclose(b[:3], expected[:3], rtol=1e-5)
    tiles = np.ones(5, dtype)
    for part in a.reshape(5, 10):
        tiles = combine(tiles, part[:5])
    np.testing.assert_allclose(c, tiles, rtol=1e-5)


def test_atomic_add_once_for_each_iteration():
    # tilelang 2959: the documentation's own example gave 1 instead of 128
    @T.prim_func
    def kernel(C: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=128) as bx:
            for i in T.Parallel(128):
                T.atomic_add(C[0], 1)
            T.atomic_add(C[1], 1)

    c = np.zeros(2, "int32")
    run(kernel, c)
    assert c.tolist() == [128, 1]


def test_previous_value_of_an_atomic():
    @T.prim_func
    def kernel(C: T.Tensor((1,), "int32"), Order: T.Tensor((40,), "int32"), Last: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(40):
                Order[i] = T.atomic_add(C[0], 2, return_prev=True) // 2
            ticket = T.atomic_add(C[0], 5, return_prev=True)
            Last[0] = ticket

    c, order, last = np.zeros(1, "int32"), out(40, "int32"), out(1, "int32")
    run(kernel, c, order, last)
    assert sorted(order.tolist()) == list(range(40)) and c[0] == 85 and last[0] == 80


def test_read_next_to_an_atomic_keeps_program_order():
    # tilelang 2595
    @T.prim_func
    def kernel(C: T.Tensor((1,), "float32"), Seen: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for k in T.Pipelined(4, num_stages=2):
                Seen[k] = C[0]
                T.atomic_add(C[0], 1.0)

    c, seen = np.zeros(1, "float32"), out(4)
    run(kernel, c, seen)
    assert seen.tolist() == [0, 1, 2, 3] and c[0] == 4


def test_reshape_and_view():
    @T.prim_func
    def kernel(A: T.Tensor((4, 6), "float32"), B: T.Tensor((3, 8), "float32"), Bits: T.Tensor((24,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((4, 6), "float32")
            T.copy(A, tile)
            turned = T.reshape(tile, (3, 8))
            bits = T.view(tile, (24,), "int32")
            T.copy(turned, B)
            for i in T.Parallel(24):
                bits[i] = bits[i] ^ (-2147483647 - 1)
            T.copy(bits, Bits)

    a, b, bits = rand(np.random.default_rng(0), (4, 6)), out((3, 8)), out(24, "int32")
    run(kernel, a, b, bits)
    np.testing.assert_array_equal(b, a.reshape(3, 8))
    np.testing.assert_array_equal(bits, (-a).reshape(-1).view("int32"))


def test_assume_is_checked_at_the_call():
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), k: T.int32):
        T.assume(n % 8 == 0)
        T.assume(k > 0, "k must be positive")
        with T.Kernel(n // 8, threads=32) as bx:
            for i in T.Parallel(8):
                A[bx * 8 + i] = k

    a = out(16)
    run(kernel, a, 3)
    assert (a == 3).all()
    compiled = tvm_tile.compile(kernel, "llvm", lowering="reference")
    with pytest.raises(tvm_tile.TileError, match="n % 8"):
        compiled(out(15), 3)
    with pytest.raises(tvm_tile.TileError, match="k > 0"):
        compiled(out(16), 0)


def test_persistent_tiles_are_visited_once():
    @T.prim_func
    def kernel(A: T.Tensor((5, 7), "int32")):
        with T.Kernel(4, threads=32) as b:
            for m, n in T.Persistent([5, 7], 4, b):
                T.atomic_add(A[m, n], 1 + b)

    a = np.zeros((5, 7), "int32")
    run(kernel, a)
    np.testing.assert_array_equal(a.reshape(-1), [1 + i % 4 for i in range(35)])


def test_print_and_assert():
    @T.prim_func
    def kernel(A: T.Tensor((3,), "int32"), n: T.int32):
        with T.Kernel(2, threads=32) as bx:
            T.print(A[0] + bx, "first")
            T.print("only text")
            T.print(A, "tensor")
            for i in T.Parallel(2):
                T.print(i)
                T.device_assert(A[i] < n, "too large")
            T.device_assert(n > 0)

    a = np.array([5, 6, 7], "int32")
    printed = run(kernel, a, 10, compiled=False).printed
    assert printed[:5] == ["first|5", "only text|", "tensor A[%d] = |5,0", "tensor A[%d] = |6,1", "tensor A[%d] = |7,2"]
    assert printed[5:7] == ["|0", "|1"] and len(printed) == 14
    with pytest.raises(DeviceAssertion, match="too large"):
        run(kernel, a, 6, compiled=False)


def test_warpgroups_run_in_source_order_serially():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=256) as bx:
            tile = T.alloc_shared((8,), "float32")
            with T.ws(0):
                T.copy(A, tile)
            T.sync_threads()
            with T.ws(1):
                for i in T.Parallel(8):
                    B[i] = tile[i] + 1.0

    a, b = rand(np.random.default_rng(0), 8), out(8)
    run(kernel, a, b)
    np.testing.assert_array_equal(b, a + 1)
    assert [type(op).__name__ for op in ir.tile_ops(kernel.body)] == ["CopyOp", "SyncOp", "ParallelOp"]


def test_annotations_of_the_kernel_are_recorded():
    chosen = layout.SharedLayout.row_major((16, 16), 16)

    @T.prim_func
    def kernel(A: T.Tensor((16, 16), "float16")):
        with T.Kernel(1, threads=96) as bx:
            tile = T.alloc_shared((16, 16), "float16")
            T.annotate_layout({tile: chosen})
            T.use_swizzle(10, order="column")
            T.copy(A, tile)
            T.copy(tile, A)

    info = ir.kernels_of(kernel)[0]
    assert (info.threads, info.swizzle) == (96, (10, "column"))
    assert layout.SharedLayout.from_json(info.layouts["tile"]) == chosen
    a = rand(np.random.default_rng(0), (16, 16), "float16")
    before = a.copy()
    run(kernel, a)
    np.testing.assert_array_equal(a, before)


def test_disabled_swizzle_leaves_the_grid():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float16")):
        with T.Kernel(4, threads=32) as bx:
            T.use_swizzle(10, enable=False)
            A[bx] = 1.0

    assert ir.kernels_of(kernel)[0].swizzle is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_infinity_and_mathematics(dtype):
    @T.prim_func
    def kernel(A: T.Tensor((20,), dtype), B: T.Tensor((6, 20), dtype)):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(20):
                x = A[i]
                B[0, i] = T.max(x, -T.infinity(dtype))
                B[1, i] = T.min(x, T.infinity(dtype))
                B[2, i] = T.exp2(x)
                B[3, i] = T.log2(T.abs(x) + T.cast(1, dtype))
                B[4, i] = T.if_then_else(x > 0, x, T.infinity(dtype))
                B[5, i] = x * 0.5 - 1

    a, b = rand(np.random.default_rng(0), 20, dtype), out((6, 20), dtype)
    run(kernel, a, b)
    wide = a.astype("float64")
    expected = [wide, wide, 2**wide, np.log2(np.abs(wide) + 1), np.where(wide > 0, wide, np.inf), wide / 2 - 1]
    tolerance = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(b.astype("float64"), np.stack(expected), rtol=tolerance, atol=tolerance)


def test_multi_gpu_strategy_is_refused_clearly():
    with pytest.raises(tvm_tile.TileSyntaxError, match="not available yet"):
        T.MultiGPUStrategy  # noqa: B018
