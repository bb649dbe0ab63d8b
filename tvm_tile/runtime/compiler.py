"""``tvm_tile.compile``: a PrimFunc becomes a :class:`Kernel`, from the disk cache where it was built before."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import TileError, TileTypeError
from ..lower import LOWERINGS, is_tile_function
from . import cache as disk
from .kernel import Artifacts, Kernel
from .loader import METADATA_SYMBOL, open_library
from .resources import KernelResources, Resources
from .signature import FORMAT, Signature
from .targets import target as resolve_target
from .targets import target_label
from .toolchain import collect, find_cc, find_nvcc, link_shared, require_nvcc
from .tvm_setup import ensure_cuda_runtime, package_version, prepare_tvm, thread_count

__all__ = ["compile"]


def compile(  # noqa: A001  the public name
    func_or_module,
    shape_or_target=None,
    target=None,
    *,
    shape: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    lowering: str = "optimised",
    cache: bool = True,
    name: str | None = None,
) -> Kernel:
    """Compile a kernel.

    Parameters
    ----------
    func_or_module : tvm.tirx.PrimFunc, tvm.IRModule, str or OpSpec
        A function of the language (or any schedulable PrimFunc); a module with exactly one PrimFunc; or the name of an
        op of the library, which takes its best known configuration for the shape (see :mod:`tvm_tile.tune.records`).
    shape_or_target : dict, str or tvm.target.Target, optional
        What stands second: the shape of an op, else the target.
    target : str or tvm.target.Target, optional
        As in :func:`tvm_tile.target`; by default ``"auto"``, the GPU here, else this CPU.
    shape : dict, optional
        Shape parameters of an op given by its name.
    dtype : str, optional
        Dtype of such an op.
    lowering : str
        ``"optimised"``, or ``"reference"``: no optimisation at all, on a CPU; the oracle for tests.
    cache : bool
        Look in the disk cache and store the result there.
    name : str, optional
        Name of the function in the library; by default the kernel's own.

    Returns
    -------
    Kernel
        Call it with tensors.

    Raises
    ------
    TileError
        A mistake in the kernel (its subclass says of what kind), or a compiler that is missing (ToolchainError).

    Examples
    --------
    >>> @T.prim_func
    ... def double(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             B[bx * 64 + i] = A[bx * 64 + i] * 2
    >>> kernel = tvm_tile.compile(double, "llvm")
    >>> a, b = np.arange(100, dtype="float32"), np.zeros(100, dtype="float32")
    >>> kernel(a, b)
    >>> bool((b == 2 * a).all())
    True
    >>> tvm_tile.compile("softmax", shape={"rows": 4, "columns": 10}, target="llvm").name
    'softmax'
    >>> tvm_tile.compile("softmax", {"rows": 4, "columns": 10}, target="llvm").name
    'softmax'
    """
    start = time.perf_counter()
    tvm = prepare_tvm()
    shape, target = _shape_and_target(shape_or_target, shape, target)
    if isinstance(func_or_module, str) or hasattr(func_or_module, "shape_params"):
        from ..tune.apply import tuned_function

        func_or_module = tuned_function(func_or_module, shape, dtype, target)
    elif shape is not None or dtype is not None:
        raise TileTypeError("shape and dtype are for an op given by its name; a function has its own")
    func, name = _single_function(func_or_module, name)
    where = resolve_target(target)
    if lowering not in LOWERINGS:
        raise TileError(f"unknown lowering {lowering!r}", advice=f"the lowerings are {', '.join(LOWERINGS)}")
    if not (name.isascii() and name.isidentifier()):
        raise TileError(f"the function's name {name!r} is no C identifier", advice="pass name= to compile")
    func = func.with_attr("global_symbol", name)
    tile = is_tile_function(func)
    if tile and lowering != "optimised":
        func = func.with_attr("tile.lowering", lowering)
    cuda = where.kind.name == "cuda"
    if cuda:
        require_nvcc()
        ensure_cuda_runtime()

    if not cache or find_cc() is None:
        keep = tempfile.TemporaryDirectory(prefix="tvm_tile_")
        folder = Path(keep.name)
        data, module = _build(tvm, func, name, where, lowering, folder)
        return _kernel(disk.Entry(folder, data), start, cached=False, module=module, keep=keep)

    key = disk.key_of(_key_parts(tvm, func, where, lowering))
    entry = disk.load_entry(key)
    if entry is not None:
        return _kernel(entry, start, cached=True)
    folder = disk.scratch_folder()
    try:
        data, _ = _build(tvm, func, name, where, lowering, folder)
        entry = disk.store_entry(key, folder, data)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    disk.prune()
    return _kernel(entry, start, cached=False)


def _shape_and_target(second, shape: Mapping[str, Any] | None, target):
    """What stands second is one of the two, which must not be given twice."""
    name = "shape" if isinstance(second, Mapping) else "target"
    if second is not None:
        if (shape if name == "shape" else target) is not None:
            raise TileTypeError(
                f"compile got its {name} twice", advice='for example compile("gemm", {"m": 64}, target="sm_90")'
            )
        shape, target = (second, target) if name == "shape" else (shape, second)
    return shape, "auto" if target is None else target


def _single_function(func_or_module, name: str | None):
    tvm = prepare_tvm()
    if isinstance(func_or_module, tvm.tirx.PrimFunc):
        func = func_or_module
        known = func.attrs.get("global_symbol", None) if func.attrs is not None else None
        return func, name or str("main" if known is None else known)
    if not isinstance(func_or_module, tvm.IRModule):
        advice = "pass the function that @T.prim_func makes"
        if callable(func_or_module):
            advice = "call the factory first: compile(factory(...)); or decorate the function with @T.prim_func"
        given = type(func_or_module).__name__
        raise TileTypeError(f"compile takes a PrimFunc or an IRModule, not {given}", advice=advice)
    functions = func_or_module.functions.items()
    prim = {g.name_hint: f for g, f in functions if isinstance(f, tvm.tirx.PrimFunc)}
    if any(not isinstance(f, tvm.tirx.PrimFunc) for _, f in functions):
        raise TileTypeError(
            "the module has Relax functions, and compile makes single kernels",
            advice="build it with tvm.compile(module, tvm_tile.target(...), tir_pipeline='tvm_tile')",
        )
    if len(prim) != 1:
        raise TileTypeError(
            f"the module has {len(prim)} functions ({', '.join(sorted(prim)) or 'none'}), and compile makes one kernel",
            advice="pass one of them: compile(module['NAME'])",
        )
    (only, func) = next(iter(prim.items()))
    return func, name or only


def _key_parts(tvm, func, target, lowering: str) -> dict[str, Any]:
    """Everything beside our own sources that decides the result."""
    context = tvm.transform.PassContext.current()
    parts: dict[str, Any] = {
        # The script shows every node and attribute; spans, which it leaves out, do not change the code.
        "ir": func.script(show_meta=True),
        "target": str(target),
        "lowering": lowering,
        "tvm": package_version("apache-tvm"),
        "ffi": package_version("apache-tvm-ffi"),
        "threads": thread_count(),
        "passes": [context.opt_level, sorted((str(k), str(v)) for k, v in dict(context.config).items())],
        "passes_on_off": [list(map(str, context.required_pass)), list(map(str, context.disabled_pass))],
    }
    if target.kind.name == "cuda":
        nvcc = find_nvcc()
        parts["nvcc"] = nvcc and nvcc.version
    else:
        from ..lower.cpu.amx import amx_available

        parts["cpu"] = _cpu_flags()
        parts["amx"] = [amx_available(dtype) for dtype in ("bfloat16", "int8")]
    return parts


def _cpu_flags() -> str:
    """Features of this CPU: the lowering may use more than the target says (AMX needs the system's permission)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(tvm, func, name: str, target, lowering: str, folder: Path):
    """Compile into a folder: library, source, script; returns the entry's data and the module in memory."""
    from . import pipeline
    from .signature_of import signature_of

    cuda = target.kind.name == "cuda"
    signature = signature_of(func, name, target, align=16 if cuda else None)
    tile = is_tile_function(func)
    prepared = func if tile else pipeline.element_aligned(func)
    launches: dict[str, tuple[int, int]] = {}

    def see(module) -> None:
        for gvar, device_function in module.functions.items():
            launches.update(_launch_of(gvar, device_function))

    with collect() as compiled, pipeline.observe(see):
        module = tvm.tirx.build(tvm.IRModule({name: prepared}), target=target, pipeline=pipeline.NAME)
    resources = _cuda_resources(target, compiled, launches) if cuda else _cpu_resources(target)
    if cuda:
        source = "\n".join(c.source for c in compiled)
        (folder / "source.cu").write_text(source)
        (folder / "device.fatbin").write_bytes(b"".join(c.binary for c in compiled))
        (folder / "nvcc.log").write_text("\n".join(c.log for c in compiled))
    else:
        (folder / "source.ll").write_text(module.inspect_source("ll"))
    (folder / "script.py").write_text(func.script())
    data = {
        "format": FORMAT,
        "signature": signature.to_json(),
        "target": target_label(target),
        "arch": str(target.attrs["arch"]) if cuda else None,
        "lowering": lowering if tile else "stock",
        "config": _config_of(func),
        "config_source": str((func.attrs or {}).get("tile.config_source", "")),
        "resources": resources.to_json(),
    }
    if find_cc() is not None:
        _link(module, folder, data)
    return data, module


def _config_of(func) -> dict:
    """The tunable parameters that the factory recorded as the attribute ``tile.config``."""
    if func.attrs is None or "tile.config" not in func.attrs:
        return {}
    from ..ir.kernels import plain

    return plain(func.attrs["tile.config"])


def _link(module, folder: Path, data: dict) -> None:
    """Export the module with the metadata as a constant, which loaders read without TVM."""
    with tempfile.TemporaryDirectory(prefix="tvm_tile_link_") as scratch:
        text = Path(scratch) / "metadata.json"
        text.write_bytes(json.dumps(data).encode() + b"\0")
        assembly = Path(scratch) / "metadata.s"
        assembly.write_text(
            f'.section .rodata\n.globl {METADATA_SYMBOL}\n{METADATA_SYMBOL}:\n.incbin "{text}"\n'
            '.section .note.GNU-stack,"",%progbits\n'
        )

        def fcompile(output, objects, options=None, **_ignored):
            link_shared(output, [*objects, *(options or [])])

        module.export_library(
            str(folder / "kernel.so"), fcompile=fcompile, addons=[str(assembly)], workspace_dir=scratch
        )


def _launch_of(gvar, func) -> dict[str, tuple[int, int]]:
    """Threads a block and dynamic shared bytes of a device function (none for host functions)."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    if not isinstance(func, tirx.PrimFunc) or func.attrs is None:
        return {}
    if int(func.attrs.get("calling_conv", 0)) != 2:
        return {}
    threads, shared = 1, 0
    seen = set()

    def on_attr(node):
        nonlocal threads
        if str(node.attr_key) != "thread_extent":
            return
        tag = str(node.node.thread_tag)
        if tag.startswith("threadIdx") and tag not in seen and isinstance(node.value, tirx.IntImm):
            seen.add(tag)
            threads *= int(node.value.value)

    def on_alloc(node):
        nonlocal shared
        ty = node.buffer.ty
        if str(ty.storage_scope) == "shared.dyn":
            extents = [int(e.value) if isinstance(e, tirx.IntImm) else 0 for e in ty.shape]
            size = tvm_ffi.dtype(str(ty.dtype)).itemsize
            for extent in extents:
                size *= extent
            shared += size

    tvm_ffi.structural_walk(func.body, [(tirx.AttrStmt, on_attr), (tvm.tirx.AllocBuffer, on_alloc)])
    symbol = func.attrs.get("global_symbol", None)
    return {str(symbol or gvar.name_hint): (threads, shared)}


def _cuda_resources(target, compiled, launches: dict[str, tuple[int, int]]) -> Resources:
    arch = str(target.attrs["arch"])
    kernels, warnings = [], []
    for unit in compiled:
        warnings += unit.warnings
        for k in unit.kernels:
            threads, dynamic = launches.get(k.name, (0, 0))
            shared = k.static_shared + dynamic
            spilled = k.spill_stores + k.spill_loads
            occupancy = _occupancy(arch, threads, k.registers, shared)
            kernels.append(KernelResources(k.name, k.registers, spilled, shared, threads, occupancy))
            if spilled:
                warnings.append(f"{k.name} spills {spilled} bytes a thread to local memory")
    return Resources.of_kernels(arch, kernels, warnings)


def _occupancy(arch: str, threads: int, registers: int, shared: int) -> float | None:
    """Share of the SM's thread slots in use, from the hardware description; None where there is none for the GPU."""
    from .. import hardware

    if threads <= 0:
        return None
    try:
        description = hardware.lookup(arch.removesuffix("a"))
    except KeyError:
        return None
    return hardware.occupancy(description, threads, registers, shared).fraction


def _cpu_resources(target) -> Resources:
    return Resources(target_label(target), threads=thread_count())


def _kernel(entry: disk.Entry, start: float, *, cached: bool, module=None, keep=None) -> Kernel:
    data = entry.data
    signature = Signature.from_json(data["signature"])
    library = entry.path("kernel.so") if entry.has("kernel.so") else None
    if library is not None:
        function = open_library(library, signature)
    else:
        function = module.get_function(signature.name)
    artifacts = Artifacts(
        target=data["target"],
        arch=data["arch"],
        lowering=data["lowering"],
        config=data["config"],
        config_source=data["config_source"],
        resources=data["resources"],
        folder=entry.folder,
        library=library,
        cached=cached,
        seconds=time.perf_counter() - start,
        keep=keep,
    )
    return Kernel(function, signature, artifacts)
