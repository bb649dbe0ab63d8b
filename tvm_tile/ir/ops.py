"""Tile operations read back from annotated SBlocks as dataclasses.

Index expressions in a :class:`Region` mention the operation's *outer* variables (kernel axes, loops, bound values),
not the block's own copies of them: :func:`read_op` undoes the binding of outer loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.s_tir import SBlockRealize
from tvm.tirx import BufferStore, For, IfThenElse, SeqStmt

from ..errors import InternalError, SourceLocation
from .kernels import plain
from .visit import mentions, source_location, substitute, walk

__all__ = [
    "AssertOp", "Axis", "CopyOp", "CumsumOp", "FillOp", "GemmOp", "ParallelOp", "PrintOp", "ReduceOp", "Region",
    "SyncOp", "TileOp", "match_op", "read_op", "tile_ops",
]  # fmt: skip


@dataclass
class Axis:
    """One loop of a tile operation: its variable in the operation's expressions and its extent."""

    var: Var
    extent: object
    reduction: bool = False

    @property
    def size(self) -> int | None:
        """The extent as an int, None where it is symbolic."""
        return int(self.extent) if isinstance(self.extent, int | tirx.IntImm) else None


@dataclass
class Region:
    """A box of a buffer that an operation touches.

    Attributes
    ----------
    buffer : Var
        The buffer.
    mins : list of expression
        Start in each dimension, free of the operation's axes.
    extents : list
        Extent in each dimension.
    axes : list of int or None
        Which axis of the operation runs along each dimension (None: extent 1).
    """

    buffer: Var
    mins: list
    extents: list
    axes: list[int | None]

    @property
    def dtype(self) -> str:
        """Element dtype."""
        return str(self.buffer.ty.dtype)

    @property
    def scope(self) -> str:
        """Storage scope: ``global``, ``shared``, ``local.fragment``, ``local`` or ``local.var``."""
        return str(self.buffer.ty.storage_scope)

    @property
    def shape(self) -> list[int]:
        """Static extents of the buffer."""
        return [int(e) for e in self.buffer.ty.shape]

    @property
    def whole(self) -> bool:
        """Whether the region is the whole buffer."""
        equal = tvm_ffi.structural_equal
        return all(
            equal(tirx.convert(m), tirx.const(0, m.ty.dtype if hasattr(m, "ty") else "int32")) for m in self.mins
        ) and all(
            equal(tirx.convert(e), tirx.convert(s)) for e, s in zip(self.extents, self.buffer.ty.shape, strict=False)
        )


@dataclass
class TileOp:
    """What all operations have.

    Attributes
    ----------
    name : str
        Name of the block.
    axes : list of Axis
        The tile's loops, outermost first.
    body : Stmt
        One iteration, over ``axes`` variables and outer variables.
    init : Stmt or None
        What a reduction starts with.
    annotations : dict
        The block's annotations as plain data.
    location : SourceLocation or None
        Where the user wrote it.
    realize : SBlockRealize
        The block's realisation in the function.
    statement : int or None
        Statement number in a manually scheduled pipelined loop.
    """

    name: str
    axes: list[Axis]
    body: object
    init: object
    annotations: dict
    location: SourceLocation | None
    realize: SBlockRealize

    @property
    def statement(self) -> int | None:
        """Statement number in a manually scheduled pipelined loop, else None."""
        return self.annotations.get("tile.stmt")

    @property
    def extents(self) -> list:
        """Extents of the axes."""
        return [axis.extent for axis in self.axes]


@dataclass
class CopyOp(TileOp):
    """``dst[...] = cast(src[...])`` with bounds guards.

    ``src_guard`` and ``dst_guard`` are conditions over axes and outer variables, or None; ``safe_value`` is what a
    guarded load gives outside.
    """

    src: Region = None
    dst: Region = None
    src_guard: object = None
    dst_guard: object = None
    safe_value: float | int = 0


@dataclass
class FillOp(TileOp):
    """``dst[...] = value``."""

    dst: Region = None
    value: object = None
    dst_guard: object = None


@dataclass
class GemmOp(TileOp):
    """``C += op(A) op(B)``; axes are (i, j, k).

    ``mask`` is a Region over (i, j) or None; ``mask_value`` an expression or None (masked-out elements keep C).
    """

    a: Region = None
    b: Region = None
    c: Region = None
    m: int = 0
    n: int = 0
    k: int = 0
    trans_a: bool = False
    trans_b: bool = False
    policy: str = "Square"
    clear_accum: bool = False
    precision: str = "ieee"
    mask: Region | None = None
    mask_value: object = None


