"""Copies, element-wise code, reductions, scans, atomics, debugging: any thread count, odd shapes, every type."""

from __future__ import annotations

import math

import pytest
import torch

import tvm_tile
import tvm_tile.language as T
from tvm_tile import layout
from tvm_tile.errors import TileError

from .harness import Gpu, check, compare, out, rand, verify

heavy = pytest.mark.heavy
only_sm_80 = pytest.mark.heavy("sm_90")
THREADS = [8, 31, 48, 128, *(pytest.param(n, marks=heavy) for n in (1, 16, 32, 33, 64, 96, 256, 500, 1024))]


@only_sm_80
@pytest.mark.parametrize("threads", THREADS)
def test_any_thread_count_does_everything(device, threads):
    """tilelang 2562, 2556, 2524: copies both ways, element-wise code, reductions of both dimensions, a scan."""

    @T.prim_func
    def kernel(
        A: T.Tensor((17, 40), "float32"),
        B: T.Tensor((17, 40), "float32"),
        Rows: T.Tensor((17,), "float32"),
        Columns: T.Tensor((40,), "float32"),
        Sums: T.Tensor((17, 40), "float32"),
    ):
        with T.Kernel(1, threads=threads) as bx:
            tile, tile2 = T.alloc_shared((17, 40), "float32"), T.alloc_fragment((17, 40), "float32")
            rows, columns = T.alloc_fragment((17,), "float32"), T.alloc_fragment((40,), "float32")
            T.copy(A, tile)
            T.copy(tile, tile2)
            for i, j in T.Parallel(17, 40):
                tile2[i, j] = tile2[i, j] * 2.0 + tile[16 - i, j]
            T.reduce_max(tile2, rows, dim=1)
            T.reduce_sum(tile2, columns, dim=0)
            T.copy(tile2, B)
            T.copy(rows, Rows)
            T.copy(columns, Columns)
            T.cumsum(tile, dim=1)
            T.copy(tile, Sums)

    a = rand((17, 40))
    b = a * 2 + a.flip(0)
    want = {1: b, 2: b.amax(1), 3: b.sum(0), 4: a.cumsum(1)}
    check(device, kernel, [a, out((17, 40)), out(17), out(40), out((17, 40))], want, (1e-5, 1e-5))


@only_sm_80
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((576,), 0),
        ((768,), 0),
        ((3, 1000), 1),
        pytest.param((100, 3), 0, marks=heavy),
        pytest.param((2, 5, 70), 1, marks=heavy),
    ],  # fmt: skip  # noqa: E501
)
@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(d, marks=heavy) for d in ("bfloat16", "int32"))])
def test_reductions_where_elements_do_not_divide_by_the_threads(device, shape, dim, dtype):
    """tilelang 2305, 2524."""
    rest = tuple(e for d, e in enumerate(shape) if d != dim) or (1,)

    @T.prim_func
    def kernel(A: T.Tensor(shape, dtype), Out: T.Tensor((4, *rest), dtype)):
        with T.Kernel(1, threads=256) as bx:
            tile, result = T.alloc_fragment(shape, dtype), T.alloc_fragment(rest, dtype)
            T.copy(A, tile)
            T.reduce_absmax(tile, result, dim=dim)
            T.copy(result, Out[0])
            T.reduce_min(tile, result, dim=dim)
            T.copy(result, Out[1])
            T.reduce_max(tile, result, dim=dim, clear=False)
            T.copy(result, Out[2])
            T.reduce_min(tile, result, dim=dim, clear=False)
            T.copy(result, Out[3])

    a = rand(shape, dtype)
    low, high = a.amin(dim).reshape(rest), a.amax(dim).reshape(rest)
    want = torch.stack([a.abs().amax(dim).reshape(rest), low, high, low])
    check(device, kernel, [a, out((4, *rest), dtype)], {1: want})


