"""Compile time is bounded and reported."""

import time

import numpy as np
import pytest

import tvm_tile
from tvm_tile import T
from tvm_tile.lower import lower


def symbolic_matmul():
    m, n, k = T.dynamic("m, n, k")

    @T.prim_func
    def matmul(A: T.Tensor((m, k), "float32"), B: T.Tensor((k, n), "float32"), C: T.Tensor((m, n), "float32")):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (bx, by):
            a = T.alloc_shared((64, 32), "float32")
            b = T.alloc_shared((32, 64), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for step in T.Pipelined(T.ceildiv(k, 32), num_stages=3):
                T.copy(A[by * 64, step * 32], a)
                T.copy(B[step * 32, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return matmul


@pytest.mark.parametrize("target", ["llvm", "sm_80", "sm_90"])
def test_a_matmul_of_symbolic_sizes_compiles_in_bounded_time(target):
    """TL 1069: it never finished."""
    start = time.process_time()  # of this process: other work on the machine does not count
    func = symbolic_matmul()
    lower(func, tvm_tile.target(target))
    assert time.process_time() - start < 20


def test_compile_seconds_are_reported():
    kernel = tvm_tile.compile(symbolic_matmul(), "llvm", cache=False)
    assert 0 < kernel.compile_seconds < 300 and not kernel.from_cache
    rng = np.random.default_rng(0)
    for m, n, k in ((1, 1, 1), (70, 33, 129)):
        a, b = rng.standard_normal((m, k)).astype("float32"), rng.standard_normal((k, n)).astype("float32")
        c = np.full((m, n), np.nan, "float32")
        kernel(a, b, c)
        np.testing.assert_allclose(c, a.astype(float) @ b, rtol=1e-4, atol=1e-4)
