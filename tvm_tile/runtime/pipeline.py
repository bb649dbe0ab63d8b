"""The TIR pipeline ``"tvm_tile"``: tile functions are lowered by us, every other PrimFunc gets TVM's own treatment.

Importing this module registers it, for ``tvm.compile(module, target, tir_pipeline="tvm_tile")``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx.compilation_pipeline import PIPELINE_MAP, finalize_host_passes, register_tir_pipeline

from ..errors import TileError
from ..lower import is_tile_function, lower
from ..lower.cpu.passes import FLAT_ATTR, lowered_passes
from .signature_of import assumptions_of
from .toolchain import PLAIN_KEY, TILE_KEY, install_callback

__all__ = ["NAME", "element_aligned", "observe", "register"]

NAME = "tvm_tile"
LOWERING_ATTR = "tile.lowering"

# Per thread: another thread's build must not be seen.
_local = threading.local()


class observe:
    """Calls ``see(module)`` with what this thread builds inside the ``with``, once host and device code are split."""

    def __init__(self, see: Callable[[tvm.IRModule], None]) -> None:
        self.see = see

    def __enter__(self) -> observe:
        self.previous = getattr(_local, "see", None)
        _local.see = self.see
        return self

    def __exit__(self, *_exc) -> None:
        _local.see = self.previous


def element_aligned(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with parameters that promise no more than their element's alignment.

    TVM's default promises 64 bytes, and LLVM then crashes on a NumPy array or a slice that starts elsewhere.
    """
    replaced = {}
    for param in func.params:
        if not tirx.is_buffer_var(param):
            continue
        ty = param.ty
        bytes_ = max(1, tvm_ffi.dtype(str(ty.dtype)).itemsize)
        if int(ty.data_alignment) <= bytes_:
            continue
        replaced[param] = tirx.decl_buffer(
            ty.shape,
            str(ty.dtype),
            str(param.name),
            strides=list(ty.strides) or None,
            elem_offset=ty.elem_offset,
            scope=str(ty.storage_scope),
            data_alignment=bytes_,
            offset_factor=int(ty.offset_factor),
            layout=ty.layout,
        )
    if not replaced:
        return func
    substitute = [(tirx.Var, lambda v: replaced.get(v, v))]
    params = [replaced.get(p, p) for p in func.params]
    body = tvm_ffi.structural_map(func.body, *substitute)
    return tirx.PrimFunc(params, body, func.ret_type, attrs=func.attrs, span=func.span)