@pytest.mark.parametrize("columns", [64, 40, 33, pytest.param(72, marks=heavy), pytest.param(1, marks=heavy)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=heavy), pytest.param("int8", marks=heavy)])
def test_safe_values_of_ragged_tiles(device, columns, dtype):
    """tilelang 2543: what lies outside of the tensor holds the safe value; pipelined and plain loads."""
    safe = -3 if dtype == "int8" else -math.inf

    @T.prim_func
    def kernel(A: T.Tensor((60, columns), dtype), B: T.Tensor((2, 64, 128), dtype), C: T.Tensor((64, 128), dtype)):
        with T.Kernel(1, threads=128) as bx:
            T.annotate_safe_value({A: safe})
            tile, high = T.alloc_shared((64, 128), dtype), T.alloc_fragment((64, 128), dtype)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[k, 0], tile)
                T.copy(tile, B[k, 0, 0])
            T.copy(A[0, 0], high)
            T.copy(high, C)

    a = rand((60, columns), dtype)
    padded = torch.full((65, 128), safe).to(a.dtype)
    padded[:60, :columns] = a
    want = {1: torch.stack([padded[:64], padded[1:]]), 2: padded[:64]}
    check(device, kernel, [a, out((2, 64, 128), dtype), out((64, 128), dtype)], want)


