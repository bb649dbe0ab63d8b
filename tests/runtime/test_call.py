"""Calls: which tensors pass without a copy, and what a wrong argument's error says."""

import gc

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm

import tvm_tile
from tvm_tile import CallError, T
from tvm_tile.runtime import arguments

from . import kernels


@pytest.fixture(scope="module")
def add():
    return tvm_tile.compile(kernels.scaled_add(), "llvm")


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, 128, generator=generator)
    b = torch.randn(128, generator=generator)
    return a, b, torch.full((rows, 128), float("nan"))


def numpy_of(*tensors):
    return [t.numpy() for t in tensors]


@pytest.mark.parametrize("rows", [1, 2, 7, 128])
def test_torch(add, rows):
    a, b, c = data(rows, rows)
    assert add(a, b, 3, c) is None
    torch.testing.assert_close(c, a + b * 3)


def test_numpy_and_mixed(add):
    a, b, c = data(5)
    an, bn, cn = numpy_of(a, b, c)
    add(an, bn, np.int64(2), cn)
    np.testing.assert_allclose(cn, an + bn * 2, rtol=1e-5, atol=1e-6)
    c.fill_(float("nan"))
    add(a, bn, 4, c)
    torch.testing.assert_close(c, a + b * 4)


def test_tvm_tensors(add):
    a, b, c = data(4)
    ta, tb, tc = (tvm.runtime.tensor(x) for x in numpy_of(a, b, c))
    add(ta, tb, 5, tc)
    np.testing.assert_allclose(tc.numpy(), (a + b * 5).numpy(), rtol=1e-5, atol=1e-6)


def test_read_only_input_is_fine_read_only_output_is_not(add):
    a, b, c = numpy_of(*data(3))
    a.flags.writeable = False
    add(a, b, 1, c)
    np.testing.assert_allclose(c, a + b, rtol=1e-5, atol=1e-6)
    c.flags.writeable = False
    before = c.copy()
    with pytest.raises(CallError, match=r"argument 4 \(C\) is written by the kernel, but the NumPy array is read-only"):
        add(a, b, 7, c)
    np.testing.assert_array_equal(c, before)


@pytest.mark.parametrize("offset", [1, 3, 5])
def test_tensors_that_start_anywhere(add, offset):
    # TVM's default promise of 64-byte alignment crashes the process here.
    a = torch.randn(40 * 128 + offset)[offset:].view(40, 128)
    b = np.random.default_rng(offset).standard_normal(128 + offset, dtype="float32")[offset:]
    c = torch.full((40 * 128 + offset,), float("nan"))[offset:].view(40, 128)
    add(a, b, 2, c)
    torch.testing.assert_close(c, a + torch.from_numpy(b) * 2)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_empty_tensors(add, library):
    a, c = torch.zeros(0, 128), torch.zeros(0, 128)
    b = torch.ones(128)
    add(*(numpy_of(a, b) if library == "numpy" else (a, b)), 3, c.numpy() if library == "numpy" else c)


def test_empty_tensors_of_symbolic_sizes():
    kernel = tvm_tile.compile(kernels.doubled_columns(), "llvm")
    for make in (torch.zeros, np.zeros):
        kernel(make((3, 0)).astype("float32") if make is np.zeros else make((3, 0)), torch.zeros(3, 0))


def test_strides_of_single_rows_do_not_matter(add):
    a = torch.randn(9, 128)[::3][:1]
    b, c = torch.randn(128), torch.full((1, 128), float("nan"))
    add(a, b, 1, c)
    torch.testing.assert_close(c, a + b)
    wide = np.random.default_rng(0).standard_normal((1, 256), dtype="float32")[:, :128]
    out = c.numpy()
    add(wide, b.numpy(), 1, out)
    np.testing.assert_allclose(out, wide + b.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int64", "bool"]
)
def test_dtypes_of_torch_and_numpy(dtype):
    kernel = tvm_tile.compile(kernels.copy(24, dtype), "llvm")
    raw = torch.randint(0, 60, (24,), generator=torch.Generator().manual_seed(1))
    a = raw.to(getattr(torch, dtype))
    b = torch.zeros_like(a)
    kernel(a, b)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and a.view(torch.uint8).any()
    known = np.dtype(dtype) if dtype in ("float16", "int8", "uint8", "int64", "bool") else getattr(ml_dtypes, dtype)
    an = raw.numpy().astype(known)
    bn = np.zeros_like(an)
    kernel(an, bn)
    np.testing.assert_array_equal(an.view("uint8"), bn.view("uint8"))


