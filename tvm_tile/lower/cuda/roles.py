"""Warp specialisation: one warpgroup issues the loads of all iterations, the others work.

From one kernel tree come two: the producer's keeps the loads (with the loops, branches and values they depend on), the
consumers' keeps everything else, with waits for full slots before their first use and hand-backs after the last.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.script import tirx as T
from tvm.tirx import BufferStore

from ...errors import InternalError
from ...ir.ops import GemmOp
from ...ir.visit import walk
from ...schedule.decisions import BACK, FRONT, read_rows
from .build import const, evaluate, seq
from .pipeline import touched_buffers
from .program import CondNode, LoopNode, MicroNode, Node, OpNode, RawNode, Version, WhileNode, clone, walk_nodes
from .rings import Ring, Rings, count_of, slot_of
from .teams import Team, own_nodes
from .tma import TensorMaps, tile_bytes

__all__ = [
    "ReleaseNode",
    "RingWaitNode",
    "SendNode",
    "SendWaitNode",
    "SignalNode",
    "consumer_tree",
    "front_first",
    "gather_products",
    "producer_tree",
    "set_arrivals",
]


#: Part of the front's products that may still run when it says that they are complete.
MOST_LEFT = 0.125


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


@dataclass
class SendWaitNode:
    """The front waits until the back has read what the slot held before, for which all of the front had written it."""

    ring: Ring
    count: object

    @property
    def ordered(self) -> tuple[Var, ...]:
        """The tiles that the slot holds."""
        return tuple(self.ring.buffers)


@dataclass
class SignalNode:
    """The front's warps say that their products of an iteration are complete, but for the last ``pending`` ones."""

    ring: Ring
    count: object
    pending: int = 0


@dataclass
class SendNode:
    """The front's warps announce that their parts of a slot are written, and that all their products are complete."""

    ring: Ring
    count: object


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
    for position, node in enumerate(nodes):
        if isinstance(node, OpNode):
            group.append(node)
            ring = rings.of_copy(node.op.name)
            if len(group) < len(ring.copies):
                continue
            if {n.op.name for n in group} != set(ring.copies):
                raise InternalError(f"the copies of ring {ring.name} do not stand together")
            count = count_of(rings, ring, "producer", loop)
            out.append(_fill(group, ring, rings, maps, count))
            out += _fetched(nodes[position + 1 :], rings, maps)
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


def _fetched(behind: list[Node], rings: Rings, maps: TensorMaps) -> list[Node]:
    """Bring to L2 what loads right behind a fill need, where they have to wait for the back to read their slots.

    Those slots are free late: a load from L2 still arrives in time for the front's last product.
    """
    out: list[Node] = []
    for node in behind:
        ring = rings.of_copy(node.op.name) if isinstance(node, OpNode) else None
        if ring is None or ring.under is None:
            break
        out.append(MicroNode([], [], functools.partial(maps.fetch_to_l2, node.op), f"fetch {ring.name} to L2"))
    return out


def _direct_rings(nodes: list[Node], rings: Rings) -> list[Ring]:
    """Rings filled directly in a list of nodes."""
    names = {n.op.name for n in nodes if isinstance(n, OpNode)}
    return [r for r in rings.rings if names.intersection([*r.copies, *r.writers])]


def _fill(group: list[OpNode], ring: Ring, rings: Rings, maps: TensorMaps, count) -> MicroNode:
    """Wait for the slot, announce the bytes, issue the loads."""
    total = sum(tile_bytes(rings.storage.tile_of(n.op.dst.buffer), read_rows(n.op.annotations)) for n in group)
    version = Version(slot_of(ring, count), None, 0, ring.slots)

    def emit():
        full = rings.full(ring, count)
        expect = evaluate(T.ptx.mbarrier.arrive.expect_tx.shared.b64(full, T.uint32(total)))
        free = [rings.wait_empty(ring, count), *rings.wait_guests(ring, count)]
        return seq([*free, expect, *[maps.load(n.op, version, full) for n in group]])

    return MicroNode([], [], emit, f"fill {ring.name}")


# ------------------------------------------------------------------------------------------------ consumers


def consumer_tree(nodes: list[Node], rings: Rings, team: Team) -> list[Node]:
    """What a team of consumer warps does: its operations, with waits and hand-backs of slots.

    Parameters
    ----------
    nodes : list
        The kernel's tree (it is consumed).
    rings : Rings
        The rings.
    team : Team
        Whose part.
    """
    return rings.start_counters(_role(team)) + own_nodes(_consume(nodes, rings, None, team), team)


def set_arrivals(rings: Rings, nodes: list[Node], teams: list[Team]) -> None:
    """Which warps arrive at the barriers of each ring: those of the teams that use its tiles."""
    for ring in rings.rings:
        users = [t for t in teams if any(_uses(n, ring, t) for n in nodes)]
        if ring.signal:
            ring.arrivals = (sum(t.warps for t in teams if t.role == FRONT), 1)
        elif ring.writers:
            front, back = (sum(t.warps for t in teams if t.role == role) for role in (FRONT, BACK))
            ring.arrivals = (front, back)
        else:
            ring.arrivals = (1, sum(t.warps for t in users))


