"""Element-wise work, reductions, scans, atomics and prints on the simulator: any thread count, slices, bounds."""

import pytest
import torch

import tvm_tile.language as T
from tvm_tile.simulate import SimulationError

from .emitters import DTYPES, build, close, poisoned, run


@pytest.mark.parametrize("threads", [1, 8, 31, 48, 128, 1024])
def test_any_thread_count(threads):
    @T.prim_func
    def k(
        A: T.Tensor((60, 60), "float32"),
        X: T.Tensor((4,), "int32"),
        C: T.Tensor((60, 60), "float32"),
        R: T.Tensor((64,), "float32"),
        Q: T.Tensor((64,), "float32"),
        S: T.Tensor((64, 64), "float32"),
        Z: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(1, threads=threads) as bx:
            tile = T.alloc_shared((64, 64), "float32")
            f = T.alloc_fragment((64, 64), "float32")
            m = T.alloc_fragment((64,), "float32")
            s = T.alloc_fragment((64,), "float32")
            z = T.alloc_fragment((1,), "float32")
            large = T.alloc_fragment((64,), "bool")
            T.annotate_safe_value({A: -2.5})
            T.copy(A[0, 0], tile)
            T.copy(tile, f)
            T.reduce_absmax(f, m, dim=1)
            T.copy(m, R)
            T.reduce_sum(f, s, dim=0)
            T.copy(s, Q)
            T.cumsum(tile, dim=1, reverse=True)
            T.copy(tile, S)
            for i, j in T.Parallel(64, 64):
                f[i, j] = f[i, j] * 2.0 + m[i]
            T.copy(f, C[0, 0])
            for i in T.Parallel(64):
                large[i] = m[i] > 3.0
            some = T.any_of(large)
            every = T.all_of(large)
            if some:
                X[0] = 1
            if every:
                X[1] = 1
            T.reduce_max(m, z, dim=0)
            for i in T.Parallel(64):
                Z[i] = z[0]
            X[2] = 7
            T.atomic_add(X[3], 5)

    torch.manual_seed(threads)
    a, x = torch.randn(60, 60), torch.zeros(4, dtype=torch.int32)
    c, s = poisoned((60, 60), "float32"), poisoned((64, 64), "float32")
    r, q, z = (poisoned((64,), "float32") for _ in range(3))
    run(k, a, x, c, r, q, s, z, outputs=5)
    padded = torch.full((64, 64), -2.5)
    padded[:60, :60] = a
    largest = padded.abs().amax(1)
    close(r, largest)
    close(q, padded.sum(0))
    close(s, padded.flip(1).cumsum(1).flip(1))
    close(c, (padded * 2 + largest[:, None])[:60, :60])
    close(z, largest.max().expand(64))
    assert x.tolist() == [int((largest > 3).any()), int((largest > 3).all()), 7, 5]


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        ("float32", 96),
        ("float32", 40),
        ("bfloat16", 128),
        ("float64", 128),
        ("int8", 96),
        ("int32", 128),
        ("uint8", 40),
    ],
)
def test_reductions(dtype, threads):
    @T.prim_func
    def k(A: T.Tensor((24, 72), dtype), R: T.Tensor((5, 24), dtype), Q: T.Tensor((5, 72), dtype)):
        with T.Kernel(1, threads=threads) as bx:
            f = T.alloc_fragment((24, 72), dtype)
            s = T.alloc_shared((24, 72), dtype)
            r0 = T.alloc_fragment((24,), dtype)
            r1 = T.alloc_fragment((24, 1), dtype)
            q = T.alloc_fragment((72,), dtype)
            qs = T.alloc_shared((72,), dtype)
            T.copy(A, f)
            T.copy(A, s)
            T.reduce_max(f, r0, dim=1)
            T.copy(r0, R[0, 0:24])
            T.reduce_min(s, r0, dim=1)
            T.copy(r0, R[1, 0:24])
            T.reduce_sum(f, r0, dim=1)
            T.reduce_sum(f, r0, dim=1, clear=False)
            T.copy(r0, R[2, 0:24])
            T.reduce_absmax(f, r1, dim=1)
            for i in T.Parallel(24):
                R[3, i] = r1[i, 0]
            T.reduce_abssum(s, r0, dim=1)
            T.copy(r0, R[4, 0:24])
            T.reduce_max(s, q, dim=0)
            T.copy(q, Q[0, 0:72])
            T.reduce_min(f, qs, dim=0)
            T.copy(qs, Q[1, 0:72])
            T.reduce_sum(f, qs, dim=0)
            T.reduce_sum(f, qs, dim=0, clear=False)
            T.copy(qs, Q[2, 0:72])
            T.reduce_absmax(s, q, dim=0)
            T.copy(q, Q[3, 0:72])
            T.reduce_abssum(f, q, dim=0)
            T.copy(q, Q[4, 0:72])

    torch.manual_seed(threads)
    is_float = dtype.startswith(("float", "bfloat"))
    if is_float:
        a = torch.randn(24, 72).to(DTYPES[dtype])
        a[3, 5], a[7, 9], a[8] = float("nan"), float("inf"), float("-inf")
    else:
        a = torch.randint(0 if dtype[0] == "u" else -5, 6, (24, 72)).to(DTYPES[dtype])
    r, q = poisoned((5, 24), dtype), poisoned((5, 72), dtype)
    run(k, a, r, q, outputs=2)
    x = a.double()
    for dim, out in ((1, r), (0, q)):
        want = [x.amax(dim), x.amin(dim), 2 * x.sum(dim), x.abs().amax(dim), x.abs().sum(dim)]
        for got, value in zip(out, want, strict=True):
            if not is_float:  # integers wrap
                value = value.long().to(DTYPES[dtype])
            close(got, value, *((0.05, 1e-2) if dtype == "bfloat16" else (1e-4, 1e-4)))


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint32"])
def test_atomics(dtype):
    @T.prim_func
    def k(
        A: T.Tensor((96,), dtype),
        C: T.Tensor((8,), dtype),
        P: T.Tensor((96,), dtype),
        MX: T.Tensor((4,), dtype),
        MN: T.Tensor((4,), dtype),
    ):
        with T.Kernel(2, threads=64) as bx:
            s = T.alloc_shared((8,), dtype)
            T.fill(s, 0)
            for i in T.Parallel(96):
                T.atomic_add(s[i % 8], A[i])
                T.atomic_max(MX[i % 4], A[i])
                T.atomic_min(MN[i % 4], A[i])
            for i in T.Parallel(96):
                if bx == 0:
                    before = T.atomic_add(P[i], A[i], return_prev=True)
                    P[i] = before
            T.atomic_add(C, s)

    torch.manual_seed(0)
    a = torch.randint(0 if dtype[0] == "u" else -9, 10, (96,)).to(DTYPES[dtype])
    if dtype == "float32":
        a += 0.25
    c, p = torch.zeros(8).to(DTYPES[dtype]), torch.arange(96).to(DTYPES[dtype])
    mx, mn = torch.full((4,), 2).to(DTYPES[dtype]), torch.full((4,), 2).to(DTYPES[dtype])
    run(k, a, c, p, mx, mn)
    x = a.double()
    close(c, 2 * x.reshape(12, 8).sum(0))
    close(p, torch.arange(96))
    close(mx, x.reshape(24, 4).amax(0).clamp(min=2))
    close(mn, x.reshape(24, 4).amin(0).clamp(max=2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_atomic_sums_of_other_floats(dtype):
    @T.prim_func
    def k(A: T.Tensor((96,), dtype), C: T.Tensor((8,), dtype)):
        with T.Kernel(2, threads=64) as bx:
            for i in T.Parallel(96):
                T.atomic_add(C[i % 8], A[i])

    torch.manual_seed(1)
    a, c = torch.randint(-4, 5, (96,)).to(DTYPES[dtype]), torch.zeros(8).to(DTYPES[dtype])
    run(k, a, c)
    close(c, 2 * a.double().reshape(12, 8).sum(0))


@pytest.mark.parametrize("threads", [64, 100])
def test_fragments_read_across_threads(threads):
    @T.prim_func
    def k(A: T.Tensor((32, 48), "float32"), C: T.Tensor((48, 32), "float32"), D: T.Tensor((48, 32), "float16")):
        with T.Kernel(1, threads=threads) as bx:
            f = T.alloc_fragment((32, 48), "float32")
            g = T.alloc_fragment((48, 32), "float32")
            h = T.alloc_fragment((48, 32), "float16")
            T.copy(A, f)
            for i, j in T.Parallel(48, 32):
                g[i, j] = f[j, i] + 1.0
            for i, j in T.Parallel(32, 48):
                h[j, i] = g[j, i] * 2.0
            T.copy(g, C)
            T.copy(h, D)

    torch.manual_seed(2)
    a, c, d = torch.randn(32, 48), poisoned((48, 32), "float32"), poisoned((48, 32), "float16")
    run(k, a, c, d, outputs=2)
    close(c, a.T + 1)
    close(d, (a.T + 1) * 2, 1e-2, 1e-3)


def test_slices_touch_only_themselves():
    @T.prim_func
    def k(A: T.Tensor((32, 48), "float32"), C: T.Tensor((32, 48), "float32"), R: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            f = T.alloc_fragment((32, 48), "float32")
            g = T.alloc_fragment((16, 16), "float32")
            s = T.alloc_shared((32, 48), "float32")
            r = T.alloc_fragment((16,), "float32")
            T.copy(A, f)
            T.fill(f[4:9, 3:40], -1.0)
            T.copy(f[8:24, 32:48], g)
            T.copy(g, f[0:16, 16:32])
            T.reduce_sum(f[16:32, 8:17], r, dim=1)
            T.copy(f, s)
            T.cumsum(s[2:10, 5:30], dim=1)
            T.cumsum(f[16:32, 0:7], dim=0)
            for i in T.Parallel(16):
                f[i + 16, 47] = r[i]
            T.copy(r, R)
            T.copy(s[0:16, :], C[0:16, 0:48])
            T.copy(f[16:32, :], C[16, 0])

    torch.manual_seed(3)
    a, c, r = torch.randn(32, 48), poisoned((32, 48), "float32"), poisoned((16,), "float32")
    run(k, a, c, r, outputs=2)
    f = a.clone()
    f[4:9, 3:40] = -1
    f[0:16, 16:32] = f[8:24, 32:48].clone()
    sums = f[16:32, 8:17].sum(1)
    s = f.clone()
    s[2:10, 5:30] = s[2:10, 5:30].cumsum(1)
    f[16:32, 0:7] = f[16:32, 0:7].cumsum(0)
    f[16:32, 47] = sums
    close(r, sums)
    close(c, torch.cat([s[:16], f[16:]]))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_symbolic_extent(dtype):
    n = T.dynamic("n")

    @T.prim_func
    def k(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype), C: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, 512), threads=64) as bx:
            for i in T.Parallel(512):
                C[bx * 512 + i] = A[bx * 512 + i] + B[bx * 512 + i]

    kernel = build(k)
    for size in (1, 7, 1000, 1001, 1024):
        a, b = torch.randn(size).to(DTYPES[dtype]), torch.randn(size).to(DTYPES[dtype])
        c = poisoned((size,), dtype)
        kernel(a, b, c, undefined=(2,))
        close(c, a + b)


def test_parallel_over_a_symbolic_axis():
    n = T.dynamic("n")

    @T.prim_func
    def k(A: T.Tensor((n, 64), "float32"), C: T.Tensor((n, 64), "float32")):
        with T.Kernel(1, threads=64) as bx:
            for i, j in T.Parallel(n, 64):
                C[i, j] = A[i, j] * 3.0

    kernel = build(k)
    for size in (1, 37):
        a, c = torch.randn(size, 64), poisoned((size, 64), "float32")
        kernel(a, c, undefined=(1,))
        close(c, a * 3)


def test_joined_accesses_are_wide_and_right():
    """A causal mask beside memory accesses: guarded loads are joined where all lanes agree, lane by lane elsewhere."""

    @T.prim_func
    def k(A: T.Tensor((100, 128), "float16"), B: T.Tensor((128,), "float32"), C: T.Tensor((100, 128), "float32")):
        with T.Kernel(T.ceildiv(100, 32), threads=128) as bx:
            s = T.alloc_shared((32, 128), "float16")
            T.copy(A[bx * 32, 0], s)
            for i, j in T.Parallel(32, 128):
                s[i, j] = s[i, j] + T.float16(1)
            for i, j in T.Parallel(32, 128):
                C[bx * 32 + i, j] = T.if_then_else(j > i, s[i, j] * A[bx * 32 + i, j], T.float16(0)) + B[j]

    torch.manual_seed(4)
    a, b, c = torch.randn(100, 128).half(), torch.randn(128), poisoned((100, 128), "float32")
    run(k, a, b, c, outputs=1)
    rows, cols = torch.arange(100)[:, None] % 32, torch.arange(128)[None]
    close(c, torch.where(cols > rows, (a + 1) * a, torch.zeros(()).half()).float() + b, 1e-2, 2e-3)


def test_elementwise_add_uses_16_byte_accesses():
    @T.prim_func
    def k(A: T.Tensor((64, 128), "float16"), C: T.Tensor((64, 128), "float16")):
        with T.Kernel(1, threads=128) as bx:
            for i, j in T.Parallel(64, 128):
                C[i, j] = A[i, j] + A[i, j]

    torch.manual_seed(5)
    a, c = torch.randn(64, 128).half(), poisoned((64, 128), "float16")
    report = run(k, a, c, outputs=1)
    close(c, a + a)
    # 16384 bytes in 512-byte warp accesses
    assert report.global_loads == 32 and report.global_stores == 32


def test_prints_and_assertions():
    @T.prim_func
    def k(A: T.Tensor((4,), "float32"), B: T.Tensor((2, 2), "int32")):
        with T.Kernel(1, threads=64) as bx:
            s = T.alloc_fragment((2, 2), "int32")
            T.copy(B, s)
            T.print(A[1], "100%")
            T.print("hello")
            T.print(s, "tile")
            for i in T.Parallel(4):
                T.device_assert(A[i] < 10.0, "element too large")

    kernel = build(k)
    a, b = torch.tensor([1.0, 2.5, 3.0, 4.0]), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    lines = sorted(kernel(a, b).output.split("\n"))
    assert lines == [
        "",
        "100% 2.5",
        "hello",
        *(f"tile s[{i}, {j}] = {2 * i + j + 1}" for i in range(2) for j in range(2)),
    ]
    a[2] = 11.0
    with pytest.raises(SimulationError, match="thread 2 "):
        kernel(a, b)


@pytest.mark.parametrize("shape", [(64, 64), (64, 1), (32, 24), (60, 50)])
def test_reductions_of_special_values(shape):
    """Chains begin with their first elements: NaN and infinities there are kept, and a row of -inf stays -inf."""
    rows, columns = shape

    @T.prim_func
    def k(
        A: T.Tensor((rows, columns), "float32"),
        M: T.Tensor((rows,), "float32"),
        N: T.Tensor((rows,), "float32"),
        S: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            f = T.alloc_fragment((rows, columns), "float32")
            m = T.alloc_fragment((rows,), "float32")
            n = T.alloc_fragment((rows,), "float32")
            s = T.alloc_fragment((rows,), "float32")
            T.copy(A, f)
            T.reduce_max(f, m, dim=1)
            T.reduce_min(f, n, dim=1)
            T.reduce_sum(f, s, dim=1)
            T.copy(m, M)
            T.copy(n, N)
            T.copy(s, S)

    torch.manual_seed(columns)
    a = torch.randn(rows, columns)
    for row in range(min(rows, columns)):
        a[row, row] = (float("nan"), float("inf"), float("-inf"))[row % 3]
    a[-1], a[-2] = float("-inf"), -0.0
    m, n, s = (poisoned((rows,), "float32") for _ in range(3))
    run(k, a, m, n, s, outputs=3)
    close(m, a.amax(1))
    close(n, a.amin(1))
    close(s, a.sum(1))
