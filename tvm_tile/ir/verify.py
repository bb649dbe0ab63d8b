"""What the language promises and the parser cannot see statement by statement.

Checked here: iterations of ``T.Parallel`` are independent, per-thread scratch does not carry values between iterations,
every annotated block reads back.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx import Bind, BufferStore, For, IfThenElse, is_buffer_var

from ..errors import TileShapeError, TileSyntaxError
from .ops import ParallelOp, TileOp, tile_ops
from .visit import mentions, substitute, walk

__all__ = ["verify"]


def verify(func: tirx.PrimFunc) -> None:
    """Check a function of tile IR.

    Parameters
    ----------
    func : PrimFunc
        Tile IR in normal form.

    Raises
    ------
    TileError
        Where iterations of T.Parallel depend on each other.
    InternalError
        Where a block is not one that the language makes.
    """
    for op in tile_ops(func.body):
        if isinstance(op, ParallelOp) and op.axes:
            _check_parallel(op)


class _Accesses:
    """Loads and stores of one iteration, with the conditions around the stores."""

    def __init__(self, op: TileOp) -> None:
        self.loads: list[TensorLoad] = []
        self.stores: list[tuple[BufferStore, list]] = []
        self.inner: list[Var] = []
        self.bound: list[Var] = []
        self._walk(op.body, [])

    def _walk(self, stmt, conditions: list) -> None:
        if isinstance(stmt, IfThenElse):
            self._expression(stmt.condition)
            self._walk(stmt.then_case, [*conditions, stmt.condition])
            if stmt.else_case is not None:
                self._walk(stmt.else_case, [*conditions, stmt.condition])
        elif isinstance(stmt, BufferStore):
            for part in (stmt.value, *stmt.indices):
                self._expression(part)
            self.stores.append((stmt, conditions))
        elif isinstance(stmt, For):
            self.inner.append(stmt.loop_var)
            self._expression(stmt.extent)
            self._walk(stmt.body, conditions)
        elif isinstance(stmt, Bind):
            self.bound.append(stmt.var)
            self._expression(stmt.value)
        elif isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self._walk(part, conditions)
        else:
            self._expression(stmt)

    def _expression(self, node) -> None:
        addressed: list = []

        def on_call(call):
            if getattr(call.op, "name", "") == "tirx.address_of":
                addressed.append(call.args[0])

        walk(node, (tvm.ir.Call, on_call))
        found: list[TensorLoad] = []
        walk(node, (TensorLoad, found.append))
        self.loads += [x for x in found if all(not x.same_as(a) for a in addressed)]


def _text(buffer, indices) -> str:
    return f"{buffer.name}[{', '.join(str(i) for i in indices)}]"


def _check_parallel(op: ParallelOp) -> None:
    accesses = _Accesses(op)
    wide = [a for a in op.axes if a.size != 1]
    for store, conditions in accesses.stores:
        buffer = store.buffer
        scope = str(buffer.ty.storage_scope)
        if scope == "local.var":
            raise TileSyntaxError(
                f"{buffer.name} is one value for the whole CTA; the iterations of T.Parallel would race for it",
                op.location, "reduce a tile (T.reduce_sum, T.any_of) and assign the result outside of T.Parallel",
            )  # fmt: skip
        if scope == "local":
            continue
        opaque = any(mentions(i, v) for i in store.indices for v in accesses.bound) or any(
            isinstance(x, TensorLoad) for i in store.indices for x in _loads(i)
        )
        missing = [a for a in wide if not any(mentions(i, a.var) for i in store.indices)]
        missing = [a for a in missing if not any(mentions(c, a.var) for c in conditions)]
        if missing and not opaque:
            raise TileShapeError(
                f"T.Parallel stores {_text(buffer, store.indices)} once for each of {missing[0].extent} iterations of another "
                "axis: the last one to arrive would win",
                op.location, "index the target with every axis, reduce with T.reduce_sum / T.reduce_max, or use T.atomic_add",
            )  # fmt: skip
        for load in accesses.loads:
            if load.source.same_as(buffer) and not _same(load.indices, store.indices) and _may_meet(load, store, wide):
                raise TileShapeError(
                    f"T.Parallel reads {_text(load.source, load.indices)} and stores {_text(buffer, store.indices)}: "
                    "one iteration would read what another one writes",
                    op.location, "read from a copy of the tile: T.copy it to another buffer before the loop",
                )  # fmt: skip


def _loads(expr) -> list:
    found: list = []
    walk(expr, (TensorLoad, found.append))
    return found


def _same(left, right) -> bool:
    analyzer = tvm.sym.Analyzer()
    return len(left) == len(right) and all(analyzer.can_prove_equal(a, b) for a, b in zip(left, right))


def _may_meet(load: TensorLoad, store: BufferStore, axes) -> bool:
    """Whether a load may read what another iteration stores: some dimension keeps them apart for all iterations, or not."""
    analyzer = tvm.sym.Analyzer()
    other = {a.var: Var(a.var.name + "_other", a.var.ty.dtype) for a in axes}
    for axis in axes:
        for var in (axis.var, other[axis.var]):
            analyzer.bind(var, tvm.ir.Range.from_min_extent(0, axis.extent))
    for a, b in zip(load.indices, store.indices):
        moved = substitute(b, other)
        if analyzer.can_prove(tirx.NE(a, moved)) or analyzer.can_prove(a < moved) or analyzer.can_prove(a > moved):
            return False
    return is_buffer_var(store.buffer)
