"""Overlap across iterations: products stay in flight over a loop's back edge.

Two transformations of a consumer's loop, both justified by its dependences alone:

*Deferral.* A product that nothing else in the body looks at is waited for one iteration later; its slot goes back then.

*Rotation.* A body ``H M G`` (head up to its first product, middle, final product) where G and the next iteration's H
are independent becomes ``H M | H' G M' | G'``: the next head's product is issued before the final product of this
iteration, and the middle's scalar work runs while the tensor cores are busy with G.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var

from .build import const
from .program import CondNode, LoopNode, Node, OpNode, clone, walk_nodes
from .roles import ReleaseNode, RingWaitNode, buffers_of
from .split_loops import split_at_branch

__all__ = ["TurnNode", "defer_releases", "overlap_iterations", "rotate"]


@dataclass
class TurnNode:
    """Two consumer warpgroups take turns at issuing products: ``enter`` waits for one's turn, else it is passed on.

    While one works on scalars, the other's products have the tensor cores (ping-pong; FlashAttention-3, Shah et al.
    2024).
    """

    enter: bool


def overlap_iterations(nodes: list[Node], is_async, turns: bool = False, room=None) -> list[Node]:
    """Apply whichever transformation fits to every loop that waits for a ring.

    Parameters
    ----------
    nodes : list
        The consumers' tree.
    is_async : callable
        Whether an operation is an asynchronous product.
    turns : bool
        Whether rotated loops let two warpgroups take turns.
    room : callable, optional
        Whether a rotated loop may be split where a branch of it changes.
    """
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, LoopNode):
            if any(isinstance(n, RingWaitNode) for n in node.body) and all(
                r.ring.counting != "visits" for r in node.body if isinstance(r, RingWaitNode)
            ):
                made = rotate(node, is_async, turns, room) or defer_releases(node, is_async)
                if made is not None:
                    out += made
                    continue
            node.body = overlap_iterations(node.body, is_async, turns, room)
        elif isinstance(node, CondNode):
            node = CondNode(
                node.condition,
                overlap_iterations(node.then, is_async, turns, room),
                overlap_iterations(node.orelse, is_async, turns, room),
            )
        out.append(node)
    return out


def _tail(body: list[Node], is_async) -> int | None:
    """Position of a final product that only hand-backs follow, else None."""
    at = len(body) - 1
    while at >= 0 and isinstance(body[at], ReleaseNode):
        at -= 1
    return at if at >= 0 and isinstance(body[at], OpNode) and is_async(body[at]) else None


def _touch(node: Node) -> list[Var]:
    """Buffers that a node's operations touch, those in branches and inner loops included."""
    inner = [n for n in walk_nodes([node]) if isinstance(n, OpNode)]
    return [b for n in inner for b in buffers_of(n)]


def _meet(left: list[Var], right: list[Var]) -> bool:
    return any(a.same_as(b) for a in left for b in right)


def _on_chip(buffers: list[Var]) -> list[Var]:
    return [b for b in buffers if str(b.ty.storage_scope) != "global"]


def defer_releases(loop: LoopNode, is_async) -> list[Node] | None:
    """Deferral, or None where the body's final product is looked at in every iteration.

    The slot of the final product goes back in the next iteration, behind that iteration's first product: the tensor
    cores find the next product queued when the final one ends. Where other work touches the accumulator, ptxas gives up
    and serialises all products of the kernel (C7514), so that such a loop is left alone.
    """
    body = loop.body
    tail = _tail(body, is_async)
    if tail is None or not isinstance(body[-1], ReleaseNode):
        return None
    accumulator = [body[tail].op.c.buffer]
    if any(_meet(accumulator, _touch(n)) for i, n in enumerate(body) if i != tail):
        return None
    releases = body[tail + 1 :]
    begun = loop.var > loop.start
    late = [ReleaseNode(r.ring, r.count - 1, 1, begun) for r in releases]
    moved = [*body[: tail + 1], *late]
    made = LoopNode(loop.var, loop.start, loop.extent, moved, loop.annotations, False, loop.location)
    end = {loop.var: loop.start + loop.extent - 1}
    final = [ReleaseNode(r.ring, r.count, 0, loop.extent > 0) for r in clone(releases, end)]
    return [made, *final]


