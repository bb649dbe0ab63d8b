"""Software pipelines: copies of later iterations are issued while earlier ones are worked on.

A loop planned with S stages becomes a prologue that issues the copies of the first S - 1 iterations, and a main loop
whose iteration k waits for its own tiles, issues the copies of iteration k + S - 1 into the copy of the buffers that
iteration k - 1 has just left, and then works. Any trip count is right: every issue is guarded by the loop's extent.
"""

from __future__ import annotations

from collections.abc import Iterable

from tvm import tirx
from tvm.ir import Var

from ...errors import InternalError
from .program import CommitNode, CondNode, LoopNode, Node, OpNode, Version, WaitNode, clone, walk_nodes
from .sync import BarrierNode

__all__ = ["PipelinePlan", "expand_pipelines", "touched_buffers"]


class PipelinePlan:
    """A loop's plan as the rules wrote it.

    Attributes
    ----------
    stages : int
        Copies of each multi-buffered tile.
    buffers : dict
        Shared buffer -> number of copies.
    producers : set of str
        Copy blocks that are issued ahead.
    order, stage : list of int or None
        A manual schedule.
    """

    def __init__(self, data: dict, by_name: dict[str, Var]) -> None:
        self.stages = int(data.get("stages", 1))
        self.buffers = {by_name[name]: int(count) for name, count in data.get("buffers", {}).items()}
        self.producers = set(data.get("producers", ()))
        self.order = data.get("order")
        self.stage = data.get("stage")

    @property
    def overlaps(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.stage) or (self.stages > 1 and bool(self.producers))


def touched_buffers(op) -> list[Var]:
    """Buffers of an operation's regions."""
    return [r.buffer for r in (getattr(op, n, None) for n in ("src", "dst", "a", "b", "c", "mask")) if r is not None]


def expand_pipelines(nodes: list[Node], plan_of) -> list[Node]:
    """Rewrite the pipelined loops of a tree.

    Parameters
    ----------
    nodes : list
        The kernel's tree.
    plan_of : callable
        LoopNode -> PipelinePlan or None.
    """
    out: list[Node] = []
    for index, node in enumerate(nodes):
        if isinstance(node, LoopNode):
            plan = plan_of(node)
            if plan is not None and plan.overlaps:
                made, final = (_manual if plan.stage else _staged)(node, plan)
                out += made
                # what reads the tiles after the loop finds the last iteration's copies
                _set_versions(nodes[index + 1 :], final, after=True)
                continue
            out.append(LoopNode(node.var, node.start, node.extent, expand_pipelines(node.body, plan_of),
            node.annotations,
                                node.unroll, node.location))  # fmt: skip
        elif isinstance(node, CondNode):
            out.append(
                CondNode(node.condition, expand_pipelines(node.then, plan_of), expand_pipelines(node.orelse, plan_of))
            )
        else:
            if hasattr(node, "body"):
                node.body = expand_pipelines(node.body, plan_of)
            out.append(node)
    return out


def _set_versions(nodes: Iterable[Node], versions: dict[Var, Version], after: bool = False) -> None:
    """Say which copies operations use; what comes ``after`` a loop may have been told by a loop of its own."""
    for node in walk_nodes(list(nodes)):
        if isinstance(node, OpNode):
            for buffer, version in versions.items():
                if not (after and buffer in node.versions and node.versions[buffer].loop is not None):
                    node.versions[buffer] = version


def _last(node: LoopNode, count: int) -> Version:
    """The copy that the last iteration used (copy 0 when there was none)."""
    return Version(tirx.floormod(tirx.max(node.extent - 1, 0), count), None, 0, count)


