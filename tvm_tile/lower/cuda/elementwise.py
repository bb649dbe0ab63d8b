"""Element-wise operations: ``T.Parallel``, ``T.fill``, tile prints, and statements that run once a CTA."""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import Call, StringImm, TensorLoad, Var
from tvm.script import tirx as T
from tvm.tirx import Bind, BufferStore, Evaluate, For, SeqStmt, is_buffer_var

from ...errors import InternalError, TileTypeError
from ...ir.factor import factored
from ...ir.ops import FillOp, TileOp
from ...ir.visit import rewrite, substitute, walk
from ...layout import Fragment, choose
from ...schedule.decisions import read_convert, read_factored, read_unit_factors
from .atomics import is_atomic, lower_atomic
from .build import const, when
from .convert import legalise
from .debug import lower_assert, lower_print
from .loops import ElementLoop
from .program import Access, MicroNode, OpNode
from .space import accesses, expr, fresh, visit
from .storage import SharedTile, Storage, dtype_bits
from .vectors import joined_access, row_vector, vectorised

__all__ = [
    "Effects", "fragment_to_scratch", "lower_elementwise",
    "lower_every_thread", "lower_fill", "lower_once",
    "scratch_to_fragment", "uniform_atomic",
]  # fmt: skip


class Effects:
    """Rewrites the calls of the language in thread-level code and keeps side effects to one thread an element.

    Parameters
    ----------
    hw : GPU
        The target machine.
    primary : expression or True
        Which thread writes memory where several visit an element.
    op : TileOp or None
        For errors.
    """

    def __init__(self, hw, primary, op: TileOp | None) -> None:
        self.hw, self.primary, self.op = hw, primary, op

    def run(self, stmt):
        """The statement with device calls in place of ``tile_*`` externs."""
        return legalise(
            rewrite(
                stmt, [(Evaluate, self._evaluate), (Bind, self._bind), (BufferStore, self._store), (Call, self._call)]
            ),
            self.hw,
        )

    def _store(self, store, m):
        value, indices = m.mutate(store.value), [m.mutate(i) for i in store.indices]
        made = BufferStore(store.buffer, value, indices)
        return when(self.primary, made) if _is_memory(store.buffer) else made

    def _bind(self, bind, m):
        if is_atomic(bind.value) and self.primary is not True:
            raise TileTypeError(
                "an atomic update whose previous value is used runs in a loop whose values several threads share",
                None if self.op is None else self.op.location,
                "run it over at least as many elements as there are threads, without fragments that threads share",
            )
        return Bind(bind.var, m.mutate(bind.value))

    def _evaluate(self, stmt, m):
        call = stmt.value
        name = str(call.args[0].value) if _is_extern(call) else ""
        if name == "tile_print":
            return when(self.primary, lower_print(_with_args(call, m), self.hw))
        if name == "tile_assert":
            return when(self.primary, lower_assert(_with_args(call, m)))
        if is_atomic(call):
            return when(self.primary, Evaluate(m.mutate(call)))
        return m.default_mutate(stmt)

    def _call(self, call, m):
        if is_atomic(call):
            element = m.mutate(call.args[1].args[0])
            return lower_atomic(call, tirx.address_of(element), m.mutate(call.args[2]), self.hw)
        if _is_extern(call) and str(call.args[0].value).startswith("tile_"):
            raise InternalError(f"{call.args[0].value} as a value")
        return m.default_mutate(call)


def _is_extern(call) -> bool:
    return isinstance(call, Call) and getattr(call.op, "name", "") == "tirx.call_extern"


def _with_args(call: Call, m) -> Call:
    return tirx.call_extern(
        "int32", *[call.args[0].value, *[a if isinstance(a, StringImm) else m.mutate(a) for a in call.args[1:]]]
    )


def _is_memory(buffer: Var) -> bool:
    scope = str(buffer.ty.storage_scope)
    return scope in ("global", "") or scope.startswith("shared")


# ---- fragments through shared memory


