"""Warp specialisation: one warpgroup issues the loads of all iterations, the others work.

From one kernel tree come two: the producer's keeps the loads (with the loops, branches and values they depend on), the
consumers' keeps everything else, with waits for full slots before their first use and hand-backs after the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.script import tirx as T
from tvm.tirx import BufferStore

from ...errors import InternalError
from ...ir.visit import walk
from ...schedule.decisions import read_rows
from .build import const, evaluate, seq
from .pipeline import touched_buffers
from .program import CondNode, LoopNode, MicroNode, Node, OpNode, RawNode, Version, WhileNode, clone, walk_nodes
from .rings import Ring, Rings, count_of, slot_of
from .tma import TensorMaps, tile_bytes

__all__ = ["ReleaseNode", "RingWaitNode", "consumer_tree", "producer_tree"]


@dataclass
class RingWaitNode:
    """Wait until the slot of visit ``count`` is full."""

    ring: Ring
    count: object


@dataclass
class ReleaseNode:
    """Hand the slot of visit ``count`` back: all products that read its tiles must be complete.

    ``age`` is 1 where the visit belongs to the previous iteration; ``guard`` says when there is one.
    """

    ring: Ring
    count: object
    age: int = 0
    guard: object = None

    @property
    def buffers(self) -> tuple[Var, ...]:
        """The tiles that the slot holds."""
        return tuple(self.ring.buffers)


# ------------------------------------------------------------------------------------------------ producer


def producer_tree(nodes: list[Node], rings: Rings, maps: TensorMaps) -> list[Node]:
    """What the producer's thread does.

    Parameters
    ----------
    nodes : list
        The kernel's tree.
    rings : Rings
        Which copies it issues.
    maps : TensorMaps
        Makes the loads.
    """
    kept = clone(nodes, {}, lambda n: rings.of_copy(n.op.name) is not None)
    kept = _without_unused(kept, _needed(kept))
    return rings.start_counters("producer") + _produce(kept, rings, maps, None)


def _needed(nodes: list[Node]) -> set[Var]:
    """Variables that loads, conditions and bounds of a tree need, through others too."""
    found: list[Var] = []
    values: dict[Var, object] = {}
    for node in walk_nodes(nodes):
        if isinstance(node, OpNode):
            parts = [node.op.realize]
        elif isinstance(node, RawNode):
            values[node.stmt.var] = node.stmt.value
            parts = []
        else:
            parts = [getattr(node, name) for name in ("condition", "start", "extent") if hasattr(node, name)]
        for part in parts:
            walk(tirx.convert(part) if isinstance(part, int) else part, (Var, found.append))
    needed: set[Var] = set()
    while found:
        var = found.pop()
        if var not in needed:
            needed.add(var)
            if var in values:
                walk(values[var], (Var, found.append))
    return needed


def _without_unused(nodes: list[Node], needed: set[Var]) -> list[Node]:
    """The tree without bound values that nothing needs: they may be results of the other warps, or side effects."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, RawNode) and node.stmt.var not in needed:
            continue
        if isinstance(node, CondNode):
            then, orelse = _without_unused(node.then, needed), _without_unused(node.orelse, needed)
            node = CondNode(node.condition, then, orelse)
        elif hasattr(node, "body"):
            node.body = _without_unused(node.body, needed)
        out.append(node)
    return out


def _produce(nodes: list[Node], rings: Rings, maps: TensorMaps, loop: LoopNode | None) -> list[Node]:
    out: list[Node] = []
    group: list[OpNode] = []
    for node in nodes:
        if isinstance(node, OpNode):
            group.append(node)
            ring = rings.of_copy(node.op.name)
            if len(group) < len(ring.copies):
                continue
            if {n.op.name for n in group} != set(ring.copies):
                raise InternalError(f"the copies of ring {ring.name} do not stand together")
            count = count_of(rings, ring, "producer", loop)
            out.append(_fill(group, ring, rings, maps, count))
            if ring.counting == "visits":
                out.append(rings.advance(ring, "producer", const(1)))
            group = []
        elif isinstance(node, LoopNode):
            inner = _direct_rings(node.body, rings)
            node.body = _produce(node.body, rings, maps, node)
            out.append(node)
            out += [rings.advance(r, "producer", node.extent) for r in inner if r.counting == "nested"]
        elif isinstance(node, CondNode):
            then = _produce(node.then, rings, maps, loop)
            out.append(CondNode(node.condition, then, _produce(node.orelse, rings, maps, loop)))
        elif isinstance(node, WhileNode):
            raise InternalError("a producer cannot follow a while loop")
        else:
            out.append(node)
    return out


