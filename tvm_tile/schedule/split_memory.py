"""Shared memory of a kernel with a front and a back: slots of rings and exchanges, space that is used twice, parts."""

from __future__ import annotations

from ..ir.ops import GemmOp
from .analysis import SHARED, KernelView, Site
from .decisions import BACK, FRONT
from .resources import SharedUse, shared_peak, shared_uses
from .room import BARRIERS, scratch_bytes

__all__ = ["arrival", "exchanged", "exchanges", "fitted", "signal_slots"]

#: Parts of a tile that arrive one by one.
PARTS = 4
#: Slots from which on the memory's latency is hidden although the back hands slots back late.
ENOUGH_SLOTS = 3


def arrival(load: Site, first: Site | None, layouts: dict, slots: int) -> dict:
    """How a ring's tile arrives: in parts, so that the front's product can begin with the first; by way of L2.

    Parameters
    ----------
    load : Site
        The load that fills a slot.
    first : Site or None
        The operation that reads it first.
    layouts : dict
        Layouts of shared tiles by name.
    slots : int
        Slots of the ring.
    """
    buffer = load.op.dst.buffer
    along = first is not None and isinstance(first.op, GemmOp) and first.op.b.buffer.same_as(buffer)
    in_parts = along and first.op.trans_b and layouts[buffer.name].blocks % PARTS == 0
    return {"parts": PARTS if in_parts else 1, "prefetch": int(slots < ENOUGH_SLOTS)}


def exchanges(kernel: KernelView) -> list[dict]:
    """Shared tiles that the front writes for the back, those of one loop (or behind it) together."""
    groups: dict[tuple, dict] = {}
    for buffer in kernel.buffers(SHARED):
        uses = [(s, a) for s, a in kernel.uses(buffer) if "tile.role" in s.op.annotations]
        writers = [s.name for s, a in uses if a.write and s.op.annotations["tile.role"] == FRONT]
        readers = [s.name for s, a in uses if not a.write and s.op.annotations["tile.role"] == BACK]
        if not writers or not readers:
            continue
        path = tuple(id(scope) for scope in uses[0][0].path)
        start = {"name": f"to_back_{buffer.name}", "tiles": [], "writers": [], "readers": [], "slots": 1}
        group = groups.setdefault(path, start)
        group["tiles"].append(buffer.name)
        group["writers"] += [w for w in writers if w not in group["writers"]]
        group["readers"] += [r for r in readers if r not in group["readers"]]
    return list(groups.values())


def _free(kernel: KernelView, hw, roles: dict) -> int:
    # rows of the front lie within a warp, so that its reductions need no scratch
    scratch = sum(scratch_bytes(s) for s in kernel.sites if s.op.annotations.get("tile.role") == BACK)
    return hw.shared_per_block - BARRIERS - scratch - shared_peak(shared_uses(kernel, roles))


def fitted(kernel: KernelView, hw, roles: dict) -> dict:
    """The roles with rings that make do with less memory.

    What only passes through shared memory before the loop is loaded into the last slot of a ring, whose first load
    waits for it. Rings that the front alone reads get fewer slots while the tiles do not fit: it hands them back early.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    hw : GPU
        The machine.
    roles : dict
        Rings and exchanges as the loops' stages ask for them.
    """
    roles = {**roles, "rings": [dict(ring) for ring in roles["rings"]]}
    sites = {s.name: s for s in kernel.sites}
    sizes = {use.name: use.bytes for use in shared_uses(kernel, roles)}

    def tiles(ring: dict):
        return [sites[c].op.dst.buffer for c in ring["copies"]]

    def readers(ring: dict) -> list[Site]:
        return [s for b in tiles(ring) for s, a in kernel.uses(b) if "tile.role" in s.op.annotations]

    loops = [r for r in roles["rings"] if sites[r["copies"][0]].path]
    for ring in roles["rings"]:
        if ring in loops or len(ring["copies"]) != 1 or any(s.path for s in readers(ring)):
            continue
        need = sizes[tiles(ring)[0].name]
        taken = {r["inside"]["ring"] for r in roles["rings"] if "inside" in r}
        hosts = [
            r for r in loops
            if len(r["copies"]) == 1 and r["slots"] > 1 and sizes[tiles(r)[0].name] >= need and r["name"] not in taken
        ]  # fmt: skip
        if hosts:
            host = min(hosts, key=lambda r: sizes[tiles(r)[0].name])
            ring["inside"] = {"ring": host["name"], "slot": host["slots"] - 1}
    early = [r for r in loops if all(s.op.annotations["tile.role"] == FRONT for s in readers(r))]
    while _free(kernel, hw, roles) < 0:
        ring = max(early, key=lambda r: r["slots"], default=None)
        if ring is None or ring["slots"] == 1:
            break
        if any(r.get("inside", {}).get("ring") == ring["name"] for r in roles["rings"]):
            early.remove(ring)
            continue
        ring["slots"] -= 1
    return roles


def exchanged(kernel: KernelView, hw, roles: dict) -> dict:
    """The roles with two slots for what crosses in a loop, where there is room: the front then runs further ahead."""
    uses: dict[str, SharedUse] = {use.name: use for use in shared_uses(kernel, roles)}
    free, made = _free(kernel, hw, roles), []
    sites = {s.name: s for s in kernel.sites}
    for exchange in roles["exchanges"]:
        more = sum(uses[name].bytes for name in exchange["tiles"])
        slots = 2 if sites[exchange["writers"][0]].path and more <= free else 1
        free -= more * (slots - 1)
        made.append({**exchange, "slots": slots})
    return {**roles, "exchanges": made}


def signal_slots(kernel: KernelView, roles: dict) -> int:
    """Slots of the signal by which the front's products go before the back's, 0 where they do not.

    With two slots the next tile is loaded while the back multiplies: waiting for the product that reads it would leave
    the tensor cores idle. The front is at most one signal ahead of the slots that it may fill.
    """
    sites = {s.name: s for s in kernel.sites}
    for ring in roles["rings"]:
        targets = [sites[c].op.dst.buffer for c in ring["copies"]]
        users = {s.op.annotations.get("tile.role") for b in targets for s, _ in kernel.uses(b)}
        if {FRONT, BACK} <= users and ring["slots"] < ENOUGH_SLOTS:
            return 0
    return 1 + max(e["slots"] for e in roles["exchanges"])
