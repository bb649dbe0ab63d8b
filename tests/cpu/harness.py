"""Builds small TIR functions out of the CPU lowering's emitters and runs them."""

from __future__ import annotations

import platform

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx
from tvm.target import codegen
from tvm.tirx import transform as X

from tvm_tile.lower.cpu import lower_cpu, lower_reference, lowered_passes
from tvm_tile.lower.cpu.builder import Builder
from tvm_tile.runtime.targets import host_target


def _pipeline(flat: bool):
    def factory():
        @tvm.transform.module_pass(opt_level=0)
        def run(mod, _ctx):
            return tvm.ir.transform.Sequential(lowered_passes(flat))(mod)

        def finalize():
            return tvm.ir.transform.Sequential([X.LowerTVMBuiltin(), X.LowerIntrin()])

        return run, finalize, finalize

    return factory


PIPELINES = {flat: f"tvm_tile_cpu_test_{flat}" for flat in (True, False)}
for _flat, _name in PIPELINES.items():
    tvm.tirx.compilation_pipeline.register_tir_pipeline(_name, _pipeline(_flat))

NUMPY_DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def numpy_dtype(dtype: str):
    """The numpy type of a program type."""
    return np.dtype(NUMPY_DTYPES.get(dtype, dtype))


def poisoned(shape, dtype: str) -> np.ndarray:
    """An output array that no correct kernel would leave as it is: NaN, or bytes of 0x7f."""
    array = np.empty(shape, numpy_dtype(dtype))
    array.view(np.uint8)[...] = 0x7F
    if dtype.startswith(("float", "bfloat")):
        array[...] = np.nan
    return array


def narrow_targets() -> dict[str, tvm.target.Target]:
    """Targets that this machine can run, from the narrowest vectors to everything it has."""
    found = {"generic": tvm.target.Target({"kind": "llvm", "mcpu": "x86-64"})}
    host = host_target()
    if codegen.target_has_features("avx2", host) and codegen.target_has_features("fma", host):
        found["avx2"] = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})
    if codegen.target_has_features("avx512bw", host):
        found["avx512"] = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
    return found if platform.machine() == "x86_64" else {"host": host}


def compile_kernel(func, how: str = "optimised", target=None):
    """Compile tile IR; ``how`` is ``optimised`` or ``reference``.  The result takes numpy arrays and changes them."""
    target = target or host_target()
    lowered = lower_cpu(func, target) if how == "optimised" else lower_reference(func)
    lowered = lowered.with_attr("global_symbol", "main")
    built = tvm.compile(lowered, target, tir_pipeline=PIPELINES[how == "optimised"])
    main = built["main"]

    def call(*arguments):
        tensors = [tvm.runtime.tensor(a) if isinstance(a, np.ndarray) else a for a in arguments]
        main(*tensors)
        for argument, tensor in zip(arguments, tensors, strict=True):
            if isinstance(argument, np.ndarray):
                argument[...] = tensor.numpy()

    return call


def build(buffers: list, body: tirx.Stmt, target=None):
    """Compile a body over the given parameters; call the result with numpy arrays, changed in place."""
    func = tirx.PrimFunc(buffers, body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    built = tvm.compile(func, target or host_target(), tir_pipeline=PIPELINES[True])

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