def test_wrapped_numpy_arrays_are_released(add):
    a, b, c = numpy_of(*data(3))
    add(a, b, 1, c)
    gc.collect()
    assert not arguments._ALIVE


def refused(kernel, *args):
    with pytest.raises(CallError) as caught:
        kernel(*args)
    return str(caught.value)


def test_wrong_count(add):
    a, b, c = data(2)
    text = refused(add, a, b, 3)
    assert "expected 4 arguments, got 3; missing C: float32[m, 128]" in text
    assert "scaled_add(A: float32[m, 128], B: float32[128], s: int32, C: float32[m, 128])" in text
    assert "expected 4 arguments, got 5" in refused(add, a, b, 3, c, c)


def test_wrong_dtype(add):
    a, b, c = data(2)
    text = refused(add, a.half(), b, 3, c)
    assert "argument 1 (A) must have dtype float32, but has float16" in text and "convert it to float32" in text


def test_wrong_rank_and_size(add):
    a, b, c = data(2)
    assert "argument 1 must have 2 dimensions, A: float32[m, 128], but has 1: (128,)" in refused(add, a[0], b, 3, c)
    assert "argument 2 must be B: float32[128], but dimension 0 is 5 (shape (5,)), expected 128" in refused(
        add, a, b[:5], 3, c
    )


def test_symbolic_sizes_that_differ_are_named(add):
    a, b, c = data(7)
    text = refused(add, a[:5], b, 3, c)
    assert "argument 4 must be C: float32[m, 128], but dimension 0 is 7 (shape (7, 128)), expected m = 5" in text
    assert "m = 5 is set by dimension 0 of A" in text
    kernel = tvm_tile.compile(kernels.doubled_columns(), "llvm")
    text = refused(kernel, torch.zeros(3, 4), torch.zeros(3, 9))
    assert "dimension 1 is 9 (shape (3, 9)), expected m * 2 = 8" in text


def test_not_contiguous(add):
    a, b, c = data(4)
    text = refused(add, a.T.contiguous().T, b, 3, c)
    assert "argument 1 (A) must be contiguous, but has the strides (1, 4) for the shape (4, 128)" in text
    assert ".contiguous()" in text
    assert "write into a contiguous tensor" in refused(add, a, b, 3, c.T.contiguous().T)
    assert "must be contiguous" in refused(add, np.asfortranarray(a.numpy()), b, 3, c)
    assert "must be contiguous" in refused(add, a[:1].expand(4, 128), b, 3, c)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_scalars_are_never_cut(add, value):
    a, b, c = data(2)
    assert f"argument 3 (s) = {value} is outside of int32" in refused(add, a, b, value, c)


def test_scalar_of_the_wrong_kind(add):
    a, b, c = data(2)
    assert "argument 3 (s) must be an integer (int32), but is 1.5 of type float" in refused(add, a, b, 1.5, c)
    assert "must be an integer (int32), but is a torch tensor" in refused(add, a, b, torch.tensor(3), c)
    assert "must be an integer" in refused(add, a, b, "3", c)


def test_no_tensor_at_all(add):
    a, b, c = data(2)
    assert "argument 4 (C) must be a tensor C: float32[m, 128], but is None" in refused(add, a, b, 3, None)
    assert "but is [1, 2] of type list" in refused(add, [1, 2], b, 3, c)
    assert "argument 1 (A) must be a tensor" in refused(add, 5, b, 3, c)


def test_tensors_without_plain_memory(add):
    a, b, c = data(2)
    assert "meta device" in refused(add, a.to("meta"), b, 3, c)
    assert "layout torch.sparse_coo" in refused(add, a.to_sparse(), b, 3, c)
    assert ".resolve_neg()" in refused(add, torch._neg_view(a), b, 3, c)


