"""The TIR pipeline "tvm_tile": tile functions beside Relax operators and plain PrimFuncs; T.assume; reference mode."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script import relax as R

import tvm_tile
from tvm_tile.runtime import toolchain

from . import kernels


def relax_module(gemm, rows, inner, columns, dtype="float32"):
    """softmax(relu(A @ B.T) + 1) with the product as a tile function."""
    builder = relax.BlockBuilder()
    a = relax.Var("a", R.Tensor((rows, inner), dtype))
    b = relax.Var("b", R.Tensor((columns, inner), dtype))
    with builder.function("main", [a, b]):
        with builder.dataflow():
            function = builder.add_func(gemm, "tile_gemm")
            product = builder.emit(relax.call_tir(function, [a, b], R.Tensor((rows, columns), dtype)))
            shifted = builder.emit(relax.op.add(relax.op.nn.relu(product), relax.const(1.0, dtype)))
            out = builder.emit_output(relax.op.nn.softmax(shifted))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("fused", [False, True])
def test_relax_module_with_a_tile_gemm(fused):
    rows, inner, columns = 50, 40, 33
    module = relax_module(kernels.tile_gemm(rows, columns, inner), rows, inner, columns)
    if fused:
        module = relax.get_pipeline("zero")(module)
    executable = tvm.compile(module, tvm_tile.target("llvm"), tir_pipeline="tvm_tile")
    generator = np.random.default_rng(5)
    a = generator.standard_normal((rows, inner), dtype="float32")
    b = generator.standard_normal((columns, inner), dtype="float32")
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b))
    expected = torch.softmax(torch.relu(torch.from_numpy(a @ b.T)) + 1, -1)
    np.testing.assert_allclose(result.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)


def test_relax_modules_are_not_single_kernels():
    module = relax_module(kernels.tile_gemm(8, 8, 8), 8, 8, 8)
    with pytest.raises(tvm_tile.TileTypeError, match="the module has Relax functions") as caught:
        tvm_tile.compile(module, "llvm")
    assert "tir_pipeline='tvm_tile'" in str(caught.value)


@pytest.mark.parametrize("lowering", ["optimised", "reference"])
def test_tile_gemm(lowering):
    kernel = tvm_tile.compile(kernels.tile_gemm(50, 33, 40), "llvm", lowering=lowering)
    a, b = torch.randn(50, 40), torch.randn(33, 40)
    c = torch.full((50, 33), float("nan"))
    kernel(a, b, c)
    torch.testing.assert_close(c, a @ b.T, rtol=1e-4, atol=1e-4)
    assert "T.sblock" in kernel.script() and "tile.kernel" in kernel.ir
    assert [p.written for p in kernel.signature.parameters] == [False, False, True]


def test_reference_is_for_cpus():
    with pytest.raises(tvm_tile.TileTargetError, match="the reference lowering runs on a CPU"):
        tvm_tile.compile(kernels.tile_gemm(8, 8, 8), "sm_90", lowering="reference")


@pytest.mark.parametrize("lowering", ["optimised", "reference"])
def test_assumptions_are_checked_at_the_call(lowering, tmp_path):
    kernel = tvm_tile.compile(kernels.tile_gemm(None, 16, 16), "llvm", lowering=lowering)
    a = torch.randn(8, 16)
    c = torch.full((8, 16), float("nan"))
    kernel(a, c)
    torch.testing.assert_close(c, a * 2)
    for callee in (kernel, tvm_tile.load(kernel.export(tmp_path / "k.so"))):
        with pytest.raises(tvm_tile.CallError, match=r"assumes \(?rows % 4\)? == 0, but rows = 7"):
            callee(a[:7], c[:7])
    kernel(a[:0], c[:0])


def test_registering_twice_is_harmless():
    from tvm.tirx.compilation_pipeline import PIPELINE_MAP

    from tvm_tile.runtime import pipeline

    before = PIPELINE_MAP["tvm_tile"]
    pipeline.register()
    assert PIPELINE_MAP["tvm_tile"] is before


def test_empty_symbolic_grids_launch_nothing():
    from tvm.script import tirx as S

    from tvm_tile.runtime.pipeline import _guard_empty_grids

    @S.prim_func(s_tir=True)
    def f(a: S.handle):
        n = S.int32()
        A = S.match_buffer(a, (n,), "float32")
        for i in S.thread_binding(n, thread="blockIdx.x"):
            for j in S.thread_binding(32, thread="threadIdx.x"):
                A[i] = S.float32(j)

    assert "if n > 0:" in _guard_empty_grids(f).script()


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="needs nvcc")
def test_relax_module_for_a_gpu_without_one(tmp_path):
    from tvm_tile.runtime import tvm_setup

    tvm_setup.ensure_cuda_runtime()
    module = relax_module(kernels.tile_gemm(64, 64, 64, dtype="float16"), 64, 64, 64, "float16")
    with toolchain.collect() as compiled:
        executable = tvm.compile(module, tvm_tile.target("sm_80"), tir_pipeline="tvm_tile")
    # Tile functions and TVM's own are two CUDA modules, each with its own flags.
    by_module = [sorted(k.name for k in unit.kernels) for unit in compiled]
    assert ["tile_gemm_kernel"] in by_module and len(by_module) == 2
    assert any("softmax" in name for names in by_module for name in names)
    executable.export_library(str(tmp_path / "module.so"))
    assert b"\x50\xed\x55\xba" in (tmp_path / "module.so").read_bytes()
