"""Walking an iteration space over the threads and registers of a CTA.

A laid-out space becomes one unrolled loop for each register digit of its :class:`Fragment`, so that every register
index is a constant after unrolling and no division is left. A space without a layout (symbolic extents) is strided
over by the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.tirx import Bind, BufferStore, For, ForKind, is_buffer_var

from ...errors import InternalError
from ...ir.ops import Axis
from ...ir.visit import rewrite, walk
from ...layout import Fragment
from .build import const, seq, when
from .program import Access
from .storage import Storage

__all__ = ["accesses", "all_of", "axis_values", "expr", "fresh", "is_zero", "strided", "visit"]

#: Loops of more iterations than this stay loops: unrolling them would only grow the code.
UNROLL_LIMIT = 512


def expr(value):
    """A Python number as an expression."""
    return const(value) if isinstance(value, int) and not isinstance(value, bool) else value


def is_zero(value) -> bool:
    """Whether an expression is the constant 0."""
    return int(value) == 0 if isinstance(value, int | tirx.IntImm) else False


def all_of(conditions: Sequence):
    """Conjunction; True where nothing has to be checked."""
    out = True
    for condition in conditions:
        if condition is True or condition is None:
            continue
        out = condition if out is True else tirx.And(out, condition)
    return out


def visit(
    layout: Fragment,
    tx: Var,
    emit: Callable[[object, list], object],
    *,
    vector: int = 1,
    primary: bool = False,
    in_bounds: bool = True,
):
    """One statement for all elements of a laid-out space.

    Parameters
    ----------
    layout : Fragment
        The space over threads and registers.
    tx : Var
        The thread's number.
    emit : callable
        ``emit(register, coords)`` makes the statement of one element, or of ``vector`` elements from there along the
        last dimension.
    vector : int
        Elements a call of ``emit``; the layout's fastest register digit has to run along the last dimension.
    primary : bool
        Only one thread visits each element of a replicated layout.
    in_bounds : bool
        Leave the layout's padding out.
    """
    digits = list(layout.reg_digits)
    fast = 0
    if vector > 1:
        last = digits[-1] if digits else None
        fits = last is not None and last.stride == 1 and last.dim == layout.ndim - 1 and last.weight == 1
        if not fits or last.size % vector or layout.shape[-1] % vector:
            raise InternalError(f"vectors of {vector} elements do not fit {layout}")
        fast = vector
    base = [expr(p) for p in layout.thread_part(tx)]
    limits = layout.bounds() if in_bounds else ()

    def nest(position: int, reg, coords: list):
        if position == len(digits):
            inside = all_of([coords[dim] < extent for dim, extent in limits])
            return when(inside, emit(reg, coords))
        digit = digits[position]
        step = fast if fast and position == len(digits) - 1 else 1
        count = digit.size // step

        def body(value):
            moved = list(coords)
            moved[digit.dim] = moved[digit.dim] + value * (step * digit.weight)
            return nest(position + 1, reg + value * (step * digit.stride), moved)

        if count == 1:
            return body(const(0))
        var = Var(f"r{position}", "int32")
        kind = ForKind.UNROLLED if layout.registers <= UNROLL_LIMIT else ForKind.SERIAL
        return For(var, const(0), const(count), kind, seq([body(var)]))

    return when(layout.is_primary(tx) if primary else layout.active(tx), nest(0, const(0), base))


def strided(extents: Sequence, threads: int, tx: Var, emit: Callable[[list], object]):
    """One statement for all points of a box of any extents: threads take them in turn, row-major.

    Parameters
    ----------
    extents : sequence
        Extents, may be symbolic.
    threads : int
        Threads of the CTA.
    tx : Var
        The thread's number.
    emit : callable
        ``emit(coords)`` makes the statement of one point.
    """
    total = const(1)
    for extent in extents:
        total = total * expr(extent)
    step, linear = Var("step", "int32"), Var("point", "int32")
    coords, rest = [], linear
    for extent in reversed(list(extents)):
        coords.append(tirx.floormod(rest, expr(extent)))
        rest = tirx.floordiv(rest, expr(extent))
    coords.reverse()
    body = seq([Bind(linear, step * threads + tx), when(linear < total, emit(coords))])
    return For(step, const(0), tirx.floordiv(total + (threads - 1), threads), ForKind.SERIAL, body)


def fresh(stmt):
    """The statement with new variables for everything that it binds: a body may be emitted several times."""
    names: dict[Var, Var] = {}

    def renamed(var: Var) -> Var:
        names[var] = Var(var.name, var.ty)
        return names[var]

    def on_bind(node, m):
        value = m.mutate(node.value)
        return Bind(renamed(node.var), value)

    def on_for(node, m):
        start, extent = m.mutate(node.min), m.mutate(node.extent)
        var = renamed(node.loop_var)
        return For(var, start, extent, node.kind, m.mutate(node.body), node.thread_binding, node.annotations)

    return rewrite(stmt, [(Bind, on_bind), (For, on_for), (Var, lambda v, m: names.get(v, v))])


def accesses(storage: Storage, versions: dict, parts: Sequence) -> tuple[list[Access], list[Access]]:
    """Memory shared between threads that statements or expressions read and write.

    Parameters
    ----------
    storage : Storage
        Knows which buffers are shared tiles.
    versions : dict
        Copies of multi-buffered tiles that the operation uses.
    parts : sequence
        Statements and expressions over tile-level buffers; None is skipped.
    """
    reads: dict[Var, Access] = {}
    writes: dict[Var, Access] = {}

    def note(found: dict, buffer: Var) -> None:
        shared = buffer in storage.tiles or str(buffer.ty.storage_scope) in ("global", "")
        if shared and is_buffer_var(buffer) and buffer not in found:
            found[buffer] = Access(buffer, versions.get(buffer))

    def on_call(call) -> None:
        if getattr(call.op, "name", "") == "tirx.call_extern" and str(call.args[0].value).startswith("tile_atomic_"):
            note(writes, call.args[1].args[0].source)

    for part in parts:
        if part is None or isinstance(part, int | float | bool):
            continue
        walk(
            part,
            (TensorLoad, lambda load: note(reads, load.source)),
            (BufferStore, lambda store: note(writes, store.buffer)),
            (Call, on_call),
        )
    return list(reads.values()), list(writes.values())


def axis_values(axes: Sequence[Axis], values: Sequence) -> dict[Var, object]:
    """Substitution of an operation's axes by coordinates, in the axes' own dtypes."""
    out = {}
    for axis, value in zip(axes, values, strict=True):
        dtype = str(axis.var.ty.dtype)
        value = expr(value)
        out[axis.var] = value if dtype == "int32" else tirx.Cast(dtype, value)
    return out
