"""Independence of the iterations of a ``T.Parallel``: a search for two iterations that meet at one element.

Indices of the usual form (each axis alone in one dimension) are independent by inspection. Everything else is evaluated
at every point of the iteration space, with outer variables at a few sample values: two iterations that store the same
element, or one that reads what another one stores, are the counterexample that the error shows. Indices that themselves
read memory (scatter) are the author's responsibility.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx import Bind, BufferStore, For, IfThenElse, is_buffer_var

from ..errors import SourceLocation, TileShapeError, TileSyntaxError
from .concrete import Opaque, evaluate
from .ops import ParallelOp
from .visit import substitute, walk

__all__ = ["check_independent"]

MAX_POINTS = 1 << 17  # points of the iteration space that are looked at; larger spaces are cropped
SYMBOLIC_EXTENT = 13  # stands for an extent that is not known
OUTER_SAMPLES = (0, 1, 5)  # values of outer variables


@dataclass
class _Access:
    """One load or store: where, under which conditions, inside which inner loops, and the nodes' order."""

    buffer: Var
    indices: list
    conditions: list
    loops: list[For]
    order: int


class _Accesses:
    """Loads and stores of one iteration in program order; bound values are substituted where they read no memory."""

    def __init__(self, body) -> None:
        self.loads: list[_Access] = []
        self.stores: list[_Access] = []
        self.atomics: list[_Access] = []
        self.values: dict[Var, object] = {}
        self.order = 0
        self._walk(body, [], [])

    def _walk(self, stmt, conditions: list, loops: list) -> None:
        if isinstance(stmt, IfThenElse):
            self._expression(stmt.condition, conditions, loops)
            condition = substitute(stmt.condition, self.values)
            self._walk(stmt.then_case, [*conditions, condition], loops)
            if stmt.else_case is not None:
                self._walk(stmt.else_case, [*conditions, tirx.Not(condition)], loops)
        elif isinstance(stmt, BufferStore):
            for part in (stmt.value, *stmt.indices):
                self._expression(part, conditions, loops)
            self._add(self.stores, stmt.buffer, stmt.indices, conditions, loops)
        elif isinstance(stmt, For):
            self._expression(stmt.min, conditions, loops)
            self._expression(stmt.extent, conditions, loops)
            self._walk(stmt.body, conditions, [*loops, stmt])
        elif isinstance(stmt, Bind):
            self._expression(stmt.value, conditions, loops)
            if not _loads_in(stmt.value):
                self.values[stmt.var] = substitute(stmt.value, self.values)
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self._walk(part, conditions, loops)
        else:
            self._expression(stmt, conditions, loops)

    def _expression(self, node, conditions, loops) -> None:
        addressed: list = []

        def on_call(call):
            if getattr(call.op, "name", "") == "tirx.address_of":
                addressed.append(call.args[0])

        walk(node, (tvm.ir.Call, on_call))
        for load in _loads_in(node):
            atomic = any(load.same_as(a) for a in addressed)
            target = self.atomics if atomic else self.loads
            self._add(target, load.source, load.indices, conditions, loops)

    def _add(self, found: list, buffer, indices, conditions, loops) -> None:
        self.order += 1
        found.append(
            _Access(buffer, [substitute(i, self.values) for i in indices], list(conditions), loops, self.order)
        )


def _loads_in(node) -> list[TensorLoad]:
    found: list[TensorLoad] = []
    walk(node, (TensorLoad, lambda load: found.append(load) if is_buffer_var(load.source) else None))
    return found


def check_independent(op: ParallelOp, roots: dict[Var, Var]) -> None:
    """Check one ``T.Parallel``.

    Parameters
    ----------
    op : ParallelOp
        The operation.
    roots : dict
        Alias -> the buffer that owns its memory.

    Raises
    ------
    TileShapeError
        When two iterations store one element, or one reads what another one stores.
    TileSyntaxError
        When the iterations write a variable of the whole CTA, or use per-thread memory before they write it.
    """
    accesses = _Accesses(op.body)
    for store in accesses.stores:
        if str(store.buffer.ty.storage_scope) == "local.var":
            raise TileSyntaxError(
                f"{store.buffer.name} is one value for the whole CTA; the iterations of T.Parallel would race for it",
                op.location,
                "reduce a tile (T.reduce_sum, T.any_of) and assign the result outside of T.Parallel",
            )
    wide = [axis for axis in op.axes if axis.size != 1]
    shared = [s for s in accesses.stores if str(s.buffer.ty.storage_scope) != "local"]
    for n, store in enumerate(shared):
        for other in shared[n:]:
            if _root(store, roots).same_as(_root(other, roots)):
                _check_pair(op, wide, store, other, roots)
        for load in accesses.loads:
            if _root(store, roots).same_as(_root(load, roots)):
                _check_pair(op, wide, store, load, roots, reads=True)
    _check_scratch(op, accesses)