@dataclass
class ReduceOp(TileOp):
    """Reduction of ``src`` over ``dim``; the reduced axis is the last one (all axes for any/all).

    ``kind`` is max, min, sum, absmax, abssum, any or all; ``clear`` starts afresh.
    """

    src: Region = None
    dst: Region = None
    kind: str = "sum"
    dim: int = -1
    clear: bool = True


@dataclass
class CumsumOp(TileOp):
    """Inclusive scan of ``src`` along ``dim`` into ``dst`` (which may be ``src``)."""

    src: Region = None
    dst: Region = None
    dim: int = 0
    reverse: bool = False


@dataclass
class ParallelOp(TileOp):
    """Element-wise work: ``body`` once for each point of ``axes`` (none: once a CTA)."""


@dataclass
class PrintOp(TileOp):
    """``T.print``."""


@dataclass
class AssertOp(TileOp):
    """``T.device_assert``."""


@dataclass
class SyncOp(TileOp):
    """``T.sync_threads``."""


def match_op(stmt) -> tuple[list[For], SBlockRealize] | None:
    """The loops and block of a tile operation that starts at ``stmt``, else None.

    Parameters
    ----------
    stmt : Stmt
        A loop nest or block realisation.
    """
    loops: list[For] = []
    node = stmt
    while isinstance(node, For):
        loops.append(node)
        node = node.body
    if not isinstance(node, SBlockRealize) or "tile.op" not in node.block.annotations:
        return None
    return (loops, node) if len(loops) == int(node.block.annotations["tile.axes"]) else None


def tile_ops(stmt) -> Iterator[TileOp]:
    """All tile operations below a statement, in source order."""
    found: list[SBlockRealize] = []
    walk(stmt, (SBlockRealize, lambda r: found.append(r) if "tile.op" in r.block.annotations else None))
    for realize in found:
        yield read_op(realize)


def read_op(realize: SBlockRealize) -> TileOp:
    """A tile operation as a dataclass.

    Parameters
    ----------
    realize : SBlockRealize
        A block annotated ``tile.op``.

    Raises
    ------
    InternalError
        When the block is not one that the language makes (for example after a schedule rewrote its body).
    """
    block = realize.block
    notes = {str(k): plain(v) for k, v in block.annotations.items()}
    count = int(notes["tile.axes"])
    outer = {axis.var: value for axis, value in zip(block.iter_vars[count:], realize.iter_values[count:], strict=False)}
    body, init = substitute(block.body, outer), None if block.init is None else substitute(block.init, outer)
    axes = [Axis(v.var, v.dom.extent, v.iter_type == tirx.IterVar.CommReduce) for v in block.iter_vars[:count]]
    common = {
        "name": str(block.name_hint), "axes": axes, "body": body, "init": init, "annotations": notes,
        "location": source_location(block.span), "realize": realize,
    }  # fmt: skip
    reader = _READERS.get(notes["tile.op"])
    if reader is None:
        raise InternalError(f"unknown tile operation {notes['tile.op']!r}", common["location"])
    try:
        return reader(common, notes)
    except InternalError:
        raise
    except Exception as err:
        raise InternalError(
            f"block {block.name_hint} does not read back as {notes['tile.op']}: {err}", common["location"]
        ) from err


def _region(buffer: Var, indices, axes: list[Axis]) -> Region:
    """The box that indices linear in the axes (unit coefficients) sweep."""
    zero = {a.var: tirx.const(0, a.var.ty.dtype) for a in axes}
    analyzer = tvm.sym.Analyzer()
    mins, extents, which = [], [], []
    for index in indices:
        found = [n for n, a in enumerate(axes) if mentions(index, a.var)]
        if len(found) > 1:
            raise InternalError(f"index {index} mentions several axes")
        mins.append(analyzer.simplify(substitute(index, zero)) if found else index)
        extents.append(axes[found[0]].extent if found else tirx.const(1, "int32"))
        which.append(found[0] if found else None)
    return Region(buffer, mins, extents, which)


def _guarded_store(stmt):
    """(store, guard) of a store with an optional condition around it."""
    if isinstance(stmt, SeqStmt) and len(stmt.seq) == 1:
        stmt = stmt.seq[0]
    if isinstance(stmt, IfThenElse) and stmt.else_case is None:
        return stmt.then_case, stmt.condition
    return stmt, None


def _strip_cast(expr):
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _is_call(expr, name: str) -> bool:
    return isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") == name


