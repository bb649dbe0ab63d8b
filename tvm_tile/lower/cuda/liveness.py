"""When shared tiles are live in a kernel whose consumer warps have different roles."""

from __future__ import annotations

from tvm.ir import Var

from ...schedule.decisions import FRONT
from .memory import END
from .program import LoopNode, Node, OpNode
from .rings import Ring
from .roles import buffers_of
from .storage import Storage

__all__ = ["live_across_teams"]


def live_across_teams(
    storage: Storage, nodes: list[Node], exchanges: list[Ring], loaded: set[Var]
) -> dict[Var, tuple[int, int]]:
    """When the tiles of a kernel with a front and a back are live, in the order of the kernel's text.

    The teams run side by side: what the front (or the producer) uses counts as live from the start, and until the back
    has passed an exchange that the front filled afterwards. Only then may the back put other tiles there.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    nodes : list
        The kernel's tree, operations of all roles.
    exchanges : list of Ring
        What goes from the front to the back.
    loaded : set of Var
        Tiles that the producer fills.
    """
    spans: dict[Var, tuple[int, int]] = {}
    front: set[Var] = set(loaded)
    passed: list[int] = []  # where the back has waited for the front, outside of loops
    position = 0

    def touch(buffer: Var, first: int, last: int) -> None:
        low, high = spans.get(buffer, (first, last))
        spans[buffer] = (min(low, first), max(high, last))

    def visit(node: Node, loops: list[list[Var]]) -> None:
        nonlocal position
        position += 1
        if isinstance(node, OpNode):
            for buffer in (b for b in buffers_of(node) if b in storage.tiles):
                touch(buffer, position, position)
                for inside in loops:
                    inside.append(buffer)
                if node.op.annotations.get("tile.role") == FRONT:
                    front.add(buffer)
            if not loops and any(node.op.name in e.readers for e in exchanges):
                passed.append(position)
        for part in ("body", "then", "orelse"):
            inner = getattr(node, part, [])
            start, inside = position, []
            for child in inner:
                visit(child, [*loops, inside] if isinstance(node, LoopNode) else loops)
            if isinstance(node, LoopNode):
                position += 1
                for buffer in inside:
                    touch(buffer, start, position)

    for node in nodes:
        visit(node, [])
    live = {}
    for buffer, (first, last) in spans.items():
        if buffer in front:
            first, last = 0, next((p - 1 for p in passed if p > last), END)
        live[buffer] = (first, last)
    return live