def _root(access: _Access, roots) -> Var:
    return roots.get(access.buffer, access.buffer)


def _text(access: _Access) -> str:
    return f"{access.buffer.name}[{', '.join(str(i) for i in access.indices)}]"


def _separate(access: _Access, axes) -> bool:
    """Each axis is, alone and unscaled, the varying part of one dimension: no two iterations meet."""
    left = list(axes)
    for index in access.indices:
        if isinstance(index, Var) and any(index.same_as(a.var) for a in left):
            left = [a for a in left if not a.var.same_as(index)]
    return not left


def _same_indices(a: _Access, b: _Access) -> bool:
    return a.buffer.same_as(b.buffer) and all(
        tvm_ffi.structural_equal(tirx.convert(x), tirx.convert(y)) if not isinstance(x, Var) else x.same_as(y)
        for x, y in zip(a.indices, b.indices, strict=True)
    )


def _check_pair(op: ParallelOp, axes, store: _Access, other: _Access, roots, reads: bool = False) -> None:
    if _same_indices(store, other) and _separate(store, axes):
        return
    if not store.buffer.same_as(other.buffer):
        views = f"{store.buffer.name} and {other.buffer.name} are views of one buffer"
        raise TileShapeError(
            f"T.Parallel stores {_text(store)} and {'reads' if reads else 'stores'} {_text(other)}, but {views}",
            op.location,
            "use one of the views only, or T.copy the tile to another buffer before the loop",
        )
    for sample in OUTER_SAMPLES:
        met = _meeting(op, axes, store, other, sample)
        if met is not None:
            _refuse(op, store, other, met, reads)


def _refuse(op: ParallelOp, store: _Access, other: _Access, met, reads: bool) -> None:
    first, second, element = met
    where = f"iterations {first} and {second} meet at {store.buffer.name}{list(element)}"
    if reads:
        raise TileShapeError(
            f"T.Parallel reads {_text(other)} and stores {_text(store)}: {where}, "
            "one iteration would read what another one writes",
            op.location,
            "read from a copy of the tile: T.copy it to another buffer before the loop",
        )
    raise TileShapeError(
        f"T.Parallel stores {_text(store)}{'' if other is store else ' and ' + _text(other)} in several iterations: "
        f"{where}, and the last one to arrive would win",
        op.location,
        "index the target with every axis, reduce with T.reduce_sum / T.reduce_max, or use T.atomic_add",
    )


def _points(op: ParallelOp, axes, access: _Access, outer: int) -> tuple[dict[Var, np.ndarray], list[np.ndarray]]:
    """Values of every variable at every point: axes first, then the access's inner loops."""
    lows, extents = [0] * len(axes), [axis.size or SYMBOLIC_EXTENT for axis in axes]
    variables = [axis.var for axis in axes]
    for loop in access.loops:
        low, count = (int(x.value) if isinstance(x, tirx.IntImm) else None for x in (loop.min, loop.extent))
        variables.append(loop.loop_var)
        lows.append(low or 0)
        extents.append(SYMBOLIC_EXTENT if count is None else max(count, 0))
    while np.prod(extents, dtype=np.int64) > MAX_POINTS:
        largest = int(np.argmax(extents))
        extents[largest] = (extents[largest] + 1) // 2
    grids = [g.reshape(-1) for g in np.meshgrid(*[np.arange(e) for e in extents], indexing="ij")] if extents else []
    values = {v: g + low for v, g, low in zip(variables, grids, lows, strict=True)}
    for axis in op.axes:
        values.setdefault(axis.var, np.asarray(0))
    for expr in (*access.indices, *access.conditions):
        walk(expr, (Var, lambda v: values.setdefault(v, np.asarray(outer)) if _is_index(v) else None))
    return values, grids[: len(axes)]