@pytest.mark.parametrize("n", [1, 7, 1000, 1001])
def test_elementwise_add_with_symbolic_length(device, n):
    """tilelang 968, 3010."""
    size = T.dynamic("size")

    @T.prim_func
    def kernel(C: T.Tensor((size,), "float32"), A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float16")):
        with T.Kernel(T.ceildiv(size, 128), threads=128) as bx:
            for i in T.Parallel(128):
                C[bx * 128 + i] = A[bx * 128 + i] + T.cast(B[bx * 128 + i], "float32")

    a, b = rand(n), rand(n, "float16", 1)
    check(device, kernel, [out(n), a, b], {0: a + b.float()}, (1e-6, 1e-6))


@only_sm_80
@pytest.mark.parametrize("dtype", ["float32", "int32", *(pytest.param(d, marks=heavy) for d in ("float64", "int64", "uint32", "float16", "bfloat16"))])  # fmt: skip  # noqa: E501
def test_atomics(device, dtype):
    """tilelang 2959: one update for each element, however the threads share them; shared and global memory."""
    floats = dtype in ("float16", "bfloat16")

    @T.prim_func
    def kernel(A: T.Tensor((3, 50), dtype), Sum: T.Tensor((4,), dtype), Extreme: T.Tensor((2, 3), dtype)):
        with T.Kernel(3, threads=128) as bx:
            near, tile = T.alloc_shared((1,), dtype), T.alloc_fragment((50,), dtype)
            T.clear(near)
            T.copy(A[bx, 0], tile)
            for i in T.Parallel(50):
                T.atomic_add(Sum[i % 3], A[bx, i])
                T.atomic_add(near[0], tile[i])
                if not floats and dtype != "float64":
                    T.atomic_max(Extreme[0, i % 3], A[bx, i])
                    T.atomic_min(Extreme[1, i % 3], tile[i])
            T.atomic_add(Sum[3], near[0])

    # sums of small integers are exact in every type
    a = rand((3, 50), "int32", low=0, high=3).to(getattr(torch, dtype))
    first, extreme = torch.ones(4).to(a.dtype), torch.ones((2, 3)).to(a.dtype)
    parts = [a[:, n::3].double() for n in range(3)]
    total = torch.stack([1 + p.sum() for p in parts] + [1 + a.double().sum()])
    low = [torch.stack([p.amax().clamp(min=1) for p in parts]), torch.stack([p.amin().clamp(max=1) for p in parts])]
    want = {1: total.to(a.dtype), 2: extreme if floats or dtype == "float64" else torch.stack(low).to(a.dtype)}
    check(device, kernel, [a, first, extreme], want, undefined=False)


@only_sm_80
def test_a_ticket_for_each_cta(device):
    """The previous value of an atomic update reaches all threads, and nobody gets one twice."""

    @T.prim_func
    def kernel(Next: T.Tensor((1,), "int32"), Out: T.Tensor((20, 40), "int32")):
        with T.Kernel(20, threads=64) as bx:
            ticket = T.atomic_add(Next[0], 1, return_prev=True)
            for i in T.Parallel(40):
                Out[ticket, i] = ticket + i

    want = torch.arange(20)[:, None] + torch.arange(40)[None, :]
    args = [torch.zeros(1, dtype=torch.int32), out((20, 40), "int32")]
    verify(device.compile(kernel), args, {0: torch.tensor([20]), 1: want}, undefined=False)


def test_read_next_to_an_atomic_in_a_pipeline(device):
    """tilelang 2595: program order is kept."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 32), "float32"), C: T.Tensor((1,), "float32"), Seen: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_shared((32,), "float32")
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, 0], tile)
                Seen[k] = C[0]
                for i in T.Parallel(32):
                    T.atomic_add(C[0], tile[i])

    a = rand((4, 32), "int32").float()
    before = torch.cat([torch.zeros(1), a.sum(1).cumsum(0)])
    args = [a, torch.zeros(1), out(4)]
    verify(device.compile(kernel), args, {1: before[4:], 2: before[:4]}, undefined=False)


def test_two_policies_share_one_fragment(device):
    """tilelang 1165: the accumulator of two products with different warp policies is right, or refused with both."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a, c = T.alloc_shared((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(c)
            T.gemm(a, a, c, policy=T.GemmWarpPolicy.FullRow)
            T.gemm(a, a, c, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
            T.copy(c, C)

    a = rand((64, 64), "float16")
    try:
        compiled = device.compile(kernel)
    except TileError as error:
        assert "FullRow" in str(error) or "Fragment" in str(error), str(error)
        return
    verify(compiled, [a, out((64, 64))], {1: a.float() @ a.float() + a.float() @ a.float().T}, (1e-4, 1e-3))


@pytest.mark.parametrize("span", [64, pytest.param(32, marks=heavy), pytest.param(None, marks=heavy)])
def test_hand_written_swizzle_with_use_swizzle(device, span):
    """tilelang 449, 2642: wgmma reads no plain rows, so mma.sync does."""
    shape = (64, 32)
    chosen = layout.SharedLayout.swizzled(shape, 16, span) if span else layout.SharedLayout.row_major(shape, 16)

    @T.prim_func
    def kernel(A: T.Tensor((128, 96), "float16"), B: T.Tensor((128, 96), "float16"), C: T.Tensor((128, 128), "float32")):  # fmt: skip  # noqa: E501
        with T.Kernel(2, 2, threads=128) as (bx, by):
            T.use_swizzle(10)
            a, b = T.alloc_shared(shape, "float16"), T.alloc_shared(shape, "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.annotate_layout({a: chosen, b: chosen})
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[by * 64, k * 32], a)
                T.copy(B[bx * 64, k * 32], b)
                T.gemm(a, b, c, transpose_B=True)
            T.copy(c, C[by * 64, bx * 64])

    a, b = rand((128, 96), "float16", 1), rand((128, 96), "float16", 2)
    compiled = device.compile(kernel)
    verify(compiled, [a, b, out((128, 128))], {2: a.float() @ b.float().T}, (1e-4, 1e-3))


def test_fragments_change_their_layout(device):
    """Transposed stores, broadcasts of rows and columns, a product's result as the next one's operand."""

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float16"), V: T.Tensor((64,), "float32"), C: T.Tensor((64, 64), "float32"), D: T.Tensor((64, 64), "float16")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float16")
            e, v = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            turned = T.alloc_shared((64, 64), "float16")
            T.copy(A, a)
            T.copy(V, v)
            T.gemm(a, a, c, clear_accum=True)
            for i, j in T.Parallel(64, 64):
                c[i, j] = c[i, j] * v[i] + v[j]
            T.copy(c, d)
            for i, j in T.Parallel(64, 64):
                turned[j, i] = d[i, j]
            T.gemm(d, turned, e, clear_accum=True)
            T.copy(e, C)
            T.copy(turned, D)

    a, v = (rand((64, 64)) / 8).half(), rand(64)
    d = ((a.float() @ a.float()) * v[:, None] + v[None, :]).half()
    want = {2: d.float() @ d.float().T, 3: d.T}
    check(device, kernel, [a, v, out((64, 64)), out((64, 64), "float16")], want, (5e-3, 2e-2))


def test_product_of_a_viewed_tile(device):
    """T.reshape and T.view of shared tiles, one of them an operand."""

    @T.prim_func
    def kernel(A: T.Tensor((4096,), "float16"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((4096,), "uint16")):
        with T.Kernel(1, threads=128) as bx:
            flat, c = T.alloc_shared((4096,), "float16"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, flat)
            tile = T.reshape(flat, (64, 64))
            bits = T.view(flat, dtype="uint16")
            T.gemm(tile, tile, c, transpose_B=True, clear_accum=True)
            for i in T.Parallel(4096):
                bits[i] = bits[i] ^ T.uint16(0x8000)
            T.copy(bits, C)
            T.gemm(tile, tile, c)
            T.copy(c, B)

    a = rand(4096, "float16")
    m = a.view(64, 64).float()
    want = {1: m @ m.T + m @ m, 2: (-a).view(torch.int16).view(torch.uint16)}
    check(device, kernel, [a, out((64, 64)), out(4096, "uint16")], want, (1e-4, 1e-3))


@pytest.mark.parametrize(
    ("clear", "value"),
    [
        (False, None),
        (True, -1.0),
        pytest.param(True, None, marks=heavy),
        pytest.param(False, 3.0, marks=heavy),
    ],  # fmt: skip  # noqa: E501
)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("int8", marks=heavy)])
def test_tile_mask_of_a_product(device, clear, value, dtype):
    accumulator = "int32" if dtype == "int8" else "float32"
    fill = value if value is None or dtype != "int8" else int(value)

    @T.prim_func
    def kernel(A: T.Tensor((33, 64), dtype), B: T.Tensor((50, 64), dtype), M: T.Tensor((33, 50), "int8"), C: T.Tensor((33, 50), accumulator)):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((33, 64), dtype), T.alloc_shared((50, 64), dtype)
            mask, acc = T.alloc_shared((33, 50), "int8"), T.alloc_fragment((33, 50), accumulator)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(M, mask)
            T.fill(acc, 2)
            T.gemm(a, b, acc, transpose_B=True, clear_accum=clear, mask=mask, mask_value=fill)
            T.copy(acc, C)

    a, b, mask = rand((33, 64), dtype, 1), rand((50, 64), dtype, 2), rand((33, 50), "int8", 3, 0, 1)
    old = 0.0 if clear else 2.0
    other = old if value is None else value
    want = torch.where(mask != 0, old + a.double() @ b.double().T, torch.tensor(other, dtype=torch.float64))
    args = [a, b, mask, out((33, 50), accumulator)]
    check(device, kernel, args, {3: want.to(getattr(torch, accumulator))}, (1e-4, 1e-3))


