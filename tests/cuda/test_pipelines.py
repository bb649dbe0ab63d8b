"""Pipelined loops: trip counts, starts, conditions, what is read after the loop, what a producer must not miss.

On sm_90 these kernels load through TMA with a producer warpgroup where the rules choose so: each has a product, whole
tiles and 128 threads or more.
"""

from __future__ import annotations

import pytest
import torch

import tvm_tile.language as T

from .harness import check, out, rand, verify

heavy = pytest.mark.heavy
STAGES = [2, 3, pytest.param(0, marks=heavy), pytest.param(1, marks=heavy), pytest.param(4, marks=heavy)]


def tiles(count, rows=64, columns=64, seed=0):
    return rand((count, rows, columns), "float16", seed)


def products(a, which):
    """Sum of a[i] @ a[i] over the given tiles."""
    wide = a.float()
    return sum((wide[i] @ wide[i] for i in which), torch.zeros(a.shape[1:]))


@pytest.mark.parametrize("stages", STAGES)
def test_every_iteration_runs_once(device, stages):
    """tilelang-ascend 1378: fewer iterations than stages, not a multiple of them, start != 0, bounds from memory."""

    @T.prim_func
    def kernel(A: T.Tensor((9, 64, 64), "float16"), Bounds: T.Tensor((2,), "int32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(range(Bounds[0], Bounds[1]), stages):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c)
            T.copy(c, C)

    compiled, a = device.compile(kernel), tiles(9)
    for lo, hi in [(0, 0), (3, 2), (0, 1), (2, 4), (1, 4), (0, 4), (2, 7), (0, 9)]:
        args = [a, torch.tensor([lo, hi], dtype=torch.int32), out((64, 64))]
        verify(compiled, args, {2: products(a, range(lo, hi))}, (1e-4, 1e-3))


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("count", [5, pytest.param(1, marks=heavy), pytest.param(2, marks=heavy)])
def test_last_tile_is_read_after_the_loop(device, stages, count):
    """tilelang 3039."""

    @T.prim_func
    def kernel(A: T.Tensor((count, 64, 64), "float16"), B: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(count, num_stages=stages):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c)
            T.copy(a, B)
            T.gemm(a, a, c)
            T.copy(c, C)

    a = tiles(count)
    want = {1: a[-1], 2: products(a, [*range(count), count - 1])}
    check(device, kernel, [a, out((64, 64), "float16"), out((64, 64))], want, (1e-4, 1e-3))


@pytest.mark.parametrize("stages", STAGES)
def test_block_mask_around_copies_and_products(device, stages):
    """tilelang 2876, also with other work after the branch and a copy outside of it."""

    @T.prim_func
    def kernel(
        A: T.Tensor((6, 64, 64), "float16"),
        Mask: T.Tensor((6,), "int8"),
        C: T.Tensor((64, 64), "float32"),
        Sum: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, row = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(c)
            T.clear(row)
            for k in T.Pipelined(6, num_stages=stages):
                T.copy(A[5 - k, 0, 0], b)
                if Mask[k] != 0:
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, b, c)
                for i in T.Parallel(64):
                    row[i] += T.cast(b[i, 3], "float32")
            T.copy(c, C)
            T.copy(row, Sum)

    a = tiles(6)
    wide = a.float()
    for mask in ([1, 0, 0, 3, 1, 0], [0] * 6, [1] * 6):
        want = {2: sum((wide[k] @ wide[5 - k] for k in range(6) if mask[k]), torch.zeros(64, 64)), 3: wide[:, :, 3].sum(0)}  # fmt: skip  # noqa: E501
        args = [a, torch.tensor(mask, dtype=torch.int8), out((64, 64)), out(64)]
        check(device, kernel, args, want, (1e-4, 1e-3))


def test_two_loops_share_tiles(device):
    """The second loop refills what the first one used, and the two loops nest in a serial one."""

    @T.prim_func
    def kernel(A: T.Tensor((8, 64, 64), "float16"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            b = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for t in T.serial(2):
                T.clear(c)
                for k in T.Pipelined(3, num_stages=2):
                    T.copy(A[t * 4 + k, 0, 0], a)
                    T.gemm(a, a, c)
                for k in T.Pipelined(t, 4, 2):
                    T.copy(A[k, 0, 0], a)
                    T.copy(A[k + 4, 0, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, C[t, 0, 0])

    a = tiles(8)
    wide = a.float()
    want = [products(a, range(4 * t, 4 * t + 3)) + sum(wide[k] @ wide[k + 4] for k in range(t, 4)) for t in range(2)]
    check(device, kernel, [a, out((2, 64, 64))], {1: torch.stack(want)}, (1e-4, 1e-3))


def test_a_variable_that_moves_the_loads(device):
    """What is loaded depends on a variable that changes between the loops, and one that changes inside of one."""

    @T.prim_func
    def kernel(A: T.Tensor((9, 64, 64), "float16"), Step: T.Tensor((3,), "int32"), C: T.Tensor((64, 64), "float32"), D: T.Tensor((64, 64), "float32")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            at = T.alloc_var("int32", init=0)
            T.clear(c)
            for t in T.serial(3):
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[at + k, 0, 0], a)
                    T.gemm(a, a, c)
                at = at + Step[t]
            T.copy(c, C)
            T.clear(c)
            at = 1
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[at, 0, 0], a)
                T.gemm(a, a, c)
                at = at + 2
            T.copy(c, D)

    a = tiles(9)
    want = {2: products(a, [0, 1, 3, 4, 4, 5]), 3: products(a, [1, 3, 5, 7])}
    step = torch.tensor([3, 1, 2], dtype=torch.int32)
    check(device, kernel, [a, step, out((64, 64)), out((64, 64))], want, (1e-4, 1e-3))


def test_loads_from_a_tensor_that_the_kernel_writes(device):
    """Each iteration stores what the next one loads."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.copy(B, b)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, b, c, clear_accum=True)
                T.copy(c, A[k + 1, 0, 0])

    a, b = tiles(5), rand((64, 64), "float16", 7)
    b = (b.float() / 8).half()
    want = a.clone()
    for k in range(4):
        want[k + 1] = (want[k].float() @ b.float()).half()
    check(device, kernel, [a, b], {0: want}, (2e-3, 2e-3), undefined=False)


def test_a_tile_changed_in_place_and_one_read_twice(device):
    """Element-wise work on the loaded tile before the product, and reads of it after the product."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 64, 64), "float16"), C: T.Tensor((64, 64), "float32"), D: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c, d = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(c)
            T.clear(d)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[k, 0, 0], a)
                for i, j in T.Parallel(64, 64):
                    b[i, j] = a[i, j] * T.float16(2)
                if k == 3:
                    for i, j in T.Parallel(64, 64):
                        a[i, j] = T.float16(1)
                T.gemm(a, b, c)
                for i in T.Parallel(64):
                    d[i] += T.cast(a[i, 5], "float32")
            T.copy(c, C)
            T.copy(d, D)

    a = tiles(5)
    left = a.float()
    left[3] = 1
    want = {1: sum(left[k] @ (2 * a.float()[k]) for k in range(5)), 2: left[:, :, 5].sum(0)}
    check(device, kernel, [a, out((64, 64)), out(64)], want, (1e-4, 1e-2))


def test_uniform_reads_of_a_pipelined_tile(device):
    """A value and a condition taken from the tile that this iteration loaded."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 64, 64), "float16"), N: T.Tensor((6, 64), "int32"), C: T.Tensor((64, 64), "float32"), S: T.Tensor((1,), "int32")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a, n = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64,), "int32")
            c = T.alloc_fragment((64, 64), "float32")
            total = T.alloc_var("int32", init=0)
            T.clear(c)
            for k in T.Pipelined(6, num_stages=3):
                T.copy(A[k, 0, 0], a)
                T.copy(N[k, 0], n)
                x = n[7]
                total = total + x
                if n[3] > 0:
                    T.gemm(a, a, c)
            T.copy(c, C)
            S[0] = total

    a, n = tiles(6), rand((6, 64), "int32", 3)
    keep = [k for k in range(6) if n[k, 3] > 0]
    assert 0 < len(keep) < 6
    want = {2: products(a, keep), 3: n[:, 7].sum().reshape(1).int()}
    check(device, kernel, [a, n, out((64, 64)), out(1, "int32")], want, (1e-4, 1e-3))


@pytest.mark.parametrize(
    ("order", "stage"),
    [
        ([0, 1, 2], [0, 0, 1]),
        pytest.param([2, 0, 1], [0, 0, 2], marks=heavy),
        pytest.param([1, 0, 2], [0, 1, 1], marks=heavy),
    ],  # fmt: skip  # noqa: E501
)
@pytest.mark.parametrize("count", [5, pytest.param(0, marks=heavy), pytest.param(1, marks=heavy), pytest.param(2, marks=heavy)])  # fmt: skip  # noqa: E501
def test_manual_order_and_stage(device, order, stage, count):
    @T.prim_func
    def kernel(A: T.Tensor((6, 64, 64), "float16"), n: T.int32, C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for k in T.Pipelined(n, order=order, stage=stage):
                T.copy(A[k, 0, 0], a)
                T.copy(A[k + 1, 0, 0], b)
                T.gemm(a, b, c)
            T.copy(c, C)

    a = tiles(6)
    wide = a.float()
    want = sum((wide[k] @ wide[k + 1] for k in range(count)), torch.zeros(64, 64))
    check(device, kernel, [a, count, out((64, 64))], {2: want}, (1e-4, 1e-3))


@pytest.mark.parametrize("stages", [2, pytest.param(0, marks=heavy), pytest.param(3, marks=heavy)])
def test_persistent_tiles(device, stages):
    """Rings and phases go on from one tile to the next."""

    @T.prim_func
    def kernel(A: T.Tensor((192, 160), "float16"), B: T.Tensor((128, 160), "float16"), C: T.Tensor((192, 128), "float16")):  # fmt: skip  # noqa: E501
        with T.Kernel(2, threads=128) as b:
            left, right = T.alloc_shared((64, 32), "float16"), T.alloc_shared((64, 32), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            for m, n in T.Persistent([3, 2], 2, b):
                T.clear(acc)
                for k in T.Pipelined(5, num_stages=stages):
                    T.copy(A[m * 64, k * 32], left)
                    T.copy(B[n * 64, k * 32], right)
                    T.gemm(left, right, acc, transpose_B=True)
                T.copy(acc, C[m * 64, n * 64])

    a, b = rand((192, 160), "float16", 1), rand((128, 160), "float16", 2)
    check(device, kernel, [a, b, out((192, 128), "float16")], {2: a.float() @ b.float().T}, (2e-3, 2e-3))


def test_previous_iterations_tile_is_used(device):
    """A tile that is filled after its use in the body: each iteration works on what the one before it loaded."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            T.copy(A[0, 0, 0], a)
            for k in T.Pipelined(5, num_stages=2):
                T.gemm(a, a, c)
                T.copy(A[k + 1, 0, 0], a)
            T.gemm(a, a, c)
            T.copy(c, C)

    a = tiles(6)
    check(device, kernel, [a, out((64, 64))], {1: products(a, range(6))}, (1e-4, 1e-3))


@pytest.mark.parametrize("threads", [256, pytest.param(384, marks=heavy), pytest.param(512, marks=heavy), pytest.param(96, marks=heavy)])  # fmt: skip  # noqa: E501
def test_several_warpgroups(device, threads):
    """Consumers that share the rings, with a reduction across them in every iteration."""
    warps = threads // 32

    @T.prim_func
    def kernel(A: T.Tensor((4, 192, 64), "float16"), C: T.Tensor((192, 192), "float32"), M: T.Tensor((192,), "float32")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=threads) as bx:
            a = T.alloc_shared((192, 64), "float16")
            c, high = T.alloc_fragment((192, 192), "float32"), T.alloc_fragment((192,), "float32")
            T.clear(c)
            T.fill(high, -T.infinity("float32"))
            for k in T.Pipelined(4, num_stages=2):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c, transpose_B=True)
                T.reduce_max(c, high, dim=0, clear=False)
            T.copy(c, C)
            T.copy(high, M)

    a = rand((4, 192, 64), "float16")
    steps = torch.stack([x @ x.T for x in a.float()]).cumsum(0)
    want = {1: steps[-1], 2: steps.amax((0, 1))}
    check(device, kernel, [a, out((192, 192)), out(192)], want, (1e-4, 1e-3))


def test_the_rules_choose_what_these_tests_are_for():
    """A plain pipelined product has a producer and rings; loads that need the other warps' results have not."""
    from tvm_tile.ops import gemm
    from tvm_tile.simulate import simulate

    source = simulate(gemm(512, 512, 256, target="sm_90"), "sm_90").source
    for part in ("mbarrier.try_wait", "cp.async.bulk.tensor", "wgmma.mma_async"):
        assert part in source, part


def test_loops_in_branches(device):
    """CTAs take different loops; one of them loads unconditionally and multiplies under a condition."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4, 64, 64), "float16"),
        B: T.Tensor((5, 64, 64), "float16"),
        Mask: T.Tensor((5,), "int8"),
        C: T.Tensor((3, 64, 64), "float32"),
    ):
        with T.Kernel(3, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            if bx % 2 == 0:
                for k in T.Pipelined(4 - bx, num_stages=2):
                    T.copy(A[k, 0, 0], a)
                    T.gemm(a, a, c)
            else:
                for k in T.Pipelined(5, num_stages=3):
                    T.copy(B[k, 0, 0], b)
                    if Mask[k] != 0:
                        T.gemm(b, b, c)
            T.copy(c, C[bx, 0, 0])

    a, b = tiles(4), tiles(5, seed=1)
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.int8)
    want = torch.stack([products(a, range(4)), products(b, [1, 2, 4]), products(a, range(2))])
    check(device, kernel, [a, b, mask, out((3, 64, 64))], {3: want}, (1e-4, 1e-3))


def test_a_pipeline_in_a_loop_that_loads(device):
    """The outer loop loads a tile that the whole inner loop uses."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 64, 64), "float16"), B: T.Tensor((4, 64, 64), "float16"), C: T.Tensor((3, 64, 64), "float32")):  # fmt: skip  # noqa: E501
        with T.Kernel(1, threads=128) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            for t in T.serial(3):
                T.copy(A[t, 0, 0], a)
                T.clear(c)
                for k in T.Pipelined(t + 1, num_stages=2):
                    T.copy(B[k, 0, 0], b)
                    T.gemm(a, b, c)
                T.copy(c, C[t, 0, 0])

    a, b = tiles(3), tiles(4, seed=1)
    want = torch.stack([a[t].float() @ b[: t + 1].float().sum(0) for t in range(3)])
    check(device, kernel, [a, b, out((3, 64, 64))], {2: want}, (1e-4, 1e-2))


def test_two_kernels_that_load_the_same_tensors(device):
    """Launches in sequence: the second product reads what the first one wrote."""

    @T.prim_func
    def kernel(A: T.Tensor((128, 128), "float16"), B: T.Tensor((128, 128), "float16"), C: T.Tensor((128, 128), "float16")):  # fmt: skip  # noqa: E501
        with T.Kernel(2, 2, threads=128) as (bx, by):
            left, right = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, k * 64], left)
                T.copy(A[k * 64, bx * 64], right)
                T.gemm(left, right, acc)
            T.copy(acc, B[by * 64, bx * 64])
        with T.Kernel(2, 2, threads=128) as (bx, by):
            left, right = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for k in T.Pipelined(2, num_stages=2):
                T.copy(A[by * 64, k * 64], left)
                T.copy(B[k * 64, bx * 64], right)
                T.gemm(left, right, acc)
            T.copy(acc, C[by * 64, bx * 64])

    a = (rand((128, 128)) / 8).half()
    b = (a.float() @ a.float()).half()
    args = [a, out((128, 128), "float16"), out((128, 128), "float16")]
    check(device, kernel, args, {1: b, 2: a.float() @ b.float()}, (4e-3, 4e-3), undefined=False)


def test_side_effects_beside_a_producer(device):
    """Atomics, tickets and assertions happen once, whatever warps there are."""

    @T.prim_func
    def kernel(A: T.Tensor((6, 64, 64), "float16"), Next: T.Tensor((2,), "int32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(6, threads=128) as bx:
            a = T.alloc_shared((64, 64), "float16")
            c = T.alloc_fragment((64, 64), "float32")
            ticket = T.atomic_add(Next[0], 1, return_prev=True)
            T.device_assert(ticket < 6)
            T.clear(c)
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[k, 0, 0], a)
                T.gemm(a, a, c)
                T.atomic_add(Next[1], 1)
            if ticket == 3:
                T.copy(c, C)

    args = [tiles(6), torch.zeros(2, dtype=torch.int32), out((64, 64))]
    want = {1: torch.tensor([6, 18]), 2: products(args[0], range(3))}
    verify(device.compile(kernel), args, want, (1e-4, 1e-3), undefined=False)