def _would_starve(body: list[Node], head_end: int, slots: list[Var]) -> bool:
    """Whether rotation leaves a ring no slot to load into: its tile is read by a head and by the final product.

    Rotated, the slots of two iterations are then in use at once, and the next load can only start in the middle of the
    iteration before it is needed. With a third slot it starts a whole iteration earlier.
    """
    for node in body:
        if isinstance(node, RingWaitNode) and node.ring.slots < 3 and _meet(list(node.ring.buffers), slots):
            if any(_meet(list(node.ring.buffers), _touch(n)) for n in body[: head_end + 1]):
                return True
    return False


def rotate(loop: LoopNode, is_async, turns: bool = False, room=None) -> list[Node] | None:
    """Rotation, or None where the final product and the next head depend on each other."""
    body = loop.body
    tail = _tail(body, is_async)
    if tail is None:
        return None
    heads = [i for i, n in enumerate(body[:tail]) if isinstance(n, OpNode) and is_async(n)]
    if not heads:
        return None
    # the head ends with the last product of its accumulator that stands before other work on it
    head_end = heads[0]
    for i in heads[1:]:
        if all(not isinstance(n, OpNode) or is_async(n) for n in body[head_end + 1 : i]):
            head_end = i
    final = body[tail]
    mine = _on_chip(buffers_of(final))
    slots = [b for n in body[tail + 1 :] if isinstance(n, ReleaseNode) for b in n.buffers]
    own = [b for b in mine if not _meet([b], slots)]  # what G works on besides ring tiles
    if any(_meet(own, _on_chip(_touch(n))) for n in body[: head_end + 1]):
        return None
    if _would_starve(body, head_end, slots):
        return None
    head, middle = body[: head_end + 1], body[head_end + 1 : tail]
    # no mbarrier wait between products: ptxas ends a wgmma group at every basic block
    head = [n for n in head if isinstance(n, RingWaitNode)] + [n for n in head if not isinstance(n, RingWaitNode)]
    waits = [n for n in middle if isinstance(n, RingWaitNode) and _meet(list(n.ring.buffers), mine)]
    early = [n for n in middle if isinstance(n, ReleaseNode)]
    middle = [n for n in middle if not any(n is x for x in [*waits, *early])]
    releases = body[tail + 1 :]
    # the wait for G's tiles and the hand-back of the last ones stand where the middle first needs what G works on, or
    # changes a tile that G reads
    waited = [*own, *(b for n in waits for b in n.ring.buffers)]
    at = next((i for i, n in enumerate(middle) if _meet(waited, _on_chip(_touch(n)))), len(middle))
    first = {loop.var: loop.start}
    last = {loop.var: loop.start + loop.extent - 1}
    some = tirx.convert(loop.extent) > 0
    var = Var(loop.var.name, loop.var.ty)
    here, before = {loop.var: var}, {loop.var: var - 1}
    prologue = clone([*head, *early, *middle[:at], *waits, *middle[at:]], first)
    products = clone(head, here) + clone([final], before)
    if turns:
        first_product = next(i for i, n in enumerate(products) if isinstance(n, OpNode) and is_async(n))
        products = [*products[:first_product], TurnNode(True), *products[first_product:], TurnNode(False)]
    steady = products + clone([*early, *middle[:at], *waits], here)
    steady += [ReleaseNode(r.ring, r.count, 0) for r in clone(releases, before)] + clone(middle[at:], here)
    epilogue = clone([final, *releases], last)
    extent = tirx.max(loop.extent - 1, const(0))
    made = LoopNode(var, loop.start + 1, extent, steady, loop.annotations, False, loop.location)
    # nothing is in flight where an iteration ends, so that the parts of the loop follow each other without a pause
    parts = split_at_branch(made) if room is not None and room(made) else [made]
    return [CondNode(some, prologue), *parts, CondNode(some, epilogue)]