def fragment_to_scratch(storage: Storage, buffer: Var, name: str | None = None) -> tuple[SharedTile, MicroNode]:
    """A shared copy of a whole fragment, and the step that makes it.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    buffer : Var
        The fragment.
    name : str, optional
        Name of the copy.
    """
    held = storage.fragments[buffer]
    shape = held.layout.shape or (1,)
    layout = choose(shape, dtype_bits(held.dtype)).layout
    scratch = storage.new_scratch(shape, held.dtype, name or f"{buffer.name}_shared", layout)

    def emit():
        return _between(storage, buffer, scratch, load=False)

    return scratch, MicroNode([], [Access(scratch.buffer)], emit, f"{buffer.name} to shared scratch")


def scratch_to_fragment(storage: Storage, scratch: SharedTile, buffer: Var) -> MicroNode:
    """The step that reads a whole fragment back from a shared copy (all its owners)."""

    def emit():
        return _between(storage, buffer, scratch, load=True)

    return MicroNode([Access(scratch.buffer)], [], emit, f"{buffer.name} from shared scratch")


def _between(storage: Storage, buffer: Var, scratch: SharedTile, load: bool):
    """A fragment to or from its shared copy, in vectors as wide as its registers and the tile's rows allow."""
    held = storage.fragments[buffer]
    bits = dtype_bits(held.dtype)
    vector = 1
    if held.layout.ndim and held.layout.shape[-1] % (vector := held.layout.vector_width(-1, bits)):
        vector = 1
    vector = row_vector(scratch.layout, vector)

    def one(reg, coords):
        at = coords or [const(0)]
        if vector > 1:
            return joined_access(storage, scratch.buffer, at, held.local, vector, load, {}, reg)
        view, element = storage.view(scratch), storage.element(scratch, at)
        if load:
            return BufferStore(held.local, view[element], [reg])
        return BufferStore(view, held.local[reg], [element])

    return visit(held.layout, storage.tx, one, vector=vector, primary=not load)


def fragments_of(storage: Storage, body) -> tuple[list[Var], list[Var]]:
    """Fragments that a body loads and stores."""
    loads: list[Var] = []
    stores: list[Var] = []

    def note(found: list, buffer: Var) -> None:
        if buffer in storage.fragments and all(not buffer.same_as(f) for f in found):
            found.append(buffer)

    walk(body, (TensorLoad, lambda n: note(loads, n.source)), (BufferStore, lambda n: note(stores, n.buffer)))
    return loads, stores


def redirect(body, mapping: dict[Var, Var]):
    """The body with accesses of some buffers going to others of the same shape."""
    if not mapping:
        return body

    def on_load(load, m):
        indices = [m.mutate(i) for i in load.indices] if is_buffer_var(load.source) else None
        if indices is None:
            return m.default_mutate(load)
        return tirx.BufferLoad(mapping.get(load.source, load.source), indices)

    def on_store(store, m):
        return BufferStore(
            mapping.get(store.buffer, store.buffer), m.mutate(store.value), [m.mutate(i) for i in store.indices]
        )

    return rewrite(body, [(TensorLoad, on_load), (BufferStore, on_store)])


# ---- operations


