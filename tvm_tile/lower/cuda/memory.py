"""The shared pool: tiles placed by liveness, so that an epilogue reuses the space of the main loop's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import TensorLoad, Var

from ...errors import TileResourceError
from ...ir.visit import walk
from ...layout.arith import round_up
from .program import CondNode, GroupNode, LoopNode, MicroNode, Node, RawNode, WhileNode
from .storage import SharedTile, Storage

__all__ = ["Placement", "place_tiles"]

SMALL = 2048
#: After every position.
END = 1 << 30


@dataclass
class Placement:
    """Result of planning: the pool's size and when each tile is live (positions in the walk)."""

    bytes: int
    live: dict[Var, tuple[int, int]]

    def overlap(self, storage: Storage, a: Var, b: Var) -> bool:
        """Whether two different buffers occupy common bytes of the pool."""
        if a not in storage.tiles or b not in storage.tiles:
            return False
        left, right = storage.tiles[a], storage.tiles[b]
        return left.byte_offset < right.byte_offset + right.bytes and right.byte_offset < left.byte_offset + left.bytes


def place_tiles(
    storage: Storage,
    nodes: list[Node],
    limit: int,
    scratch: set[Var],
    location=None,
    reserved: int = 0,
    from_start: set[Var] = frozenset(),
    known: dict[Var, tuple[int, int]] | None = None,
    inside: dict[Var, tuple[Var, int]] | None = None,
) -> Placement:
    """Give every shared tile its offset in the pool.

    Parameters
    ----------
    storage : Storage
        Its tiles get their ``byte_offset``.
    nodes : list
        The kernel's tree in steps.
    limit : int
        Bytes that a CTA may have on the target.
    scratch : set of Var
        Tiles of the compiler's own: their values never live from one use to the next, so a loop does not keep them.
    location : SourceLocation, optional
        The kernel, for the error.
    reserved : int
        Bytes at the start of the pool that belong to barriers.
    from_start : set of Var
        Tiles that are filled before the walk reaches their first use (by a producer).
    known : dict, optional
        When tiles are live, where the walk cannot tell because warps with different roles run side by side; tiles of
        the compiler's own then have their own space.
    inside : dict, optional
        Tile -> (tile, copy) whose space it takes.

    Raises
    ------
    TileResourceError
        When the tiles that are live together do not fit.
    """
    live = _liveness(storage, nodes, scratch)
    if known is not None:
        live = {b: known.get(b, (0, END)) for b in live}
    for buffer in scratch & set(live):
        # small tiles of their own space: sharing it would only cost barriers
        if storage.tiles[buffer].bytes <= SMALL:
            live[buffer] = (0, END)
    for buffer, tile in storage.tiles.items():
        if tile.lasting:
            live[buffer] = (0 if tile.lasting == "always" else live[buffer][0], END)
    for buffer in from_start:
        live[buffer] = (0, live.get(buffer, (0, 0))[1])
    guests = {b: live.pop(b) for b in inside or {} if b in live}
    order = sorted(live, key=lambda b: (-storage.tiles[b].bytes, live[b][0]))
    placed: list[Var] = []
    total = reserved
    for buffer in order:
        tile = storage.tiles[buffer]
        align = max(tile.layout.alignment, 16)
        at = round_up(reserved, align)
        # first gap among the tiles that are live at the same time
        for other in sorted(
            (p for p in placed if _meet(live[p], live[buffer])), key=lambda p: storage.tiles[p].byte_offset
        ):
            taken = storage.tiles[other]
            if at + tile.bytes <= taken.byte_offset:
                break
            at = max(at, round_up(taken.byte_offset + taken.bytes, align))
        tile.byte_offset = at
        placed.append(buffer)
        total = max(total, at + tile.bytes)
    for buffer in guests:
        host, copy = inside[buffer]
        storage.tiles[buffer].byte_offset = storage.tiles[host].byte_offset + copy * storage.tiles[host].version_bytes
    live |= guests
    for buffer, tile in storage.tiles.items():
        if tile.base is not None:
            tile.byte_offset = tile.base.byte_offset
        if tile.byte_offset is None:  # never touched
            tile.byte_offset = 0
            live.setdefault(buffer, (-1, -1))
    if total > limit:
        raise _too_large([storage.tiles[b] for b in order], total, limit, location)
    return Placement(total, live)


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def _liveness(storage: Storage, nodes: list[Node], scratch: set[Var]) -> dict[Var, tuple[int, int]]:
    live: dict[Var, tuple[int, int]] = {}
    position = 0

    def touch(buffer: Var, loops: list[list[Var]]) -> None:
        if buffer not in storage.tiles:
            return
        tile = storage.tiles[buffer]
        buffer = tile.buffer if tile.base is None else tile.base.buffer
        first, last = live.get(buffer, (position, position))
        live[buffer] = (min(first, position), max(last, position))
        if buffer not in scratch:
            for touched in loops:
                touched.append(buffer)

    def visit(node: Node, loops: list[list[Var]]) -> None:
        nonlocal position
        position += 1
        if isinstance(node, MicroNode):
            for access in [*node.reads, *node.writes]:
                touch(access.buffer, loops)
        elif isinstance(node, RawNode):
            walk(node.stmt, (TensorLoad, lambda load: touch(load.source, loops)))
        elif isinstance(node, CondNode):
            walk(node.condition, (TensorLoad, lambda load: touch(load.source, loops)))
            for inner in [*node.then, *node.orelse]:
                visit(inner, loops)
        elif isinstance(node, GroupNode):
            for inner in node.body:
                visit(inner, loops)
        elif isinstance(node, LoopNode | WhileNode):
            start, touched = position, []
            if isinstance(node, WhileNode):
                walk(node.condition, (TensorLoad, lambda load: touch(load.source, [*loops, touched])))
            for inner in node.body:
                visit(inner, [*loops, touched])
            position += 1
            # a value may flow from one iteration to the next
            for buffer in touched:
                first, last = live[buffer]
                live[buffer] = (min(first, start), max(last, position))

    for node in nodes:
        visit(node, [])
    return live


def _too_large(tiles: list[SharedTile], total: int, limit: int, location) -> TileResourceError:
    lines = [
        f"  {t.buffer.name}: {t.bytes} bytes"
        + (f" ({t.versions} copies of {t.version_bytes})" if t.versions > 1 else "")
        for t in tiles
    ]
    return TileResourceError(
        f"shared memory: {total} bytes are live together, but a CTA has {limit}\n" + "\n".join(lines),
        location,
        "use a smaller tile or fewer num_stages",
    )
