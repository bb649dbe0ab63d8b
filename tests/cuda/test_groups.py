"""``T.ws``: bodies of one warpgroup on GPUs, in source order where they share memory, else side by side."""

import pytest
import torch

import tvm_tile
import tvm_tile.language as T

from .harness import check, out, rand


def test_each_warpgroup_has_a_product_of_its_own(device):
    """Own fragments, own pipelines, own epilogues; operands of one are loaded by both."""

    @T.prim_func
    def kernel(
        A: T.Tensor((128, 200), "float16"), B: T.Tensor((64, 200), "float16"), C: T.Tensor((128, 64), "float32"),
        D: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            a2, b2 = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            acc, acc2 = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            with T.ws(0):
                T.clear(acc)
                for k in T.Pipelined(4, num_stages=2):
                    T.copy(A[0, k * 64], a)
                    T.copy(B[0, k * 64], b)
                    T.gemm(a, b, acc, transpose_B=True)
                T.copy(acc, C[0:64, :])
            with T.ws(1):
                T.clear(acc2)
                for k in T.serial(4):
                    T.copy(A[64, k * 64], a2)
                    T.copy(B[0, k * 64], b2)
                    T.gemm(a2, b2, acc2, transpose_B=True)
                T.copy(acc2, C[64:128, :])
            T.copy(C[64:128, :], D)

    a, b = rand((128, 200), "float16"), rand((64, 200), "float16", 1)
    want = a.double() @ b.double().T
    check(device, kernel, [a, b, out((128, 64)), out((64, 64))], {2: want, 3: want[64:]}, (1e-3, 1e-2))


@pytest.mark.parametrize("trips", [0, 1, 2, 5])
def test_one_loads_and_the_other_works(device, trips):
    """The compiler places the barriers between them, over the loop's back edge too."""

    @T.prim_func
    def kernel(A: T.Tensor((5, 50), "float32"), B: T.Tensor((50,), "float32"), n: T.int32):
        with T.Kernel(1, threads=384) as bx:
            tile, total = T.alloc_shared((50,), "float32"), T.alloc_fragment((50,), "float32")
            with T.ws(2):
                T.clear(total)
            for k in T.serial(n):
                with T.ws(0):
                    T.copy(A[k, :], tile)
                with T.ws(2):
                    for i in T.Parallel(50):
                        total[i] += tile[49 - i]
            with T.ws(2):
                T.copy(total, B)

    a = rand((5, 50))
    check(device, kernel, [a, out(50), trips], {1: a[:trips].sum(0).flip(0)}, (1e-5, 1e-5))


def test_reductions_scans_and_barriers_of_one_warpgroup(device):
    """Scratch and barriers of a warpgroup leave the others alone, which do something else meanwhile."""

    @T.prim_func
    def kernel(
        A: T.Tensor((30, 70), "float32"), Rows: T.Tensor((30,), "float32"), Columns: T.Tensor((70,), "float32"),
        Sums: T.Tensor((30, 70), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            tile, tile2 = T.alloc_shared((30, 70), "float32"), T.alloc_shared((30, 70), "float32")
            part, part2 = T.alloc_fragment((30, 70), "float32"), T.alloc_fragment((30, 70), "float32")
            rows, columns = T.alloc_fragment((30,), "float32"), T.alloc_fragment((70,), "float32")
            with T.ws(1):
                T.copy(A, tile)
                T.sync_threads()
                T.copy(tile, part)
                T.reduce_max(part, rows, dim=1)
                T.copy(rows, Rows)
            with T.ws(0):
                T.copy(A, part2)
                T.reduce_sum(part2, columns, dim=0)
                T.copy(columns, Columns)
                T.copy(A, tile2)
                T.cumsum(tile2, dim=1)
                T.copy(tile2, Sums)

    a = rand((30, 70))
    want = {1: a.amax(1), 2: a.sum(0), 3: a.cumsum(1)}
    check(device, kernel, [a, out(30), out(70), out((30, 70))], want, (1e-5, 1e-4))


def test_branches_loops_and_variables_in_a_warpgroup(device):
    @T.prim_func
    def kernel(A: T.Tensor((64,), "int32"), B: T.Tensor((64,), "int32"), n: T.int32):
        with T.Kernel(2, threads=256) as bx:
            tile = T.alloc_shared((32,), "int32")
            with T.ws(1):
                steps = T.alloc_var("int32", init=0)
                if n > 2:
                    T.copy(A[bx * 32], tile)
                    while steps < n:
                        steps += 1
                        for i in T.Parallel(32):
                            tile[i] = tile[i] + steps
                else:
                    T.fill(tile, -1)
            with T.ws(0):
                T.copy(tile, B[bx * 32 : bx * 32 + 32])

    a = torch.arange(64, dtype=torch.int32)
    check(device, kernel, [a, out(64, "int32"), 4], {1: a + 10})
    check(device, kernel, [a, out(64, "int32"), 1], {1: torch.full((64,), -1, dtype=torch.int32)})


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_registers_of_a_warpgroup_are_its_own(target):
    @T.prim_func
    def fragment(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256) as bx:
            part = T.alloc_fragment((64,), "float32")
            with T.ws(1):
                T.copy(A, part)
            T.copy(part, B)

    @T.prim_func
    def variable(A: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=256) as bx:
            count = T.alloc_var("int32", init=0)
            with T.ws(0):
                count = A[0]
            if count > 2:
                T.fill(A, 0)

    for kernel, name in ((fragment, "part"), (variable, "count")):
        with pytest.raises(tvm_tile.TileTargetError, match=rf"{name} is used by warpgroup . \(T.ws"):
            tvm_tile.compile(kernel, target)
