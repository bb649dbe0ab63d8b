"""Small builders of thread-level TIR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Var
from tvm.tirx import For, ForKind, SeqStmt

__all__ = ["const", "evaluate", "loop", "seq", "unrolled", "when"]


def const(value: int, dtype: str = "int32"):
    """An integer constant."""
    return tirx.const(int(value), dtype)


def seq(stmts: Sequence):
    """One statement of several; None is left out."""
    flat: list = []
    for stmt in stmts:
        if stmt is None:
            continue
        if isinstance(stmt, list | tuple):
            stmt = seq(stmt)
        if isinstance(stmt, SeqStmt):
            flat.extend(stmt.seq)
        else:
            flat.append(stmt)
    if not flat:
        return tirx.Evaluate(const(0))
    return flat[0] if len(flat) == 1 else SeqStmt(flat)


def loop(extent, body: Callable[[object], object], name: str = "i", kind=ForKind.SERIAL):
    """A loop over ``[0, extent)``; an extent of 1 is no loop."""
    if isinstance(extent, int) and extent == 1:
        return seq([body(const(0))])
    var = Var(name, "int32")
    return For(var, const(0), extent if not isinstance(extent, int) else const(extent), kind, seq([body(var)]))


def unrolled(extent: int, body: Callable[[object], object], name: str = "i"):
    """A fully unrolled loop: arrays indexed by its variable stay in registers."""
    return loop(extent, body, name, ForKind.UNROLLED)


def when(condition, stmt):
    """``stmt`` under a condition; Python's True is no condition."""
    if condition is True:
        return stmt
    return tirx.IfThenElse(condition, stmt, None)


def evaluate(call):
    """A call as a statement."""
    return tirx.Evaluate(call)
