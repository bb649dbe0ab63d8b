"""Builds small TIR functions out of the CPU lowering's emitters and runs them."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import tirx
from tvm.tirx import transform as X

from tvm_tile.lower.cpu.builder import Builder

PIPELINE = "tvm_tile_cpu_test"


def _pipeline():
    @tvm.transform.module_pass(opt_level=0)
    def run(mod, _ctx):
        passes = [X.FlattenBuffer(), X.VerifyMemory(), X.AnnotateEntryFunc(), X.SplitHostDevice(), X.MakePackedAPI(),
                  X.FP8StorageLegalize(), X.BF16StorageLegalize()]
        return tvm.ir.transform.Sequential(passes)(mod)

    def finalize():
        return tvm.ir.transform.Sequential([X.LowerTVMBuiltin(), X.LowerIntrin()])

    return run, finalize, finalize


tvm.tirx.compilation_pipeline.register_tir_pipeline(PIPELINE, _pipeline)


def host_target(**features) -> tvm.target.Target:
    """This machine's CPU as LLVM sees it."""
    mcpu = tvm.get_global_func("target.llvm_get_system_cpu")()
    return tvm.target.Target({"kind": "llvm", "mcpu": mcpu, **features})


def build(buffers: list, body: tirx.Stmt, target=None):
    """Compile a body over the given parameters; call the result with numpy arrays, changed in place."""
    func = tirx.PrimFunc(buffers, body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    built = tvm.compile(func, target or host_target(), tir_pipeline=PIPELINE)

    def call(*arrays):
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays]
        built["main"](*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            array[...] = tensor.numpy()

    return call


def map_function(function, lanes: int, count: int, in_dtype="float32", out_dtype="float32"):
    """``out[i] = function(builder, in[i])`` over vectors; returns a numpy function."""
    from tvm_tile.lower.cpu.builder import vload

    source = tirx.decl_buffer((count,), in_dtype, name="source")
    result = tirx.decl_buffer((count,), out_dtype, name="result")
    b = Builder()
    with b.loop(count // lanes) as i:
        b.vstore(result, function(b, vload(source, i * lanes, lanes)), i * lanes, lanes)
    call = build([source, result], b.finish())

    def run(x: np.ndarray) -> np.ndarray:
        out = np.full(count, 0x7F, dtype=out_dtype)
        call(x.astype(in_dtype), out)
        return out

    return run