@only_sm_80
def test_print_and_assert(device, capfd):
    @T.prim_func
    def kernel(A: T.Tensor((3,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((3,), "float32")
            T.copy(A, tile)
            T.print(n, "n is 100%")
            T.print(tile)
            T.device_assert(n < 5, "n is too large")

    compiled = device.compile(kernel)
    if isinstance(device, Gpu):
        assert "n is too large" in compiled.source  # a failing assertion would end the process's CUDA context
        compiled([torch.tensor([1.5, -2.25, 3.0]), 4])
        return
    printed = compiled([torch.tensor([1.5, -2.25, 3.0]), 4]).printed
    lines = [line.strip() for line in printed.splitlines()]
    assert lines[0] == "n is 100% 4" and len(lines) == 4 and all(f"tile[{n}]" in x for n, x in enumerate(lines[1:]))
    with pytest.raises(tvm_tile.simulate.SimulationError, match="n is too large"):
        compiled([torch.zeros(3), 5])


@only_sm_80
def test_more_than_two_to_the_31_elements(device):
    """tilelang 330: the generated address of a far element is 64-bit; on a GPU with room it is also written."""
    rows, columns = 70000, 32768

    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), "int8"), B: T.Tensor((4, 64), "int8"), first: T.int32):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((64,), "int8")
            T.copy(A[first + bx, columns - 64 : columns], tile)
            T.copy(tile, B[bx, 0:64])
            for i in T.Parallel(64):
                A[first + bx, i] = tile[i]

    compiled = device.compile(kernel)
    assert "int64_t" in compiled.source
    if not isinstance(device, Gpu):
        return
    a, b = torch.zeros((rows, columns), dtype=torch.int8, device="cuda"), out((4, 64), "int8").cuda()
    far = rand((4, 64), "int8").cuda()
    a[-4:, -64:] = far
    compiled.kernel(a, b, rows - 4)
    torch.cuda.synchronize()
    compare(b, far, (0, 0))
    compare(a[-4:, :64], far, (0, 0))
    assert not a[:4, :64].any()


