"""``T.Pipelined(..., order=, stage=)``: a schedule by hand, checked against the loop's dependences.

Statement s of iteration i runs in iteration ``i + stage[s]`` of the new loop, at place ``order[s]`` of its body. For
two statements that touch one buffer, at least one writing, every pair of instances has to keep the order of the source;
where only a reuse of the buffer in a later iteration stands against it, the buffer gets copies.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx import BufferStore

from ..errors import TileShapeError, TileSyntaxError
from ..ir.visit import walk
from .analysis import GLOBAL, KernelView, Scope, Site
from .decisions import PipelineDecision

__all__ = ["plan_manual"]


def plan_manual(kernel: KernelView, scope: Scope, inside: list[Site], producers: list[Site]) -> PipelineDecision:
    """The plan of a manually scheduled loop.

    Parameters
    ----------
    inside : list of Site
        Operations of the loop.
    producers : list of Site
        Copies that can be issued ahead: only their tiles can have copies.

    Raises
    ------
    TileShapeError
        A statement placed before what it needs.
    TileSyntaxError
        A loop that assigns variables: they have one value, whatever iteration reads it.
    """
    notes = scope.annotations
    numbered = [s for s in inside if s.op.statement is not None]
    count = 1 + max((s.op.statement for s in numbered), default=-1)
    stage = [int(v) for v in notes.get("tile.stage", [0] * count)]
    order = [int(v) for v in notes.get("tile.order", range(len(stage)))]
    _refuse_variables(kernel, scope)
    free = [s.op.dst.buffer for s in producers]
    copies: dict[Var, int] = {}
    touched = [(s, a) for s in numbered for a in s.accesses]
    for n, (first, a) in enumerate(touched):
        for second, b in touched[n:]:
            early, late = (first, a), (second, b)
            if early[0].op.statement == late[0].op.statement or not _conflict(kernel, a, b):
                continue
            if early[0].op.statement > late[0].op.statement:
                early, late = late, early
            _check_pair(kernel, scope, early, late, stage, order, free, copies)
    names = {b.name: n for b, n in copies.items() if n > 1}
    ahead = tuple(s.name for s in producers if s.op.dst.buffer.name in names)
    return PipelineDecision(max(stage, default=0) + 1, names, ahead, tuple(order), tuple(stage))


def _conflict(kernel: KernelView, a, b) -> bool:
    return (a.write or b.write) and kernel.base(a.buffer).same_as(kernel.base(b.buffer))


def _check_pair(kernel: KernelView, scope: Scope, early, late, stage, order, free, copies) -> None:
    (first, access), (second, _) = early, late
    s, t = first.op.statement, second.op.statement
    buffer = kernel.base(access.buffer)
    # the same iteration: s before t
    if (stage[s], order[s]) >= (stage[t], order[t]):
        raise TileShapeError(
            f"T.Pipelined: statement {t} ({second.name}, stage {stage[t]}, order {order[t]}) is placed before "
            f"statement {s} ({first.name}, stage {stage[s]}, order {order[s]}), but both use {buffer.name}",
            second.location or scope.location,
            f"statement {t} needs a later stage than {s}, or the same stage and a later order",
        )
    # v iterations later: t of iteration i before s of iteration i + v, which touches the same copy again
    needed = stage[t] - stage[s] + (0 if order[t] < order[s] else 1)
    needed = max(needed, 1)
    if needed > 1 and (str(buffer.ty.storage_scope) == GLOBAL or all(not buffer.same_as(f) for f in free)):
        raise TileShapeError(
            f"T.Pipelined: statement {s} ({first.name}) of a later iteration would run before statement {t} "
            f"({second.name}) of this one, but {buffer.name} holds one iteration's values",
            second.location or scope.location,
            f"give statements {s} and {t} closer stages, or fill {buffer.name} by one T.copy from a tensor",
        )
    copies[buffer] = max(copies.get(buffer, 1), needed)


def _refuse_variables(kernel: KernelView, scope: Scope) -> None:
    for raw in kernel.raw:
        if scope in raw.path and isinstance(raw.stmt, BufferStore):
            raise TileSyntaxError(
                f"T.Pipelined: {raw.stmt.buffer.name} is assigned in a loop with order= or stage=",
                scope.location,
                "use num_stages= alone, or compute the value from the loop variable",
            )
        if scope in raw.path and isinstance(raw.stmt, tirx.Bind):
            _refuse_changing(kernel, scope, raw.stmt.value, raw.stmt.var.name)
    conditions = {
        id(s): s for site in kernel.sites if scope in site.path for s in site.path[site.path.index(scope) + 1 :]
    }
    for inner in conditions.values():
        if inner.kind in ("if", "while"):
            _refuse_changing(kernel, scope, inner.node.condition, "a condition")


def _refuse_changing(kernel: KernelView, scope: Scope, value, what: str) -> None:
    loads: list[TensorLoad] = []
    walk(value, (TensorLoad, loads.append))
    for load in loads:
        if str(load.source.ty.storage_scope) != GLOBAL or any(load.source.same_as(w) for w in kernel.written_globals):
            raise TileSyntaxError(
                f"T.Pipelined: {what} reads {load.source.name}, which the loop may change, in a loop with order= or "
                "stage=",
                scope.location,
                "use num_stages= alone",
            )