def test_a_failed_call_writes_nothing(add):
    a, b, c = data(4)
    refused(add, a[:3], b, 3, c)
    assert torch.isnan(c).all()


def test_call_overhead(add):
    import time

    a, b, c = data(1)
    add(a, b, 3, c)
    best = min(_seconds(add, a, b, c, time.perf_counter) for _ in range(5))
    assert best < 20e-6, f"{best * 1e6:.1f} us a call"


def _seconds(kernel, a, b, c, clock):
    start = clock()
    for _ in range(1000):
        kernel(a, b, 3, c)
    return (clock() - start) / 1000


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_what_is_written_must_not_share_memory_with_another_argument(kind):
    @T.prim_func
    def shift(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(64):
                C[i] = A[63 - i] + B[i]

    kernel = tvm_tile.compile(shift, "llvm")
    a = torch.randn(128) if kind == "torch" else np.random.default_rng(0).standard_normal(128).astype("float32")
    out = torch.full((64,), torch.nan) if kind == "torch" else np.full(64, np.nan, "float32")
    kernel(a[:64], a[:64], out)  # inputs may share memory
    kernel(a[:64], a[64:], out)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(a)[:64][::-1] + np.asarray(a)[64:])
    with pytest.raises(tvm_tile.CallError, match=r"argument 3 \(C\) is written .* shares memory with argument 1 \(A\)"):
        kernel(a[:64], out, a[:64])
    for start in (1, 17, 63):
        with pytest.raises(tvm_tile.CallError, match=r"argument 3 \(C\) is written .* argument 1 \(A\)"):
            kernel(a[start : start + 64], out, a[:64])
        with pytest.raises(tvm_tile.CallError, match=r"argument 3 \(C\) is written .* argument 2 \(B\)"):
            kernel(out, a[:64], a[start : start + 64])
    kernel(a[:64], a[1:65], out)  # overlapping inputs


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_views_whose_elements_lie_between_each_others_may_be_written(kind):
    @T.prim_func
    def halves(
        A: T.Tensor((8, 4), "float32"),
        B: T.StridedTensor((8, 4), (8, 1), "float32"),
        C: T.StridedTensor((8, 4), (8, 1), "float32"),
    ):
        with T.Kernel(1, threads=32) as bx:
            for i, j in T.Parallel(8, 4):
                B[i, j] = A[i, j] + 1
                C[i, j] = A[i, j] * 2

    kernel = tvm_tile.compile(halves, "llvm")
    a = torch.randn(8, 4) if kind == "torch" else np.random.default_rng(0).standard_normal((8, 4)).astype("float32")
    out = torch.full((8, 8), torch.nan) if kind == "torch" else np.full((8, 8), np.nan, "float32")
    kernel(a, out[:, :4], out[:, 4:])
    np.testing.assert_array_equal(np.asarray(out), np.concatenate([np.asarray(a) + 1, np.asarray(a) * 2], 1))
    with pytest.raises(tvm_tile.CallError, match=r"argument 2 \(B\) is written"):
        kernel(a, out[:, :4], out[:, :4])


def test_an_ops_shape_may_stand_second_beside_the_targets_name():
    shape = {"rows": 4, "columns": 10}
    given = [
        ((shape,), {"target": "llvm"}),
        ((shape, "llvm"), {}),
        (("llvm",), {"shape": shape}),
        ((), {"shape": shape, "target": "llvm"}),
    ]
    for positional, named in given:
        kernel = tvm_tile.compile("softmax", *positional, **named)
        assert kernel.name == "softmax" and kernel.signature.parameters[0].shape == [4, 10]
    with pytest.raises(tvm_tile.TileTypeError, match="its target twice"):
        tvm_tile.compile("softmax", "llvm", "llvm", shape=shape)
    with pytest.raises(tvm_tile.TileTypeError, match="its shape twice"):
        tvm_tile.compile("softmax", shape, shape=shape)