def lower_elementwise(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of ``T.Parallel``, ``T.fill`` or a print of a tile.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        The operation with its decisions.
    hw : GPU
        The target machine.
    """
    op = node.op
    if not op.axes:
        return lower_once(storage, node, hw)
    space = ElementLoop(storage, node)
    body = space.prepare(fresh(factored(op.body) if read_factored(op.annotations) else op.body))
    before, body, after = _communicate(storage, space, body, set(read_convert(op.annotations)), hw)
    reads, writes = accesses(storage, node.versions, [body, *[a.extent for a in op.axes]])

    factors = read_unit_factors(op.annotations)
    if before:  # what passes through shared memory is not at hand for a vote
        factors = None

    def emit():
        code = emit_body(storage, space, body, hw)
        return code if factors is None else _unless_ones(storage, factors, code)

    return [*before, MicroNode(reads, writes, emit, f"{_kind(op)} {op.name}"), *after]


def _unless_ones(storage: Storage, name: str, code):
    """A multiplication by a fragment's registers, which a warp skips where they all are one."""
    held = next(f for b, f in storage.fragments.items() if b.name == name)
    one = tirx.const(1, held.dtype)
    others = [tirx.NE(held.local[const(n)], one) for n in range(held.layout.registers)]
    some = tirx.Cast("int32", functools.reduce(tirx.Or, others))
    return when(tirx.NE(T.cuda.any_sync(T.uint32(0xFFFFFFFF), some), const(0)), code)


def _kind(op: TileOp) -> str:
    return type(op).__name__.removesuffix("Op").lower()


def _communicate(storage: Storage, space: ElementLoop, body, names: set[str], hw):
    """(steps before, body, steps after): fragments that are not at hand pass through shared memory."""
    away: dict[Var, Var] = {}
    loads, stores = fragments_of(storage, body)

    def check(buffer: Var, indices) -> None:
        if buffer in storage.fragments and (buffer.name in names or not space.at_hand(buffer, indices)):
            away[buffer] = None

    walk(body, (TensorLoad, lambda n: check(n.source, n.indices)), (BufferStore, lambda n: check(n.buffer, n.indices)))
    before: list[MicroNode] = []
    after: list[MicroNode] = []
    for buffer in away:
        scratch, step = fragment_to_scratch(storage, buffer)
        away[buffer] = scratch.buffer
        before.append(step)
        if any(buffer.same_as(s) for s in stores):
            after.append(scratch_to_fragment(storage, scratch, buffer))
    return before, redirect(body, away), after


def emit_body(storage: Storage, space: ElementLoop, body, hw):
    """Thread-level code of a prepared element-wise body."""
    layout = space.layout
    split = vectorised(storage, space, body, lambda stmt, primary: Effects(hw, primary, space.op).run(stmt))
    if split is not None:
        return split
    memory_only = not _writes_registers(storage, body)
    replicated = layout is not None and layout.replication > 1
    effects = Effects(hw, True if memory_only or not replicated else layout.is_primary(storage.tx), space.op)
    return space.visit(
        lambda reg, values: effects.run(space.place(body, reg, values)),
        primary=memory_only and replicated,
    )


def _writes_registers(storage: Storage, body) -> bool:
    """Whether every owner of an element has to run the body, not only one."""
    found: list = []
    walk(body, (BufferStore, lambda n: None if _is_memory(n.buffer) or n.buffer in storage.tiles else found.append(n)))
    return bool(found)


def lower_once(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of statements that run once a CTA: memory and effects by thread 0, registers by every owner.

    The previous value of an atomic update reaches all threads through shared memory.
    """
    op = node.op
    steps: list[MicroNode] = []
    for stmt in _flat(fresh(op.body)):
        steps += _once(storage, node, stmt, hw)
    return steps


def _flat(stmt) -> list:
    return [s for part in stmt.seq for s in _flat(part)] if isinstance(stmt, SeqStmt) else [stmt]


def _once(storage: Storage, node: OpNode, stmt, hw) -> list[MicroNode]:
    op = node.op
    if isinstance(stmt, Bind) and has_atomic(stmt.value):
        return uniform_atomic(storage, stmt, hw, node)
    loads, stores = fragments_of(storage, stmt)
    element = isinstance(stmt, BufferStore) and stmt.buffer in storage.fragments
    if stores and not element:
        raise InternalError(
            f"a statement outside of T.Parallel stores to fragment {stores[0].name} in a branch", op.location
        )
    mapping: dict[Var, Var] = {}
    before: list[MicroNode] = []
    for buffer in loads:
        scratch, step = fragment_to_scratch(storage, buffer)
        mapping[buffer] = scratch.buffer
        before.append(step)
    if element:
        stmt = BufferStore(stmt.buffer, redirect(stmt.value, mapping), [redirect(i, mapping) for i in stmt.indices])
        reads, _ = accesses(storage, node.versions, [stmt.value, *stmt.indices])
        return [*before, MicroNode(reads, [], lambda: _store_element(storage, node, stmt, hw), f"once {op.name}")]
    stmt = redirect(stmt, mapping)
    reads, writes = accesses(storage, node.versions, [stmt])
    effects = Effects(hw, tirx.EQ(storage.tx, const(0)), op)

    def emit():
        return effects.run(storage.rewrite(stmt, versions=node.versions))

    return [*before, MicroNode(reads, writes, emit, f"once {op.name}")]


def has_atomic(value) -> bool:
    found: list = []
    walk(value, (Call, lambda c: found.append(c) if is_atomic(c) else None))
    return bool(found)


def uniform_atomic(storage: Storage, bind: Bind, hw, node: OpNode | None = None) -> list[MicroNode]:
    """``prev = atomic(...)`` once a CTA: thread 0 updates, all threads get the value from shared memory.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    bind : Bind
        The statement.
    hw : GPU
        The target machine.
    node : OpNode, optional
        The operation the statement belongs to, if any.
    """
    dtype = str(bind.value.ty.dtype)
    versions = {} if node is None else node.versions
    scratch = storage.new_scratch((1,), dtype, f"{bind.var.name}_shared")
    reads, writes = accesses(storage, versions, [bind.value])
    effects = Effects(hw, True, None if node is None else node.op)

    def update():
        value = storage.rewrite(bind.value, versions=versions)
        store = effects.run(BufferStore(storage.view(scratch), value, [storage.element(scratch, [const(0)])]))
        return when(tirx.EQ(storage.tx, const(0)), store)

    def read():
        return Bind(bind.var, storage.view(scratch)[storage.element(scratch, [const(0)])])

    return [
        MicroNode(reads, [*writes, Access(scratch.buffer)], update, f"atomic for {bind.var.name}"),
        MicroNode([Access(scratch.buffer)], [], read, f"{bind.var.name} for all threads"),
    ]


def _store_element(storage: Storage, node: OpNode, store: BufferStore, hw):
    """One element of a fragment, set by its owners."""
    held = storage.fragments[store.buffer]
    coords = [storage.rewrite(expr(i), versions=node.versions) for i in store.indices]
    value = legalise(storage.rewrite(store.value, versions=node.versions), hw)
    made = BufferStore(held.local, value, [held.layout.register_of(coords)])
    return when(_owns(held.layout, storage.tx, coords), made)


def _owns(layout: Fragment, tx: Var, coords: list):
    """Whether a thread owns the element at ``coords``."""
    conditions = [] if layout.active(tx) is True else [layout.active(tx)]
    for digit in layout.thread_digits:
        extent = layout.padded_shape[digit.dim]
        here = tirx.floormod(tirx.floordiv(tx, const(digit.stride)), const(digit.size))
        wanted = tirx.floordiv(coords[digit.dim], const(digit.weight))
        if digit.weight * digit.size < extent:
            wanted = tirx.floormod(wanted, const(digit.size))
        conditions.append(tirx.EQ(here, wanted))
    out = True
    for condition in conditions:
        out = condition if out is True else tirx.And(out, condition)
    return out


def lower_fill(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of ``T.fill``: registers, shared or global memory, or a per-thread array."""
    op: FillOp = node.op
    if op.dst.buffer in storage.locals:
        return lower_every_thread(storage, node, hw)
    return lower_elementwise(storage, node, hw)


def lower_every_thread(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of a fill of, or a copy to, per-thread memory: every thread does all of it.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        The operation; its body stores to a per-thread array.
    hw : GPU
        The target machine.
    """
    op = node.op
    body = fresh(op.body)
    mapping: dict[Var, Var] = {}
    before: list[MicroNode] = []
    for buffer in fragments_of(storage, body)[0]:
        scratch, step = fragment_to_scratch(storage, buffer)
        mapping[buffer] = scratch.buffer
        before.append(step)
    body = redirect(body, mapping)
    reads, _ = accesses(storage, node.versions, [body])

    def emit():
        loops = [Var(axis.var.name, axis.var.ty) for axis in op.axes]
        stmt = substitute(body, {a.var: v for a, v in zip(op.axes, loops, strict=True)})
        stmt = legalise(storage.rewrite(stmt, versions=node.versions), hw)
        for var, axis in reversed(list(zip(loops, op.axes, strict=True))):
            stmt = For(var, tirx.const(0, var.ty.dtype), expr(axis.extent), tirx.ForKind.UNROLLED, stmt)
        return stmt

    return [*before, MicroNode(reads, [], emit, f"{_kind(op)} {op.name}")]
