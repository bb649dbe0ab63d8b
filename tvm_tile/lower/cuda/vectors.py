"""Joining the memory accesses of neighbouring iterations of an element-wise loop to vector accesses.

The rule promises (``tile.vector``) that so many elements along the last axis start aligned. Loads that run along that
axis are made first, the body follows lane by lane on registers, stores come last. Guards that a joined access stands
under are tested at the first and the last lane: they are conjunctions of linear inequalities, so both ends true means
all lanes true; otherwise the lanes run one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.tirx import Bind, BufferStore, Evaluate, For, IfThenElse, SeqStmt, is_buffer_var

from ...ir.visit import mentions, rewrite, substitute, walk
from ...layout import SharedLayout
from ...schedule.decisions import read_vector
from .build import seq, unrolled, when
from .convert import move
from .loops import ElementLoop
from .space import all_of, axis_values, expr, fresh
from .storage import Storage, dtype_bits

__all__ = ["joined_access", "row_vector", "vectorised"]

_COMPARISONS = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_VECTOR_BYTES = 16


@dataclass
class _Joined:
    """A load or store that is made for all lanes at once."""

    buffer: Var
    indices: list
    guards: list
    local: Var | None = None

    def same(self, buffer: Var, indices) -> bool:
        return self.buffer.same_as(buffer) and all(
            tvm_ffi.structural_equal(a, b, map_free_vars=False) for a, b in zip(self.indices, indices, strict=True)
        )


@dataclass
class _Found:
    loads: list[_Joined] = field(default_factory=list)
    stores: list[_Joined] = field(default_factory=list)
    #: not element by element in order: atomics, prints, loops
    other: bool = False


def joined_access(
    storage: Storage, buffer: Var, at: list, local: Var, count: int, load: bool, versions, local_at=0
) -> object:
    """Vector accesses between memory and consecutive elements of a local array.

    Parameters
    ----------
    buffer : Var
        Tile-level buffer (shared or global).
    at : list
        Thread-level indices of the first element.
    local : Var
        Local array of the buffer's dtype.
    count : int
        Elements.
    load : bool
        From memory to the array, else the other way.
    versions : dict
        Copies of multi-buffered tiles.
    local_at : expression
        First element of the array, a multiple of ``count``.
    """
    size = max(1, dtype_bits(str(local.ty.dtype)) // 8)
    step = min(count, _VECTOR_BYTES // size)
    stmts = []
    for first in range(0, count, step):
        indices = [*at[:-1], at[-1] + first] if first else list(at)
        placed = storage.rewrite(tirx.BufferLoad(buffer, [expr(i) for i in indices]), versions=versions)
        memory = tirx.address_of(placed)
        registers = tirx.address_of(tirx.BufferLoad(local, [expr(local_at) + first]))
        stmts.append(move(step * size, registers, memory) if load else move(step * size, memory, registers))
    return seq(stmts)


def row_vector(layout: SharedLayout, wanted: int) -> int:
    """Elements that stay contiguous and aligned in a tile's rows, at columns that are multiples of them."""
    while wanted > 1 and (layout.row_stride % wanted or (layout.span and layout.chunk_elements % wanted)):
        wanted //= 2
    return wanted


def vectorised(storage: Storage, space: ElementLoop, body, finish: Callable):
    """The loop with joined accesses, or None where nothing can be joined.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    space : ElementLoop
        The loop.
    body : Stmt
        Its prepared body.
    finish : callable
        ``finish(statement, primary)`` makes the language's calls device code; ``primary`` says which thread writes
        memory.
    """
    vector = read_vector(space.op.annotations)
    layout = space.layout
    if vector <= 1 or layout is None or space.window is not None or not space.op.axes:
        return None
    last = layout.reg_digits[-1] if layout.reg_digits else None
    if last is None or last.stride != 1 or last.dim != layout.ndim - 1 or last.weight != 1:
        return None
    if last.size % vector or layout.shape[-1] % vector:
        return None
    found = _find(storage, space, body, vector)
    if found.other or not (found.loads or found.stores):
        return None
    return _Vectors(storage, space, body, found, vector, finish).emit()