@only_sm_80
def test_strided_tensor_and_assumption(device):
    rows, stride = T.dynamic("rows, stride")

    @T.prim_func
    def kernel(A: T.StridedTensor((rows, 24), (stride, 1), "float32"), B: T.Tensor((rows,), "float32")):
        T.assume(stride >= 24)
        with T.Kernel(rows, threads=32) as bx:
            row, total = T.alloc_fragment((24,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A[bx, 0:24], row)
            T.reduce_sum(row, total, dim=0)
            T.copy(total, B[bx : bx + 1])

    base = rand((11, 40))
    check(device, kernel, [base[:, :24], out(11)], {1: base[:, :24].sum(1)}, (1e-5, 1e-5))


def test_infinity_of_each_dtype(device):
    """tilelang 2670."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 3), "float32"), B: T.Tensor((2,), "float16"), C: T.Tensor((2,), "bfloat16")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=32) as bx:
            c = T.alloc_fragment((2,), "bfloat16")
            T.fill(c, -T.infinity("bfloat16"))
            T.copy(c, C)
            for i in T.Parallel(2):
                A[i, 0] = T.infinity("float32")
                A[i, 1] = T.cast(T.infinity("float64"), "float32")
                A[i, 2] = T.max(-T.infinity("float32"), T.cast(i, "float32"))
                B[i] = -T.infinity("float16")

    inf = math.inf
    want = {
        0: torch.tensor([[inf, inf, 0.0], [inf, inf, 1.0]]),
        1: torch.tensor([-inf, -inf]),
        2: torch.tensor([-inf, -inf]),
    }
    args = [out((2, 3)), out(2, "float16"), out(2, "bfloat16")]
    check(device, kernel, args, want)


def test_threads_see_through_a_global_tensor_what_others_wrote(device):
    """``__restrict__`` would let nvcc keep the first value that a thread reads of A in a register."""

    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(1, threads=64) as bx:
            for step in T.serial(n):
                for i in T.Parallel(64):
                    B[i] = A[(i + 1) % 64] + step
                for i in T.Parallel(64):
                    A[i] = B[63 - i]

    a = torch.randint(-1000, 1000, (64,), dtype=torch.int32)
    want, b = a.clone(), None
    for step in range(5):
        b = want.roll(-1) + step
        want = b.flip(0)
    check(device, kernel, [a, out(64, "int32"), 5], {0: want, 1: b}, undefined=False)


def test_only_kernels_that_exchange_through_memory_lose_restrict():
    @T.prim_func
    def apart(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            for i in T.Parallel(64):
                B[i] = A[i] * 2

    @T.prim_func
    def exchanged(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            for i in T.Parallel(64):
                B[i] = A[i] * 2
            for i in T.Parallel(64):
                A[i] = B[63 - i]

    @T.prim_func
    def one_after_another(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            for i in T.Parallel(64):
                B[i] = A[i] * 2
        with T.Kernel(1, threads=64) as bx:
            for i in T.Parallel(64):
                A[i] = B[63 - i]

    for kernel, count in ((apart, 2), (exchanged, 0), (one_after_another, 4)):
        source = tvm_tile.compile(kernel, "sm_80").source
        heads = [line for line in source.splitlines() if "__global__" in line and line.endswith("{")]
        assert sum(line.count("__restrict__") for line in heads) == count