def _staged(node: LoopNode, plan: PipelinePlan) -> tuple[list[Node], dict[Var, Version]]:
    ahead = plan.stages - 1
    producers = {n.op.name for n in walk_nodes(node.body) if isinstance(n, OpNode)} & plan.producers
    if producers != plan.producers:
        raise InternalError(
            f"the pipeline plan names copies that are not in the loop: {sorted(plan.producers - producers)}"
        )

    def is_producer(op_node: OpNode) -> bool:
        return op_node.op.name in producers

    end = node.start + node.extent
    out: list[Node] = []
    for step in range(ahead):
        issue = clone(node.body, {node.var: node.start + step}, is_producer)
        _set_versions(issue, {b: Version(tirx.const(step % c, "int32"), None, 0, c) for b, c in plan.buffers.items()})
        out.append(CondNode(node.extent > step, issue))
        out.append(CommitNode())
    var = Var(node.var.name, node.var.ty)
    here = var - node.start
    # one barrier an iteration: it publishes this iteration's tiles and frees the slots that the last one read
    body: list[Node] = [WaitNode(ahead - 1), BarrierNode()]
    issue = clone(node.body, {node.var: var + ahead}, is_producer)
    _set_versions(issue, {b: Version(tirx.floormod(here + ahead, c), var, ahead, c) for b, c in plan.buffers.items()})
    body.append(CondNode(var + ahead < end, issue))
    body.append(CommitNode())
    work = clone(node.body, {node.var: var}, None)
    work = _without(work, producers)
    _set_versions(work, {b: Version(tirx.floormod(here, c), var, 0, c) for b, c in plan.buffers.items()})
    body += work
    out.append(LoopNode(var, node.start, node.extent, body, node.annotations, False, node.location))
    return out, {b: _last(node, c) for b, c in plan.buffers.items()}


def _without(nodes: list[Node], names: set[str]) -> list[Node]:
    """The tree without some operations; branches left empty disappear."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, OpNode) and node.op.name in names:
            continue
        if isinstance(node, CondNode):
            node = CondNode(node.condition, _without(node.then, names), _without(node.orelse, names))
            if not node.then and not node.orelse:
                continue
        elif hasattr(node, "body"):
            node.body = _without(node.body, names)
        out.append(node)
    return out


def _manual(node: LoopNode, plan: PipelinePlan) -> tuple[list[Node], dict[Var, Version]]:
    """A manual schedule: iteration i of the new loop runs statement s for iteration ``i - stage[s]``."""
    count = len(plan.stage)
    order = plan.order or list(range(count))
    depth = max(plan.stage)
    var = Var(node.var.name, node.var.ty)
    start = node.start
    written_at: dict[Var, int] = {}
    for inner in walk_nodes(node.body):
        if isinstance(inner, OpNode) and inner.op.name in plan.producers:
            written_at[inner.op.dst.buffer] = plan.stage[inner.op.statement]
    # Groups are committed once an iteration: a tile written w stages before its first use is w groups old.
    distance = min(
        (plan.stage[n.op.statement] - written_at[b] for n in walk_nodes(node.body) if isinstance(n, OpNode)
         and n.op.name not in plan.producers for b in touched_buffers(n.op) if b in written_at),
        default=1,
    )  # fmt: skip
    # the barrier behind the wait publishes what all threads have waited for; no earlier one can
    body: list[Node] = [WaitNode(max(distance - 1, 0)), BarrierNode()] if written_at else []
    for statement in sorted(range(count), key=lambda s: order[s]):
        stage = plan.stage[statement]
        picked = clone(node.body, {node.var: var - stage}, lambda n, s=statement: n.op.statement == s)
        here = var - start - stage
        _set_versions(picked, {b: Version(tirx.floormod(here, c), var, -stage, c) for b, c in plan.buffers.items()})
        guard = var - stage < start + node.extent
        if stage > 0:
            guard = tirx.And(var - stage >= start, guard)
        body.append(CondNode(guard, picked) if depth else picked[0])
    if written_at:
        body.append(CommitNode())
    extent = node.extent + depth
    extent = tirx.Select(tirx.convert(node.extent) > 0, extent, tirx.const(0, "int32"))
    return [LoopNode(var, start, extent, body, node.annotations, False, node.location)], {
        b: _last(node, c) for b, c in plan.buffers.items()
    }
