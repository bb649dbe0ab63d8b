"""Lowers statements of the program: scalar control flow, and the bodies of element-wise operations as vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad, Var
from tvm.tirx.op import masked_store

from ...errors import InternalError
from ...ir.visit import walk
from .affine import affine, always, conjuncts, same
from .builder import const_int, lanes_of, ramp, stores_narrow, vtype
from .convert import compute_dtype, narrow, storage_dtype
from .expression import Evaluator, Lane, NotVectorizableError, Value, byte_index, op_name
from .fma import VectorUnit

MAX_HOISTED = 8  # more guards than this are not worth a second copy of the code


def emit_statement(ev: Evaluator, stmt) -> None:
    """Write one statement of the program at ``ev``'s place, as scalars or as vectors along ``ev.lane``."""
    b = ev.b
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            emit_statement(ev, part)
    elif isinstance(stmt, tirx.BufferStore):
        _store(ev, stmt)
    elif isinstance(stmt, tirx.IfThenElse):
        _branch(ev, stmt)
    elif isinstance(stmt, tirx.Bind):
        value = ev.settle(ev.evaluate(stmt.value))
        if value.dtype == "bool" and value.lanes > 1:
            ev.values[stmt.var] = value
        else:
            ev.values[stmt.var] = Value(b.bind(value.expr, stmt.var.name), value.dtype)
    elif isinstance(stmt, tirx.For):
        _loop(ev, stmt)
    elif isinstance(stmt, tirx.Evaluate):
        if isinstance(stmt.value, Call):
            value = ev.evaluate(stmt.value)
            if isinstance(value.expr, Call):
                b.evaluate(value.expr)
    elif isinstance(stmt, tirx.While):
        if ev.lane is not None:
            raise NotVectorizableError("while")
        with b.scope() as body:
            emit_statement(ev, stmt.body)
        with b.scope() as head:
            condition = ev.scalar(stmt.condition)
        if head:
            raise InternalError("a while condition that reads memory has no CPU lowering")
        b.emit(tirx.While(condition, tirx.SeqStmt(body) if len(body) != 1 else body[0]))
    elif isinstance(stmt, tirx.AssertStmt):
        if ev.lane is not None:
            raise NotVectorizableError("assert")
        b.emit(tirx.AssertStmt(ev.scalar(stmt.condition), stmt.error_kind, stmt.message_parts))
    else:
        raise InternalError(f"the CPU lowering has no rule for {type(stmt).__name__}: {stmt}")


def _loop(ev: Evaluator, stmt: tirx.For) -> None:
    start, extent = ev.scalar(stmt.min), ev.scalar(stmt.extent)
    step = 1 if stmt.step is None else ev.scalar(stmt.step)
    if const_int(step) != 1:
        extent = tirx.floordiv(extent + step - 1, step)
    with ev.b.loop(extent, stmt.loop_var.name, dtype=str(stmt.loop_var.ty.dtype)) as i:
        ev.env[stmt.loop_var] = start + i * step if const_int(step) != 1 else start + i
        emit_statement(ev, stmt.body)
        del ev.env[stmt.loop_var]


def _branch(ev: Evaluator, stmt: tirx.IfThenElse) -> None:
    split = ev.split(stmt.condition)
    if split is not None and stmt.else_case is None:
        uniform, varying = split
        _branch(ev, tirx.IfThenElse(uniform, tirx.IfThenElse(varying, stmt.then_case, None), None))
        return
    condition = ev.evaluate(stmt.condition).expr
    known = const_int(condition)
    if known is not None:
        side = stmt.then_case if known else stmt.else_case
        if side is not None:
            emit_statement(ev, side)
        return
    if Value(condition, "bool").lanes == 1:
        terms = conjuncts(stmt.condition)

        def then() -> None:
            # what is stored here may change what the condition read, so it is not assumed unless it reads nothing
            stable = [t for t in terms if not _reads(t)]
            ev.assumed.extend(stable)
            emit_statement(ev, stmt.then_case)
            if stable:
                del ev.assumed[-len(stable) :]

        def otherwise() -> None:
            if stmt.else_case is not None:
                emit_statement(ev, stmt.else_case)

        ev.b.if_else(condition, then, otherwise)
        return
    outer = ev.mask
    try:
        ev.mask = condition if outer is None else tirx.And(outer, condition)
        emit_statement(ev, stmt.then_case)
        if stmt.else_case is not None:
            unchosen = tirx.Not(condition)
            ev.mask = unchosen if outer is None else tirx.And(outer, unchosen)
            emit_statement(ev, stmt.else_case)
    finally:
        ev.mask = outer