def _read_copy(common, notes) -> CopyOp:
    store, dst_guard = _guarded_store(common["body"])
    value, src_guard, safe = _strip_cast(store.value), None, 0
    if _is_call(value, "prim.if_then_else"):
        src_guard, value, outside = value.args
        safe = outside.value
    if not isinstance(value, TensorLoad):
        raise InternalError(f"a copy loads one element, but this is {value}")
    axes = common["axes"]
    return CopyOp(**common, src=_region(value.source, value.indices, axes), dst=_region(store.buffer, store.indices,
    axes),               src_guard=src_guard, dst_guard=dst_guard, safe_value=safe)  # fmt: skip


def _read_fill(common, notes) -> FillOp:
    store, guard = _guarded_store(common["body"])
    return FillOp(
        **common, dst=_region(store.buffer, store.indices, common["axes"]), value=store.value, dst_guard=guard
    )


def _read_gemm(common, notes) -> GemmOp:
    store, axes = common["body"], common["axes"]
    if not isinstance(store, BufferStore):
        raise InternalError("a gemm stores one element")
    value, mask, mask_value = store.value, None, None
    if notes.get("tile.mask"):
        condition, other = value.condition, value.false_value
        value = value.true_value
        loads: list[TensorLoad] = []
        walk(condition, (TensorLoad, loads.append))
        mask = _region(loads[0].source, loads[0].indices, axes)
        mask_value = None if isinstance(other, TensorLoad) and other.source.same_as(store.buffer) else other
    left, right = _strip_cast(value.b.a), _strip_cast(value.b.b)
    trans_a, trans_b = (bool(t) for t in notes["tile.trans"])
    m, n, k = (int(a.extent) for a in axes)
    return GemmOp(
        **common, a=_region(left.source, left.indices, axes), b=_region(right.source, right.indices, axes),
        c=_region(store.buffer, store.indices, axes), m=m, n=n, k=k, trans_a=trans_a, trans_b=trans_b,
        policy=str(notes["tile.policy"]), precision=str(notes["tile.precision"]),
        clear_accum=common["init"] is not None,
        mask=mask, mask_value=mask_value,
    )  # fmt: skip


def _read_reduce(common, notes) -> ReduceOp:
    store, axes = common["body"], common["axes"]
    loads: list[TensorLoad] = []
    walk(store.value, (TensorLoad, loads.append))
    sources = [x for x in loads if not (x.source.same_as(store.buffer))]
    if not sources:
        raise InternalError("a reduction reads a tile")
    return ReduceOp(
        **common, src=_region(sources[0].source, sources[0].indices, axes), dst=_region(store.buffer, store.indices,
        axes), kind=str(notes["tile.reduce"]), dim=int(notes["tile.dim"]), clear=common["init"] is not None,
    )  # fmt: skip


def _read_cumsum(common, notes) -> CumsumOp:
    axes, node = [], common["body"]
    while isinstance(node, For):
        axes.append(Axis(node.loop_var, node.extent))
        node = node.body
    value = node.value.args[2]  # if_then_else(first, previous + element, element)
    dim, reverse = int(notes["tile.dim"]), bool(notes["tile.reverse"])
    source, target = _scan_region(value.source, value.indices, axes), _scan_region(node.buffer, node.indices, axes)
    return CumsumOp(**{**common, "axes": axes}, src=source, dst=target, dim=dim, reverse=reverse)


def _scan_region(buffer, indices, axes: list[Axis]) -> Region:
    """Like :func:`_region`, where the scanned axis may run backwards."""
    analyzer = tvm.sym.Analyzer()
    mins, extents, which = [], [], []
    for index in indices:
        found = [n for n, a in enumerate(axes) if mentions(index, a.var)]
        if not found:
            mins.append(index), extents.append(tirx.const(1, "int32")), which.append(None)
            continue
        axis = axes[found[0]]
        ends = [analyzer.simplify(substitute(index, {axis.var: e})) for e in (tirx.const(0, "int32"), axis.extent - 1)]
        backwards = analyzer.can_prove(ends[1] < ends[0])
        mins.append(ends[1] if backwards else ends[0])
        extents.append(axis.extent)
        which.append(found[0])
    return Region(buffer, mins, extents, which)


_READERS = {
    "copy": _read_copy,
    "fill": _read_fill,
    "gemm": _read_gemm,
    "reduce": _read_reduce,
    "cumsum": _read_cumsum,
    "parallel": lambda common, notes: ParallelOp(**common),
    "print": lambda common, notes: PrintOp(**common),
    "assert": lambda common, notes: AssertOp(**common),
    "sync": lambda common, notes: SyncOp(**common),
}