def _direct_rings(nodes: list[Node], rings: Rings) -> list[Ring]:
    """Rings filled directly in a list of nodes."""
    found = [rings.of_copy(n.op.name) for n in nodes if isinstance(n, OpNode)]
    return [r for r in rings.rings if any(f is r for f in found)]


def _fill(group: list[OpNode], ring: Ring, rings: Rings, maps: TensorMaps, count) -> MicroNode:
    """Wait for the slot, announce the bytes, issue the loads."""
    total = sum(tile_bytes(rings.storage.tile_of(n.op.dst.buffer), read_rows(n.op.annotations)) for n in group)
    version = Version(slot_of(ring, count), None, 0, ring.slots)

    def emit():
        full = rings.full(ring, count)
        expect = evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(total)))
        return seq([rings.wait_empty(ring, count), expect, *[maps.load(n.op, version, full) for n in group]])

    return MicroNode([], [], emit, f"fill {ring.name}")


# ------------------------------------------------------------------------------------------------ consumers


def consumer_tree(nodes: list[Node], rings: Rings) -> list[Node]:
    """What the consumer warps do: the kernel without its loads, with waits and hand-backs of slots.

    Parameters
    ----------
    nodes : list
        The kernel's tree (it is consumed).
    rings : Rings
        The rings.
    """
    return rings.start_counters("consumer") + _consume(nodes, rings, None)


def _consume(nodes: list[Node], rings: Rings, loop: LoopNode | None) -> list[Node]:
    here = _direct_rings(nodes, rings)
    first: dict[int, list[Ring]] = {}
    last: dict[int, list[Ring]] = {}
    counts = {r.name: count_of(rings, r, "consumer", loop) for r in here}
    for ring in here:
        users = [i for i, n in enumerate(nodes) if _uses(n, ring)]
        if not users:
            raise InternalError(f"nothing uses the tiles of ring {ring.name}")
        first.setdefault(users[0], []).append(ring)
        last.setdefault(users[-1], []).append(ring)
        version = Version(slot_of(ring, counts[ring.name]), None if loop is None else loop.var, 0, ring.slots)
        for node in walk_nodes([nodes[i] for i in users]):
            if isinstance(node, OpNode):
                for buffer in ring.buffers:
                    node.versions.setdefault(buffer, version)
    out: list[Node] = []
    for i, node in enumerate(nodes):
        out += [RingWaitNode(ring, counts[ring.name]) for ring in first.get(i, [])]
        if isinstance(node, OpNode):
            if rings.of_copy(node.op.name) is None:
                out.append(node)
        elif isinstance(node, LoopNode):
            inner = _direct_rings(node.body, rings)
            node.body = _consume(node.body, rings, node)
            out.append(node)
            out += [rings.advance(r, "consumer", node.extent) for r in inner if r.counting == "nested"]
        elif isinstance(node, CondNode):
            out.append(CondNode(node.condition, _consume(node.then, rings, loop), _consume(node.orelse, rings, loop)))
        else:
            out.append(node)
        for ring in last.get(i, []):
            out.append(ReleaseNode(ring, counts[ring.name]))
            if ring.counting == "visits":
                out.append(rings.advance(ring, "consumer", const(1)))
    return out


def _uses(node: Node, ring: Ring) -> bool:
    return any(
        isinstance(n, OpNode)
        and n.op.name not in ring.copies
        and any(b.same_as(r) for b in buffers_of(n) for r in ring.buffers)
        for n in walk_nodes([node])
    )


def buffers_of(node: OpNode) -> list[Var]:
    """All buffers that an operation touches, those that it only stores to included."""
    found = list(touched_buffers(node.op))
    for part in (node.op.body, node.op.init):
        if part is not None:
            walk(
                part,
                (TensorLoad, lambda load: found.append(load.source)),
                (BufferStore, lambda store: found.append(store.buffer)),
            )
    return found