def _is_index(var: Var) -> bool:
    return not is_buffer_var(var) and str(var.ty.dtype).startswith(("int", "uint"))


def _elements(op: ParallelOp, axes, access: _Access, outer: int):
    """(iterations, elements): one row for each point at which the access happens."""
    values, grids = _points(op, axes, access, outer)
    count = len(grids[0]) if grids else int(np.prod([len(np.atleast_1d(v)) for v in values.values()] or [1]))
    columns = [np.broadcast_to(evaluate(index, values), (count,)) for index in access.indices]
    active = np.ones(count, bool)
    for condition in access.conditions:
        try:
            active &= np.broadcast_to(evaluate(condition, values), (count,)).astype(bool)
        except Opaque:
            pass  # decided at run time: it may hold
    iterations = np.stack(grids, axis=1) if grids else np.zeros((count, 0), np.int64)
    return iterations[active], np.stack(columns, axis=1)[active]


def _meeting(op: ParallelOp, axes, store: _Access, other: _Access, outer: int):
    """Two different iterations that touch one element, with that element; None where there are none."""
    try:
        first, stored = _elements(op, axes, store, outer)
        second, touched = _elements(op, axes, other, outer)
    except Opaque:
        return None
    if not len(stored) or not len(touched):
        return None
    both = np.concatenate([stored, touched])
    _, keys = np.unique(both, axis=0, return_inverse=True)
    keys = keys.reshape(-1)
    iterations = np.concatenate([first, second])
    order = np.argsort(keys, kind="stable")
    keys, iterations, is_store = keys[order], iterations[order], order < len(stored)
    # one representative store for each element, compared with everything that touches the element
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    has_store = is_store[starts]  # the stable sort puts stores first
    representative = np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    differs = np.any(iterations != iterations[representative], axis=1) & np.repeat(
        has_store, np.diff(np.r_[starts, len(keys)])
    )
    hits = np.flatnonzero(differs)
    if not len(hits):
        return None
    hit = hits[0]
    row = order[hit]
    return (
        tuple(int(x) for x in iterations[representative[hit]]),
        tuple(int(x) for x in iterations[hit]),
        tuple(int(x) for x in both[row]),
    )


# ---- per-thread memory


def _check_scratch(op: ParallelOp, accesses: _Accesses) -> None:
    """Per-thread memory that an iteration writes is scratch: each iteration writes an element before it reads it."""
    written = {s.buffer for s in accesses.stores if str(s.buffer.ty.storage_scope) == "local"}
    for load in accesses.loads:
        if load.buffer not in written:
            continue
        if not any(_covers(op, store, load) for store in accesses.stores if store.buffer.same_as(load.buffer)):
            raise TileSyntaxError(
                f"T.Parallel reads {_text(load)} before the same iteration has written it: per-thread memory does "
                f"not carry "
                "values from one iteration to another",
                op.location,
                f"write {load.buffer.name} first in every iteration, without a condition around it",
            )


def _covers(op: ParallelOp, store: _Access, load: _Access) -> bool:
    """Whether an earlier, unconditional store of the same iteration has written what the load reads."""
    inside = store.conditions == [] or all(any(c.same_as(d) for d in load.conditions) for c in store.conditions)
    if store.order > load.order or not inside:
        return False
    try:
        _, stored = _elements(op, [], store, 0)
        _, loaded = _elements(op, [], load, 0)
    except Opaque:
        return _same_indices(store, load)
    known = {tuple(row) for row in stored.tolist()}
    return all(tuple(row) in known for row in loaded.tolist())


def scratch_of(op: ParallelOp) -> list[tuple[Var, SourceLocation | None]]:
    """Per-thread buffers that the iterations of a ``T.Parallel`` write."""
    out: list[tuple[Var, SourceLocation | None]] = []
    for store in _Accesses(op.body).stores:
        if str(store.buffer.ty.storage_scope) == "local" and all(not store.buffer.same_as(b) for b, _ in out):
            out.append((store.buffer, op.location))
    return out


def reads_of(op) -> list[Var]:
    """Buffers that an operation's body reads."""
    return [access.buffer for access in _Accesses(op.body).loads]