def _reads(expr) -> bool:
    found: list = []
    walk(expr, (TensorLoad, found.append))
    return bool(found)


def _store(ev: Evaluator, stmt: tirx.BufferStore) -> None:
    storage = ev.storages(stmt.buffer)
    value = ev.evaluate(stmt.value)
    if value.dtype != storage.dtype:
        raise InternalError(f"store of {value.dtype} to {storage.source.name} of {storage.dtype}")
    index, lanes, contiguous = ev.index(storage, stmt.indices)
    if ev.lane is not None and lanes == 1:
        raise NotVectorizableError("every lane stores to one element")
    b = ev.b
    bits = narrow(b, ev.spread(value.expr, lanes), storage.dtype)
    if storage.bytewise:
        if lanes > 1 and (ev.mask is not None or not contiguous):
            raise NotVectorizableError("masked bytes")
        place = byte_index(index, storage.dtype)
        b.store(storage.flat, tirx.reinterpret(vtype("uint8", lanes_of(place)), bits), place)
    elif ev.mask is None:
        b.store(storage.flat, bits, index)
    elif contiguous:
        b.evaluate(masked_store(storage.flat, bits, index, ev.mask))
    else:
        raise NotVectorizableError("masked scatter")


# -------------------------------------------------------------------- element-wise operations
@dataclass
class Elementwise:
    """An operation over independent points.

    Attributes
    ----------
    axes : list of (Var, extent)
        Iteration space, outermost first.
    body : Stmt
        What one point does.
    """

    axes: list[tuple[Var, object]]
    body: object


def emit_elementwise(ev: Evaluator, unit: VectorUnit, op: Elementwise) -> None:
    """Write an element-wise operation: a fast form without guards where the whole tile is inside, else the guarded one.

    Both forms are vectorised along the axis with the best memory accesses; what has no vector form runs as scalars.
    """
    guards = _hoisted_guards(op)
    if not guards:
        _emit_nest(ev, unit, op)
        return
    inside = [ev.scalar(condition) for condition, _ in guards]
    whole = inside[0]
    for condition in inside[1:]:
        whole = tirx.And(whole, condition)

    def fast() -> None:
        ev.assumed.extend(term for _, term in guards)
        _emit_nest(ev, unit, op)
        del ev.assumed[-len(guards) :]

    ev.b.if_else(whole, fast, lambda: _emit_nest(ev, unit, op))


def _hoisted_guards(op: Elementwise) -> list[tuple[Expr, Expr]]:
    """Conditions of the body with, for each, what makes it true on the whole tile."""
    found: list[tuple[Expr, Expr]] = []

    def consider(condition) -> None:
        for term in conjuncts(condition):
            if _reads(term) or _mentions_inner(term, op.body) or any(same(term, known) for _, known in found):
                continue
            whole = always(term, op.axes)
            if whole is not None:
                found.append((whole, term))

    walk(
        op.body,
        (tirx.IfThenElse, lambda s: consider(s.condition)),
        (tirx.Select, lambda s: consider(s.condition)),
        (Call, lambda c: consider(c.args[0]) if op_name(c) == "if_then_else" else None),
    )
    return found if len(found) <= MAX_HOISTED else []


def _mentions_inner(term, body) -> bool:
    """Whether a condition uses a variable that the body itself binds."""
    inner: list = []
    walk(body, (tirx.Bind, lambda s: inner.append(s.var)), (tirx.For, lambda s: inner.append(s.loop_var)))
    hit: list = []
    walk(term, (Var, lambda v: hit.append(v) if any(v.same_as(i) for i in inner) else None))
    return bool(hit)


def _emit_nest(ev: Evaluator, unit: VectorUnit, op: Elementwise) -> None:
    for axis in _lane_candidates(ev, op):
        lanes = _lane_count(unit, op, axis)
        if lanes > 1 and try_vectors(ev, lambda axis=axis, lanes=lanes: _emit_vectors(ev, op, axis, lanes)):
            return
    nest(ev, op.axes, lambda: emit_statement(ev, op.body), _guards_narrow_stores(op.body))


def _guards_narrow_stores(body) -> bool:
    """Whether conditions decide about stores of 8- or 16-bit elements (see :func:`.builder.emit_opaque_zero`)."""
    found: list = []
    walk(body, (tirx.IfThenElse, lambda s: found.append(s) if stores_narrow(s) else None))
    return bool(found)


def try_vectors(ev: Evaluator, write: Callable[[], None]) -> bool:
    """Keep what ``write`` wrote unless it met something without a vector form."""
    state = dict(ev.env), dict(ev.values), list(ev.assumed), ev.lane, ev.mask
    try:
        with ev.b.scope() as statements:
            write()
    except NotVectorizableError:
        ev.env, ev.values, ev.assumed, ev.lane, ev.mask = state
        return False
    for stmt in statements:
        ev.b.emit(stmt)
    return True