def _role(team: Team) -> str:
    return team.role or "consumer"


def _consume(nodes: list[Node], rings: Rings, loop: LoopNode | None, team: Team) -> list[Node]:
    here = _direct_rings(nodes, rings)
    first: dict[int, list[Ring]] = {}
    last: dict[int, list[Ring]] = {}
    role = _role(team)
    counts = {r.name: count_of(rings, r, role, loop) for r in here}
    for ring in here:
        users = [i for i, n in enumerate(nodes) if _uses(n, ring, team)]
        if not users:
            if team.role is None:
                raise InternalError(f"nothing uses the tiles of ring {ring.name}")
            continue
        # the back waits for the front before anything else in a loop: it may change tiles that the front has read
        begin = next((i for i, n in enumerate(nodes) if _has_own(n, team)), users[0]) if loop is not None else users[0]
        first.setdefault(begin if ring.writers and team.role == BACK else users[0], []).append(ring)
        if ring.under is None:  # else its slot is handed back by those who read what takes its place
            last.setdefault(users[-1], []).append(ring)
        version = Version(slot_of(ring, counts[ring.name]), None if loop is None else loop.var, 0, ring.slots)
        for node in walk_nodes([nodes[i] for i in users]):
            if isinstance(node, OpNode):
                for buffer in ring.buffers:
                    node.versions.setdefault(buffer, version)
    out: list[Node] = []
    for i, node in enumerate(nodes):
        for ring in first.get(i, []):
            sends = ring.writers and team.role == FRONT
            out.append((SendWaitNode if sends else RingWaitNode)(ring, counts[ring.name]))
        if isinstance(node, OpNode):
            if rings.of_copy(node.op.name) is None:
                out.append(node)
        elif isinstance(node, LoopNode):
            inner = _direct_rings(node.body, rings)
            node.body = _consume(node.body, rings, node, team)
            out.append(node)
            out += [rings.advance(r, role, node.extent) for r in inner if r.counting == "nested"]
        elif isinstance(node, CondNode):
            then, orelse = (_consume(part, rings, loop, team) for part in (node.then, node.orelse))
            out.append(CondNode(node.condition, then, orelse))
        else:
            out.append(node)
        for ring in last.get(i, []):
            sends = ring.writers and team.role == FRONT
            out.append((SendNode if sends else ReleaseNode)(ring, counts[ring.name]))
            if ring.counting == "visits":
                out.append(rings.advance(ring, role, const(1)))
    return out


def gather_products(nodes: list[Node], is_async) -> list[Node]:
    """Products in a row, each behind the waits for what it needs itself, all before the hand-backs.

    Waiting for a product before the next one is issued leaves the tensor cores idle.
    """
    out: list[Node] = []
    at = 0
    while at < len(nodes):
        node = nodes[at]
        for name in ("body", "then", "orelse"):
            if hasattr(node, name):
                setattr(node, name, gather_products(getattr(node, name), is_async))
        end = at
        while end < len(nodes) and (_is_wait(nodes[end]) or isinstance(nodes[end], OpNode) and is_async(nodes[end])):
            end += 1
        run = nodes[at:end]
        if sum(isinstance(n, OpNode) for n in run) > 1:
            out += [n for n in run if not isinstance(n, ReleaseNode)]
            # the last ring's products are the last: its hand-back waits for all of them
            out += reversed([n for n in run if isinstance(n, ReleaseNode)])
            at = end
        else:
            out.append(node)
            at += 1
    return out


def front_first(nodes: list[Node], rings: Rings, team: Team, is_async) -> list[Node]:
    """The tree in which the back's final product waits for the front's products of the next iteration.

    Side by side both would take twice as long, and the tensor cores would idle while the front works on what its
    products have given. One after the other, that work runs beside the back's product.
    """
    ring = rings.signal
    if ring is None:
        return nodes
    for node in nodes:
        if not isinstance(node, LoopNode):
            continue
        products = [i for i, n in enumerate(node.body) if isinstance(n, OpNode) and is_async(n)]
        if not products:
            continue
        visit = node.var - node.start
        if team.role == FRONT:
            ops = [node.body[i].op for i in products]
            node.body.insert(products[-1] + 1, SignalNode(ring, visit, _left_over(ops)))
        else:
            wait = RingWaitNode(ring, visit + 1)
            node.body.insert(products[-1], CondNode(visit + 1 < node.extent, [wait]))
    return nodes


def _left_over(products: list[GemmOp]) -> int:
    """How many of the front's last products may still run when it says that they are complete.

    The word takes as long to arrive as a few instructions: waiting for all of them leaves the tensor cores idle.
    """
    work = [p.m * p.n * p.k for p in products]
    return int(len(products) > 1 and work[-1] <= MOST_LEFT * sum(work))


def _is_wait(node: Node) -> bool:
    return isinstance(node, RingWaitNode | ReleaseNode)


def _has_own(node: Node, team: Team) -> bool:
    return any(isinstance(n, OpNode) and team.owns(n) for n in walk_nodes([node]))


def _uses(node: Node, ring: Ring, team: Team) -> bool:
    return any(
        isinstance(n, OpNode)
        and n.op.name not in ring.copies
        and team.owns(n)
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
