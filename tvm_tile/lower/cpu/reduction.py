"""Reductions of tiles: along the vector (one result a row) or across rows (a vector of results)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, TensorLoad

from ...ir import ReduceOp
from ...ir.visit import walk
from .affine import affine
from .builder import const_int, is_nan, load, ramp, shuffle, splat
from .convert import NARROW_FLOATS, compute_dtype
from .expression import Evaluator, Lane, NotVectorizableError, Value
from .fma import VectorUnit
from .statements import emit_statement, nest, try_vectors


@dataclass(frozen=True)
class _Kind:
    """How values combine; ``identity`` leaves its partner as it is."""

    identity: Callable[[str], object]
    combine: Callable[[Expr, Expr], Expr]


def _pick(better) -> Callable[[Expr, Expr], Expr]:
    def combine(x: Expr, y: Expr) -> Expr:
        chosen = better(x, y)
        if str(x.ty.dtype).startswith("float"):
            chosen = tirx.Or(chosen, is_nan(x))  # a NaN on the left stays; one on the right loses every comparison
        return tirx.Select(chosen, x, y)

    return combine


def _lowest(dtype: str):
    if dtype.startswith("float"):
        return tirx.const(float("-inf"), dtype)
    return tirx.const(False, "bool") if dtype == "bool" else tirx.min_value(dtype)


def _highest(dtype: str):
    if dtype.startswith("float"):
        return tirx.const(float("inf"), dtype)
    return tirx.const(True, "bool") if dtype == "bool" else tirx.max_value(dtype)


_MAX = _Kind(_lowest, _pick(lambda x, y: x > y))
_SUM = _Kind(lambda d: tirx.const(0, d), lambda x, y: x + y)
_KINDS = {
    "max": _MAX,
    "absmax": _MAX,
    "min": _Kind(_highest, _pick(lambda x, y: x < y)),
    "sum": _SUM,
    "abssum": _SUM,
}


def emit_reduce(ev: Evaluator, unit: VectorUnit, op: ReduceOp) -> None:
    """Write a reduction.  Sums are formed in several partial sums and accumulate in the compute type."""
    if not (
        op.kind in _KINDS
        and (try_vectors(ev, lambda: _along(ev, unit, op)) or try_vectors(ev, lambda: _across(ev, unit, op)))
    ):
        _serial(ev, op)


def _serial(ev: Evaluator, op: ReduceOp) -> None:
    spatial = [(a.var, a.extent) for a in op.axes if not a.reduction]
    reduced = [(a.var, a.extent) for a in op.axes if a.reduction]

    def row() -> None:
        if op.init is not None:
            emit_statement(ev, op.init)
        nest(ev, reduced, lambda: emit_statement(ev, op.body))

    nest(ev, spatial, row)


def _element(op: ReduceOp) -> Expr:
    """The reduced expression: what the body combines with the destination."""
    value = op.body.value
    return value.false_value if isinstance(value, tirx.Select) else value.b


def _start(ev: Evaluator, op: ReduceOp, dtype: str) -> Expr | None:
    """The destination's old value, or None where the reduction starts afresh."""
    if op.init is not None:
        return None
    return ev.settle(ev.evaluate(tirx.BufferLoad(op.body.buffer, list(op.body.indices)))).expr


def _step(ev: Evaluator, op: ReduceOp, var) -> int | None:
    found: list = []
    walk(_element(op), (TensorLoad, found.append))
    if len(found) != 1:
        return None
    parts = affine(ev.storages(found[0].source).flat_index(list(found[0].indices)), var)
    return None if parts is None else const_int(parts[0])


