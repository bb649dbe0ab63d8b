"""The loop of an element-wise operation, as its decisions lay it out: layouts, slices of fragments, symbolic extents.

An operation's body speaks of its axes. The loop's layout covers either these axes, or (``tile.window``) the
dimensions of a fragment of which the operation uses a slice; :class:`ElementLoop` turns a body over axes into
thread-level code for one register.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx import BufferStore, For, ForKind, is_buffer_var

from ...errors import InternalError
from ...ir.ops import TileOp
from ...ir.visit import mentions, rewrite, substitute, walk
from ...layout import Fragment
from ...schedule.decisions import read_chunks, read_loop, read_window
from .build import const, seq, when
from .program import OpNode
from .space import all_of, axis_values, expr, strided, visit
from .storage import Storage

__all__ = ["ElementLoop"]


class ElementLoop:
    """Visits the iteration space of an operation.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        The operation with its decisions (``tile.loop``, ``tile.window``, ``tile.chunks``).
    layout : Fragment, optional
        Layout over the axes, instead of the annotated one.
    window : (buffer, mins, axes), optional
        The slice that the layout's dimensions belong to, instead of the annotated one.

    Attributes
    ----------
    layout : Fragment or None
        None for a space of symbolic extents without a layout: the threads stride over it.
    dims : list of Var
        One variable a dimension of ``layout``; fragment indices are expressed in them.
    """

    def __init__(self, storage: Storage, node: OpNode, layout: Fragment | None = None, window=None) -> None:
        self.storage, self.node, self.op = storage, node, node.op
        notes = self.op.annotations
        self.layout = layout if layout is not None else read_loop(notes)
        self.chunks = read_chunks(notes) if layout is None else []
        if window is None and layout is None and read_window(notes) is not None:
            window = _window(self.op, read_window(notes))
        self.window = window
        self.analyzer = tvm.sym.Analyzer()
        if window is None:
            self.dims = [axis.var for axis in self.op.axes]
            if self.layout is not None and self.layout.ndim != len(self.dims):
                raise InternalError(f"a loop over {len(self.dims)} axes laid out as {self.layout}", self.op.location)
        else:
            self.dims = [Var(f"d{n}", "int32") for n in range(self.layout.ndim)]

    # ---- visiting

    def visit(
        self, emit: Callable[[object, list], object], vector: int = 1, primary: bool = False, in_bounds: bool = True
    ):
        """One statement for the whole space.

        Parameters
        ----------
        emit : callable
            ``emit(register, axis values)`` makes the statement of one element (or of ``vector`` elements).
        vector : int
            Elements a call of ``emit``, along the last axis.
        primary : bool
            Only one thread visits each element of a replicated layout.
        in_bounds : bool
            Leave padding out; what lies outside of a window is left out in any case.
        """
        storage, axes = self.storage, self.op.axes
        if self.layout is None:
            if any(self._symbolic(a.extent) for a in axes):
                return strided(
                    [storage.rewrite(expr(a.extent)) for a in axes],
                    storage.threads,
                    storage.tx,
                    lambda coords: emit(None, coords),
                )
            raise InternalError(f"operation {self.op.name} has no layout of its loop", self.op.location)
        if self.chunks:
            return self._chunked(emit, vector, primary)

        def one(reg, coords):
            values, conditions = self._axis_values(coords)
            return when(all_of(conditions), emit(reg, values))

        return visit(self.layout, storage.tx, one, vector=vector, primary=primary, in_bounds=in_bounds)

    def _chunked(self, emit, vector: int, primary: bool):
        """Symbolic axes: the layout covers a chunk, serial loops repeat it."""
        storage, axes, layout = self.storage, self.op.axes, self.layout
        starts = {n: Var(f"chunk{n}", "int32") for n in self.chunks}
        extents = {n: storage.rewrite(expr(axes[n].extent)) for n in self.chunks}

        def one(reg, coords):
            values, limits = list(coords), []
            for n in self.chunks:
                extent = extents[n] if str(extents[n].ty.dtype) == "int32" else tirx.Cast("int32", extents[n])
                values[n] = starts[n] * layout.shape[n] + coords[n]
                limits.append(values[n] + (vector - 1 if n == len(axes) - 1 else 0) < extent)
            return when(all_of(limits), emit(reg, values))

        stmt = visit(layout, storage.tx, one, vector=vector, primary=primary)
        for n in reversed(self.chunks):
            extent = extents[n] if str(extents[n].ty.dtype) == "int32" else tirx.Cast("int32", extents[n])
            count = tirx.floordiv(extent + (layout.shape[n] - 1), const(layout.shape[n]))
            stmt = For(starts[n], const(0), count, ForKind.SERIAL, seq([stmt]))
        return stmt

    def _axis_values(self, coords: list) -> tuple[list, list]:
        """(value of each axis, conditions to be inside the window) at coordinates of the layout."""
        if self.window is None:
            return list(coords), []
        _, mins, which = self.window
        values: list = [None] * len(self.op.axes)
        conditions = []
        for dim, (low, axis) in enumerate(zip(mins, which, strict=True)):
            low = self.storage.rewrite(expr(low))
            if axis is None:
                if self.layout.shape[dim] > 1:
                    conditions.append(coords[dim] == low)
                continue
            extent = self.op.axes[axis].extent
            if isinstance(low, tirx.IntImm) and int(low) == 0 and int(extent) == self.layout.shape[dim]:
                values[axis] = coords[dim]
                continue
            values[axis] = self.analyzer.simplify(coords[dim] - low)
            if not (isinstance(low, tirx.IntImm) and int(low) == 0):
                conditions.append(coords[dim] >= low)
            conditions.append(coords[dim] < self.analyzer.simplify(low + expr(extent)))
        if any(v is None for v in values):
            raise InternalError(f"the window of {self.op.name} does not give all axes", self.op.location)
        return values, conditions

    @staticmethod
    def _symbolic(extent) -> bool:
        return not isinstance(extent, int | tirx.IntImm)

    # ---- bodies

    def prepare(self, body):
        """The body with fragment indices in terms of :attr:`dims`; the rest stays over axes."""
        if self.window is None:
            return body
        at = [self._window_index(dim) for dim in range(self.layout.ndim)]

        def replaced(buffer, indices):
            return [self._match(index, at) for index in indices] if buffer in self.storage.fragments else None

        def on_load(load, m):
            if not is_buffer_var(load.source):
                return m.default_mutate(load)
            indices = replaced(load.source, load.indices) or [m.mutate(i) for i in load.indices]
            return tirx.BufferLoad(load.source, indices)

        def on_store(store, m):
            indices = replaced(store.buffer, store.indices) or [m.mutate(i) for i in store.indices]
            return BufferStore(store.buffer, m.mutate(store.value), indices)

        return rewrite(body, [(TensorLoad, on_load), (BufferStore, on_store)])

    def _window_index(self, dim: int):
        _, mins, which = self.window
        return mins[dim] if which[dim] is None else self.op.axes[which[dim]].var + mins[dim]

    def _match(self, index, at: list):
        for dim, known in enumerate(at):
            difference = self.analyzer.simplify(expr(index) - expr(known))
            if isinstance(difference, tirx.IntImm) and int(difference) == 0:
                return self.dims[dim]
        return index

    def place(self, node, reg, values: list):
        """Thread-level form of a prepared body or expression at one register."""
        placed = self.storage.rewrite(node, self.layout, reg, self.dims, self.node.versions)
        return substitute(placed, axis_values(self.op.axes, values))

    def at_hand(self, buffer: Var, indices) -> bool:
        """Whether a fragment access in a prepared body needs no communication."""
        if self.layout is None:
            return False
        dims = self.storage.fragment_dims(indices, self.dims)
        held = self.storage.fragments[buffer].layout
        if dims is None or tuple(1 if d < 0 else self.layout.shape[d] for d in dims) != held.shape:
            return False
        from ...layout import contains

        return contains(held, self.layout, dims)


def _window(op: TileOp, name: str):
    """(buffer, mins, axes) of the slice of ``name`` that an operation uses."""
    for region in (getattr(op, "dst", None), getattr(op, "src", None)):
        if region is not None and region.buffer.name == name:
            return region.buffer, region.mins, region.axes
    found: list = []

    def see(buffer, indices) -> None:
        if buffer.name == name and not found:
            found.append((buffer, indices))

    walk(op.body, (TensorLoad, lambda n: see(n.source, n.indices)), (BufferStore, lambda n: see(n.buffer, n.indices)))
    if not found:
        raise InternalError(f"operation {op.name} does not use its window {name}", op.location)
    buffer, indices = found[0]
    analyzer = tvm.sym.Analyzer()
    zero = {a.var: tirx.const(0, a.var.ty.dtype) for a in op.axes}
    mins, which = [], []
    for index in indices:
        used = [n for n, a in enumerate(op.axes) if mentions(index, a.var)]
        if len(used) > 1:
            raise InternalError(f"index {index} of window {name} mentions several axes", op.location)
        mins.append(analyzer.simplify(substitute(expr(index), zero)))
        which.append(used[0] if used else None)
    return buffer, mins, which