def nest(ev: Evaluator, axes: list[tuple[Var, object]], body: Callable[[], None], opaque: bool = False) -> None:
    """Serial loops over ``axes``; ``opaque`` hides the axes' values from LLVM."""
    if not axes:
        saved = dict(ev.values)
        body()
        ev.values = saved
        return
    (var, extent), *rest = axes
    limit = extent if isinstance(extent, int) else ev.scalar(extent)
    with ev.b.loop(const_int(limit) if const_int(limit) is not None else limit, var.name, dtype=str(var.ty.dtype)) as i:
        ev.env[var] = i + tirx.Cast(str(var.ty.dtype), ev.zero) if opaque else i
        nest(ev, rest, body, opaque)
        del ev.env[var]


def _emit_vectors(ev: Evaluator, op: Elementwise, axis: int, lanes: int) -> None:
    var, extent = op.axes[axis]
    others = [a for n, a in enumerate(op.axes) if n != axis]
    dtype = str(var.ty.dtype)
    size = const_int(extent)

    guarded, narrow_stores = _guards_narrow_stores(op.body), stores_narrow(op.body)

    def piece(base: Expr, limit: Expr | None) -> None:
        saved = dict(ev.values)
        if guarded or (limit is not None and narrow_stores):
            base = base + tirx.Cast(dtype, ev.zero)
        mask = None if limit is None else tirx.LT(ramp(base, lanes), tirx.Broadcast(limit, lanes))
        ev.lane, ev.mask = Lane(var, base, lanes), mask
        emit_statement(ev, op.body)
        ev.lane, ev.mask = None, None
        ev.values = saved

    def inner() -> None:
        if size is None:
            limit = ev.scalar(extent)
            with ev.b.loop(tirx.floordiv(limit + (lanes - 1), lanes), var.name, dtype=dtype) as i:
                piece(i * lanes, limit)
            return
        full = size // lanes
        if full:
            with ev.b.loop(full, var.name, dtype=dtype) as i:
                piece(i * lanes, None)
        if size % lanes:
            piece(tirx.const(full * lanes, dtype), tirx.const(size, dtype))

    nest(ev, others, inner)


def _lane_count(unit: VectorUnit, op: Elementwise, axis: int) -> int:
    """Elements a vector: the widest type computed with fills a register, a short axis is not exceeded by half."""
    types = {str(a.ty.dtype) for a in _accesses(op.body)[0]} | {str(s.buffer.ty.dtype) for s in _accesses(op.body)[1]}
    computed = (
        {compute_dtype(t) for t in types} if len(types) > 1 or _computes(op.body) else {storage_dtype(t) for t in types}
    )
    widest = max((tirx.const(0, t).ty.dtype.bits if t != "bool" else 8 for t in computed), default=32)
    lanes = max(1, unit.bits // max(widest, 8))
    size = const_int(op.axes[axis][1])
    while size is not None and lanes > 1 and lanes >= 2 * size:
        lanes //= 2
    return lanes


def _computes(body) -> bool:
    """Whether the body does more than move elements."""
    found: list = []
    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, tirx.Select, tirx.Cast)

    def look(store):
        walk(
            store.value,
            *[(k, found.append) for k in kinds],
            (Call, lambda c: found.append(c) if not _is_guard(c) else None),
        )

    walk(body, (tirx.BufferStore, look), (tirx.Bind, found.append))
    return bool(found)


def _is_guard(call) -> bool:
    return op_name(call) == "if_then_else"


def _accesses(body) -> tuple[list, list]:
    loads: list = []
    stores: list = []
    walk(body, (TensorLoad, loads.append), (tirx.BufferStore, stores.append))
    return loads, stores


def _lane_candidates(ev: Evaluator, op: Elementwise) -> list[int]:
    """Axes to vectorise along, best first: contiguous accesses count most, and every store must move with the axis."""
    loads, stores = _accesses(op.body)
    scored = []
    for n, (var, _extent) in enumerate(op.axes):
        score = 0
        for access, weight in [(a, 1) for a in loads] + [(s, 3) for s in stores]:
            buffer = access.source if isinstance(access, TensorLoad) else access.buffer
            parts = affine(ev.storages(buffer).flat_index(list(access.indices)), var)
            step = None if parts is None else const_int(parts[0])
            score += weight * (2 if step == 1 else 0 if step == 0 else -2)
        scored.append((score, n))
    return [n for score, n in sorted(scored, reverse=True)]