def _along(ev: Evaluator, unit: VectorUnit, op: ReduceOp) -> None:
    """The reduced axis is contiguous: vectors of partial results, combined at the end of each row."""
    spatial = [(a.var, a.extent) for a in op.axes if not a.reduction]
    reduced = [a for a in op.axes if a.reduction]
    if len(reduced) != 1 or _step(ev, op, reduced[0].var) != 1:
        raise NotVectorizableError("reduced axis is not contiguous")
    axis, kind = reduced[0], _KINDS[op.kind]
    dtype = compute_dtype(str(op.body.buffer.ty.dtype))
    lanes = _lanes(unit, dtype)
    size = int(axis.extent)
    if size < lanes:
        raise NotVectorizableError("short row")
    b = ev.b

    def row() -> None:
        total = b.register(dtype, lanes, "partial")

        def piece(base) -> Expr:
            ev.lane = Lane(axis.var, base, lanes)
            value = ev.settle(ev.evaluate(_element(op)))
            ev.lane = None
            if value.lanes != lanes:
                raise NotVectorizableError("uniform element")
            return value.expr

        b.store(total, piece(tirx.const(0, "int32")), 0)
        if size // lanes > 1:
            with b.loop(size // lanes - 1, axis.var.name) as i:
                b.store(total, kind.combine(load(total, 0), piece((i + 1) * lanes)), 0)
        result = b.bind(load(total, 0), "partial")
        if size % lanes:
            # the last vector overlaps the one before; lanes already counted become the identity
            last = piece(tirx.const(size - lanes, "int32"))
            fresh = tirx.GE(ramp(tirx.const(0, "int32"), lanes), splat(lanes - size % lanes, "int32", lanes))
            last = b.bind(tirx.Select(fresh, last, splat(kind.identity(dtype), dtype, lanes)), "last")
            result = b.bind(kind.combine(result, last), "partial")
        result = _horizontal(b, result, lanes, kind)
        old = _start(ev, op, dtype)
        if old is not None:
            result = kind.combine(old, result)
        _write(ev, op, result)

    nest(ev, spatial, row)


def _horizontal(b, vector: Expr, lanes: int, kind: _Kind) -> Expr:
    """Combine the lanes of a vector: halves onto each other until one is left."""
    while lanes > 1:
        half = lanes // 2
        low, high = shuffle([vector], list(range(half))), shuffle([vector], list(range(half, lanes)))
        vector, lanes = b.bind(kind.combine(b.bind(low, "low"), b.bind(high, "high")), "half"), half
    return vector


def _across(ev: Evaluator, unit: VectorUnit, op: ReduceOp) -> None:
    """Another axis is contiguous: its elements are the lanes, and the reduced axes run serially."""
    spatial = [(a.var, a.extent) for a in op.axes if not a.reduction]
    reduced = [(a.var, a.extent) for a in op.axes if a.reduction]
    kind = _KINDS[op.kind]
    dtype = compute_dtype(str(op.body.buffer.ty.dtype))
    lanes = _lanes(unit, dtype)
    candidates = [n for n, (var, extent) in enumerate(spatial) if _step(ev, op, var) == 1 and int(extent) >= lanes]
    if not candidates:
        raise NotVectorizableError("no contiguous axis")
    var, extent = spatial[candidates[0]]
    others = [a for n, a in enumerate(spatial) if n != candidates[0]]
    b, size = ev.b, int(extent)

    def column(base) -> None:
        total = b.register(dtype, lanes, "partial")
        lane = Lane(var, base, lanes)
        ev.lane = lane
        old = _start(ev, op, dtype)
        start = splat(kind.identity(dtype), dtype, lanes) if old is None else ev.spread(old, lanes)
        b.store(total, start, 0)
        ev.lane = None

        def combine() -> None:
            ev.lane = lane
            value = ev.settle(ev.evaluate(_element(op)))
            b.store(total, kind.combine(load(total, 0), ev.spread(value.expr, lanes)), 0)
            ev.lane = None

        nest(ev, reduced, combine)
        ev.lane = lane
        _write(ev, op, load(total, 0))
        ev.lane = None

    def columns() -> None:
        with b.loop(size // lanes, var.name) as i:
            column(i * lanes)
        if size % lanes:
            if op.init is None:
                raise NotVectorizableError("ragged columns of an accumulating reduction")
            column(tirx.const(size - lanes, "int32"))  # overlaps the vector before and gives the same values again

    nest(ev, others, columns)


def _lanes(unit: VectorUnit, dtype: str) -> int:
    if dtype == "bool":
        raise NotVectorizableError("bool")
    return unit.bits // max(tirx.const(0, dtype).ty.dtype.bits, 32)


def _write(ev: Evaluator, op: ReduceOp, result: Expr) -> None:
    """Store a result given in the compute type."""
    name = "result"
    value = ev.b.bind(result, name)
    target = str(op.body.buffer.ty.dtype)
    variable = tirx.Var(name, target)
    ev.values[variable] = Value(value, target, target not in NARROW_FLOATS)
    emit_statement(ev, tirx.BufferStore(op.body.buffer, variable, op.body.indices))
    del ev.values[variable]
