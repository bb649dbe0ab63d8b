"""From lowered thread-level TIR to a host module and CUDA source, without compiling CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx.build import codegen_build, split_host_device_mods

from tvm_tile.errors import InternalError

_LOCK = threading.Lock()
Pipeline = Callable[[tvm.IRModule], tuple[tvm.IRModule, tvm.IRModule]]


@dataclass(frozen=True)
class Lowered:
    """Host module (TIR, finalised), CUDA source, and each kernel's launch parameters."""

    host: tvm.IRModule
    source: str
    launch_tags: dict[str, list[str]]


def lean_pipeline(mod: tvm.IRModule) -> tuple[tvm.IRModule, tvm.IRModule]:
    """The few passes that thread-level TIR needs; splits host and device.

    Parameters
    ----------
    mod : tvm.IRModule
        Lowered functions with their target bound.

    Returns
    -------
    host_mod, device_mod : tvm.IRModule
    """
    passes = [
        s_tir.transform.UnifyThreadBinding(),
        tirx.transform.StmtSimplify(),
        tirx.transform.LowerTIRxOpaque(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StmtSimplify(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        tirx.transform.SplitHostDevice(),
        tirx.transform.MakePackedAPI(),
        tirx.transform.BF16StorageLegalize(),
    ]
    return _finalise(tvm.ir.transform.Sequential(passes)(mod), None, None)


def _finalise(mod, host_passes, device_passes):
    host, devices = split_host_device_mods(mod)
    if len(devices) != 1:
        raise InternalError(f"the module has {len(devices)} device targets; the simulator runs one")
    device = next(iter(devices.values()))
    if host_passes is None:
        from tvm.tirx.compilation_pipeline import finalize_device_passes_tirx, finalize_host_passes

        host_passes, device_passes = finalize_host_passes, finalize_device_passes_tirx
    return host_passes()(host), device_passes()(device)


def _named_pipeline(name: str) -> Pipeline:
    def run(mod):
        passes, host_passes, device_passes = tirx.get_tir_pipeline(name)
        return _finalise(passes(mod), host_passes, device_passes)

    return run


def _cuda_source(device: tvm.IRModule, target: tvm.target.Target) -> str:
    """CUDA source of a device module; the compile callback is put back as it was."""
    found: list[str] = []

    def capture(code, *_):
        found.append(str(code))
        return b"simulated"

    with _LOCK:
        before = tvm_ffi.get_global_func("tvm_callback_cuda_compile", allow_missing=True)
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", capture, override=True)
        try:
            module = codegen_build(device, target)
        finally:
            if before is None:
                tvm_ffi.registry.remove_global_func("tvm_callback_cuda_compile")
            else:
                tvm_ffi.register_global_func("tvm_callback_cuda_compile", before, override=True)
    if found:
        return found[0]
    return module.inspect_source("cuda")


def lower(mod: tvm.IRModule, target: tvm.target.Target, pipeline: str | Pipeline | None) -> Lowered:
    """Host TIR and CUDA source of ``mod``.

    Parameters
    ----------
    mod : tvm.IRModule
        Thread-level functions.
    target : tvm.target.Target
        A cuda target with its host.
    pipeline : str, callable or None
        Name of a registered TIR pipeline, or a function from module to (host, device); None: the lean one.
    """
    mod = tirx.transform.BindTarget(target)(mod)
    run = lean_pipeline if pipeline is None else _named_pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    with target:
        host, device = run(mod)
    tags = {}
    for gv, func in device.functions.items():
        name = str(func.attrs.get("global_symbol", gv.name_hint))
        tags[name] = [str(t) for t in func.attrs.get("tirx.kernel_launch_params", ())]
    return Lowered(host, _cuda_source(device, target), tags)