def _find(storage: Storage, space: ElementLoop, body, vector: int) -> _Found:
    axis = space.op.axes[-1].var
    bound: list[Var] = []
    guards: list = []
    found = _Found()
    loaded: list[Var] = []
    stored: list[Var] = []

    def joinable(buffer: Var, indices) -> bool:
        memory = buffer in storage.tiles or str(buffer.ty.storage_scope) in ("global", "")
        if not memory or any(mentions(i, b) for i in indices for b in bound):
            return False
        if any(not _is_interval(g) or any(mentions(g, b) for b in bound) for g in guards):
            return False
        if buffer in storage.tiles and row_vector(storage.tiles[buffer].layout, vector) < vector:
            return False
        head, tail = list(indices[:-1]), indices[-1]
        return not any(mentions(i, axis) for i in head) and _unit_step(tail, axis) and not _reads_memory(indices)

    def note(into: list[_Joined], buffer: Var, indices) -> None:
        if joinable(buffer, indices) and not any(j.same(buffer, indices) for j in into):
            into.append(_Joined(buffer, list(indices), list(guards)))

    def on_if(stmt, m):
        m.mutate(stmt.condition)
        guards.append(stmt.condition)
        m.mutate(stmt.then_case)
        guards.pop()
        if stmt.else_case is not None:
            guards.append(tirx.Not(stmt.condition))
            m.mutate(stmt.else_case)
            guards.pop()
        return stmt

    def on_call(call, m):
        if getattr(call.op, "name", "") == "prim.if_then_else":
            m.mutate(call.args[0])
            guards.append(call.args[0])
            m.mutate(call.args[1])
            guards[-1] = tirx.Not(call.args[0])
            m.mutate(call.args[2])
            guards.pop()
            return call
        if getattr(call.op, "name", "") in ("tirx.call_extern", "tirx.address_of"):
            found.other = True
        return m.default_mutate(call)

    def on_load(load, m):
        if is_buffer_var(load.source):
            loaded.append(load.source)
            note(found.loads, load.source, load.indices)
        return m.default_mutate(load)

    def on_store(store, m):
        m.mutate(store.value)
        stored.append(store.buffer)
        note(found.stores, store.buffer, store.indices)
        return store

    def on_bind(bind, m):
        m.mutate(bind.value)
        bound.append(bind.var)
        return bind

    def on_other(stmt, m):
        found.other = True
        return stmt

    rewrite(
        body,
        [(IfThenElse, on_if), (Call, on_call), (TensorLoad, on_load), (BufferStore, on_store), (Bind, on_bind),
         (For, on_other), (Evaluate, on_other)],
    )  # fmt: skip
    _drop_hazards(body, found, loaded, stored)
    return found


def _drop_hazards(body, found: _Found, loaded: list[Var], stored: list[Var]) -> None:
    """Keep the order of accesses to one buffer: joined loads come first, joined stores last."""
    if not isinstance(body, SeqStmt) and len(stored) <= 1:
        return  # one store: what it reads is read before

    def twice(buffer: Var) -> bool:
        reads, writes = (sum(buffer.same_as(x) for x in xs) for xs in (loaded, stored))
        return writes > 1 or (writes and reads)

    found.loads = [j for j in found.loads if not twice(j.buffer)]
    found.stores = [j for j in found.stores if not twice(j.buffer)]


def _is_interval(condition) -> bool:
    """Whether a condition that holds at two points of a line holds between them."""
    if isinstance(condition, tirx.And):
        return _is_interval(condition.a) and _is_interval(condition.b)
    if not isinstance(condition, _COMPARISONS) or _reads_memory([condition]):
        return False
    return str(condition.a.ty.dtype).startswith("int")


def _unit_step(index, axis: Var) -> bool:
    difference = tvm.sym.Analyzer().simplify(expr(index) - axis)
    return not mentions(difference, axis)


def _reads_memory(exprs) -> bool:
    found: list = []
    for e in exprs:
        walk(e, (TensorLoad, found.append))
    return bool(found)