def _guard_empty_grids(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Launch nothing where a symbolic grid extent is zero: the driver refuses empty grids."""

    def on_for(loop, mutator):
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return mutator.default_mutate(loop)
        extents, inner = [], loop
        while isinstance(inner, tirx.For) and inner.kind == tirx.ForKind.THREAD_BINDING:
            extents.append(inner.extent)
            inner = inner.body
        return _guarded(loop, extents)

    def on_attr(node, mutator):
        if str(node.attr_key) != "thread_extent":
            return mutator.default_mutate(node)
        extents, inner = [], node
        while isinstance(inner, tirx.AttrStmt) and str(inner.attr_key) == "thread_extent":
            extents.append(inner.value)
            inner = inner.body
        return _guarded(node, extents)

    return tvm_ffi.structural_mutate(func, [(tirx.For, on_for), (tirx.AttrStmt, on_attr)])


def _guarded(stmt, extents):
    condition = None
    for extent in extents:
        if isinstance(extent, tirx.IntImm) and int(extent.value) > 0:
            continue
        positive = extent > 0
        condition = positive if condition is None else tirx.And(condition, positive)
    return stmt if condition is None else tirx.IfThenElse(condition, stmt, None)


def _with_assumptions(lowered: tirx.PrimFunc, func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The lowered function with every ``T.assume`` of the tile function that the lowering did not keep itself."""
    kept: list[tirx.AssertStmt] = []
    tvm_ffi.structural_walk(lowered.body, (tirx.AssertStmt, kept.append))
    lost = [
        node
        for node in assumptions_of(func)
        if not any(tvm_ffi.structural_equal(node.condition, other.condition) for other in kept)
    ]
    return lowered.with_body(tirx.SeqStmt([*lost, lowered.body])) if lost else lowered


def _with_key(func: tirx.PrimFunc, key: str) -> tirx.PrimFunc:
    """Mark the function's device target, so that its CUDA module goes through our compile callback."""
    target = func.attrs.get("target", None)
    if target is None or target.kind.name != "cuda":
        return func
    config = dict(target.export())
    host = config.pop("host", None)
    keys = [str(k) for k in config.get("keys", [])]
    config["keys"] = [*keys, key]
    return func.with_attr("target", tvm.target.Target(config, host=host))


def _cuda_passes() -> list:
    """From lowered TIR to host and device functions; nothing that would undo the lowering's decisions.

    Loops stay as they are marked: ptxas unrolls them, and unrolling here would only cost compile time.
    """
    from ..lower.cuda.restrict import restrict_pointers
    from ..lower.cuda.scalars import carry_scalars

    return [
        s_tir.transform.UnifyThreadBinding(),
        tirx.transform.StmtSimplify(),
        tirx.transform.LowerTIRxOpaque(),
        tirx.transform.FlattenBuffer(),
        tirx.transform.BF16ComputeLegalize(),
        tirx.transform.NarrowDataType(32),
        tirx.transform.VectorizeLoop(True),
        tirx.transform.StmtSimplify(),
        tirx.transform.FP8ComputeLegalize(),
        tirx.transform.VerifyMemory(),
        tirx.transform.AnnotateEntryFunc(),
        _each("CarryScalars", carry_scalars),
        tirx.transform.SplitHostDevice(),
        _each("RestrictPointers", restrict_pointers),
        tirx.transform.MakePackedAPI(),
        tirx.transform.FP8StorageLegalize(),
        tirx.transform.BF16StorageLegalize(),
    ]


def _each(name: str, change):
    return tirx.transform.prim_func_pass(lambda func, mod, ctx: change(func), opt_level=0, name=name)


def _passes_for(func: tirx.PrimFunc) -> str:
    """Which passes a lowered function goes through: ``"cuda"``, ``"flat"`` or ``"reference"`` (both on CPUs)."""
    if _target_of(func).kind.name == "cuda":
        return "cuda"
    return "flat" if func.attrs is not None and FLAT_ATTR in func.attrs else "reference"


def _target_of(func: tirx.PrimFunc):
    target = func.attrs.get("target", None) if func.attrs is not None else None
    return target if target is not None else tvm.target.Target.current(allow_none=False)


def _lower_tile(gvar, func: tirx.PrimFunc) -> tirx.PrimFunc:
    target = _target_of(func)
    attrs = dict(func.attrs.items()) if func.attrs is not None else {}
    lowering = str(attrs.get(LOWERING_ATTR, "optimised"))
    if target.kind.name == "llvm":
        func = element_aligned(func)
    try:
        lowered = lower(func, target, lowering)
    except TileError as error:
        if error.location is None and gvar.name_hint not in str(error):
            error.message = f"{gvar.name_hint}: {error.message}"
        raise
    # Lowerings build a new function; the attributes that the pipeline needs must survive that.
    for key in ("global_symbol", "target"):
        if key in attrs and (lowered.attrs is None or key not in lowered.attrs):
            lowered = lowered.with_attr(key, attrs[key])
    if target.kind.name == "cuda":
        lowered = _guard_empty_grids(lowered)
    return _with_key(_with_assumptions(lowered, func), TILE_KEY)


def _pipeline_factory():
    stock_pipeline, _, stock_finalize_device = PIPELINE_MAP["s_tir"]()

    # Plain functions instead of passes: an exception that crosses TVM's C++ loses its type.
    def _pipeline(mod: tvm.IRModule) -> tvm.IRModule:
        tile, other, rest = {}, {}, {}
        for gvar, func in mod.functions.items():
            if not isinstance(func, tirx.PrimFunc):
                rest[gvar] = func
            elif is_tile_function(func):
                tile[gvar] = func
            else:
                other[gvar] = func
        functions = dict(rest)
        if tile:
            lowered = {gvar: _lower_tile(gvar, func) for gvar, func in tile.items()}
            by_passes: dict[str, dict] = {}
            for gvar, func in lowered.items():
                by_passes.setdefault(_passes_for(func), {})[gvar] = func
            for which, group in by_passes.items():
                passes = _cuda_passes() if which == "cuda" else lowered_passes(which == "flat")
                part = tvm.ir.transform.Sequential(passes)(tvm.IRModule(group, attrs=mod.attrs))
                functions.update(part.functions.items())
        if other:
            plain = {gvar: _with_key(func, PLAIN_KEY) for gvar, func in other.items()}
            functions.update(stock_pipeline(tvm.IRModule(plain, attrs=mod.attrs)).functions.items())
        result = tvm.IRModule(functions, attrs=mod.attrs)
        if any(_target_of(f).kind.name == "cuda" for f in functions.values() if isinstance(f, tirx.PrimFunc)):
            install_callback()
        see = getattr(_local, "see", None)
        if see is not None:
            see(result)
        return result

    def finalize_device():
        lean = tvm.ir.transform.Sequential([tirx.transform.LowerIntrin()])
        stock = stock_finalize_device()

        def _finalize(mod: tvm.IRModule) -> tvm.IRModule:
            # One device module holds one target's functions, and the target's key says whose they are.
            targets = [_target_of(f) for f in mod.functions.values()]
            ours = any(TILE_KEY in [str(k) for k in t.keys] for t in targets)
            return (lean if ours else stock)(mod)

        return _finalize

    return _pipeline, finalize_host_passes, finalize_device


def register() -> None:
    """Make the pipeline known to TVM by its name (once; calling it again does nothing)."""
    if NAME not in PIPELINE_MAP:
        register_tir_pipeline(NAME, _pipeline_factory)


register()
