"""Calls of tile kernels: strided parameters, scalars, several kernels in one function, order of parameters."""

import numpy as np
import pytest
import torch

import tvm_tile
import tvm_tile.language as T


def row_scale(m_name="m"):
    m = T.dynamic(m_name)
    s = T.dynamic("s")

    @T.prim_func
    def row_scale(A: T.StridedTensor((m, 40), (s, 1), "float32"), f: T.float32, C: T.Tensor((m, 40), "float32")):
        with T.Kernel(T.ceildiv(m, 8), threads=64) as bx:
            tile = T.alloc_shared((8, 40), "float32")
            T.copy(A[bx * 8, 0], tile)
            for i, j in T.Parallel(8, 40):
                tile[i, j] = tile[i, j] * f
            T.copy(tile, C[bx * 8, 0])

    return row_scale


@pytest.mark.parametrize("rows", [1, 7, 8, 33])
@pytest.mark.parametrize("stride", [40, 41, 64])
def test_strided_parameters(rows, stride):
    kernel = tvm_tile.compile(row_scale(), "llvm")
    wide = torch.randn(rows, stride)
    out = torch.full((rows, 40), float("nan"))
    kernel(wide[:, :40], 2.5, out)
    torch.testing.assert_close(out, wide[:, :40] * 2.5)
    out.fill_(float("nan"))
    kernel(wide.numpy()[:, :40], 1, out.numpy())
    torch.testing.assert_close(out, wide[:, :40])


def test_inner_stride_must_match():
    kernel = tvm_tile.compile(row_scale(), "llvm")
    with pytest.raises(tvm_tile.CallError, match=r"argument 1 \(A\) has the strides \(80, 2\), expected \(80, 1\)"):
        kernel(torch.randn(9, 80)[:, ::2], 1.0, torch.zeros(9, 40))


def test_output_declared_before_its_inputs():
    # TL 3017
    @T.prim_func
    def reversed_order(C: T.Tensor((20, 8), "float32"), B: T.Tensor((8,), "float32"), A: T.Tensor((20, 8), "float32")):
        with T.Kernel(5, threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                C[bx * 4 + i, j] = A[bx * 4 + i, j] - B[j]

    kernel = tvm_tile.compile(reversed_order, "llvm")
    assert [(p.name, p.written) for p in kernel.signature.parameters] == [("C", True), ("B", False), ("A", False)]
    a, b, c = torch.randn(20, 8), torch.randn(8), torch.full((20, 8), float("nan"))
    kernel(c, b, a)
    torch.testing.assert_close(c, a - b)


def test_two_kernels_in_one_function_and_atomics():
    n = T.dynamic("n")

    @T.prim_func
    def histogram(A: T.Tensor((n,), "int32"), H: T.Tensor((16,), "int32"), top: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                H[i] = 0
        with T.Kernel(T.ceildiv(n, 64), threads=64) as bx:
            for i in T.Parallel(64):
                if bx * 64 + i < n:
                    if A[bx * 64 + i] < top:
                        T.atomic_add(H[A[bx * 64 + i]], 1)

    kernel = tvm_tile.compile(histogram, "llvm")
    assert [p.written for p in kernel.signature.parameters] == [False, True, False]
    for size in (0, 1, 63, 1000):
        values = torch.randint(0, 16, (size,), dtype=torch.int32)
        counts = torch.full((16,), 0x7F7F7F7F, dtype=torch.int32)
        kernel(values, counts, 12)
        expected = torch.bincount(values[values < 12], minlength=16).to(torch.int32)
        assert torch.equal(counts, expected), size


def test_the_cache_keeps_factories_apart():
    def scaled(factor):
        @T.prim_func
        def scaled(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
            with T.Kernel(1, threads=8):
                for i in T.Parallel(8):
                    B[i] = A[i] * factor

        return scaled

    a, b = np.arange(8, dtype="float32"), np.full(8, np.nan, "float32")
    for factor in (2.0, 2.0000002):
        tvm_tile.compile(scaled(factor), "llvm")(a, b)
        np.testing.assert_array_equal(b, a * np.float32(factor))