class _Vectors:
    def __init__(self, storage, space, body, found: _Found, vector: int, finish: Callable) -> None:
        self.storage, self.space, self.body = storage, space, body
        self.found, self.vector, self.finish = found, vector, finish
        self.linear = _linear_in(space.op.axes[-1].var)
        guarded = [j for j in [*found.loads, *found.stores] if all(self.linear(g) for g in j.guards)]
        self.found.loads = [j for j in found.loads if j in guarded]
        self.found.stores = [j for j in found.stores if j in guarded]
        for joined in guarded:
            joined.local = storage.new_local((vector,), str(joined.buffer.ty.dtype), f"{joined.buffer.name}_lanes")

    def emit(self):
        storage, layout = self.storage, self.space.layout
        replicated = layout.replication > 1
        stores: list = []
        walk(self.body, (BufferStore, lambda n: stores.append(n.buffer)))
        registers = [b for b in stores if b in storage.fragments or b in storage.locals]
        only_memory = not registers
        self.primary = layout.is_primary(storage.tx) if replicated and not only_memory else True
        return self.space.visit(self._group, vector=self.vector, primary=replicated and only_memory)

    def _group(self, reg, values: list):
        space = self.space
        fast = self._fast(reg, values)
        guards = []
        for joined in [*self.found.loads, *self.found.stores]:
            for guard in joined.guards:
                if not any(tvm_ffi.structural_equal(guard, g, map_free_vars=False) for g in guards):
                    guards.append(guard)
        if not guards:
            return fast
        ends = [values, [*values[:-1], values[-1] + (self.vector - 1)]]
        at_ends = all_of([space.place(g, reg, v) for g in guards for v in ends])
        slow = unrolled(self.vector, lambda k: self._lane(self.body, reg + k, [*values[:-1], values[-1] + k]), "lane")
        return IfThenElse(at_ends, fast, slow)

    def _fast(self, reg, values: list):
        stmts = [self._access(j, reg, values, load=True) for j in self.found.loads]
        lane = Var("lane", "int32")
        body = self._on_lanes(lane)
        one = unrolled(
            self.vector, lambda k: self._lane(body, reg + k, [*values[:-1], values[-1] + k], {lane: k}), "lane"
        )
        stmts.append(one)
        stmts += [when(self.primary, self._access(j, reg, values, load=False)) for j in self.found.stores]
        return seq(stmts)

    def _access(self, joined: _Joined, reg, values: list, load: bool):
        space = self.space
        at = [substitute(i, axis_values(space.op.axes, values)) for i in map(expr, joined.indices)]
        return joined_access(self.storage, joined.buffer, at, joined.local, self.vector, load, space.node.versions)

    def _lane(self, body, reg, values: list, extra: dict | None = None):
        placed = self.space.place(fresh(body), reg, values)
        if extra:
            placed = substitute(placed, extra)
        return self.finish(placed, self.primary)

    def _on_lanes(self, lane: Var):
        """The body with joined accesses on local arrays and the guards of joined accesses taken as true."""
        guards = [g for j in [*self.found.loads, *self.found.stores] for g in j.guards]

        def known(condition) -> bool:
            return any(tvm_ffi.structural_equal(condition, g, map_free_vars=False) for g in guards)

        def on_if(stmt, m):
            return m.mutate(stmt.then_case) if known(stmt.condition) else m.default_mutate(stmt)

        def on_call(call, m):
            if getattr(call.op, "name", "") == "prim.if_then_else" and known(call.args[0]):
                return m.mutate(call.args[1])
            return m.default_mutate(call)

        def on_load(load, m):
            for joined in self.found.loads:
                if is_buffer_var(load.source) and joined.same(load.source, load.indices):
                    return tirx.BufferLoad(joined.local, [lane])
            return m.default_mutate(load)

        def on_store(store, m):
            value = m.mutate(store.value)
            for joined in self.found.stores:
                if joined.same(store.buffer, store.indices):
                    return BufferStore(joined.local, value, [lane])
            return BufferStore(store.buffer, value, [m.mutate(i) for i in store.indices])

        return rewrite(
            self.body, [(IfThenElse, on_if), (Call, on_call), (TensorLoad, on_load), (BufferStore, on_store)]
        )


def _linear_in(axis: Var):
    """Whether every comparison of a condition is linear in an axis (so that a conjunction is an interval)."""

    def check(condition) -> bool:
        if isinstance(condition, tirx.And):
            return check(condition.a) and check(condition.b)
        return len(tvm.sym.detect_linear_equation(condition.a - condition.b, [axis])) > 0

    return check
