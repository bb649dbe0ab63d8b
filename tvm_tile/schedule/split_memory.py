"""Shared memory of a kernel with a front and a back: slots of rings and exchanges, space that is used twice."""

from __future__ import annotations

from ..layout.arith import round_up
from .analysis import SHARED, KernelView, Site
from .decisions import BACK, FRONT
from .resources import SharedUse, shared_peak, shared_uses
from .room import BARRIERS, scratch_bytes

__all__ = ["exchanged", "exchanges", "fitted", "signal_slots"]

#: Slots that a tile needs which both roles read: one for the back, one for the front, one that is being loaded.
ENOUGH_SLOTS = 3
#: Bytes up to which a tile finds room beside the barriers.
SMALL = 512


def exchanges(kernel: KernelView) -> list[dict]:
    """Shared tiles that the front writes for the back, those of one loop (or behind it) together."""
    groups: dict[tuple, dict] = {}
    for buffer in kernel.buffers(SHARED):
        uses = list(kernel.uses(buffer))
        writers = [s.name for s, a in uses if a.write and s.role == FRONT]
        readers = [s.name for s, a in uses if not a.write and s.role == BACK]
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
    """Bytes that are left over; negative where the tiles do not fit."""
    uses = shared_uses(kernel, roles)
    small = sum(u.total for u in uses if u.total <= SMALL)
    barriers = 16 * sum(r["slots"] for r in [*roles["rings"], *roles["exchanges"]]) + 16 * (ENOUGH_SLOTS + 1)
    large = shared_peak(uses, lambda u: 0 if u.total <= SMALL else u.total)
    # rows of the front lie within a warp, so that its reductions need no scratch
    scratch = sum(scratch_bytes(s) for s in kernel.sites if s.role == BACK)
    return hw.shared_per_block - round_up(barriers + small, BARRIERS) - scratch - large


def fitted(kernel: KernelView, hw, roles: dict) -> dict:
    """The roles with slots of rings that fit the shared memory.

    A tile that both roles read gets three slots where that fits, whatever the loop's stages: the back multiplies with
    one, the front with the next, and another is loaded. What only passes through shared memory before the loop is
    loaded into a ring's last slot, whose first load waits for it. Rings that the front alone reads make do with fewer
    slots, because it hands them back early.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    hw : GPU
        The machine.
    roles : dict
        Rings and exchanges as the loops' stages ask for them.
    """
    more = _arranged(kernel, hw, roles, ENOUGH_SLOTS)
    return more if _free(kernel, hw, more) >= 0 else _arranged(kernel, hw, roles, 0)


def _arranged(kernel: KernelView, hw, roles: dict, least: int) -> dict:
    """Rings with at least so many slots for what both roles read, guests in their last slots, less for the front."""
    roles = {**roles, "rings": [dict(ring) for ring in roles["rings"]]}
    loops = [r for r in roles["rings"] if _sites(kernel)[r["copies"][0]].path]
    sizes = {use.name: use.bytes for use in shared_uses(kernel, roles)}
    for ring in loops:
        if _users(kernel, ring) == {FRONT, BACK}:
            ring["slots"] = max(ring["slots"], least)
    for ring in roles["rings"]:
        if ring in loops or len(ring["copies"]) != 1 or any(s.path for s in _readers(kernel, ring)):
            continue
        need = sizes[_tiles(kernel, ring)[0].name]
        hosts = [h for h in loops if h["slots"] > 1 and _may_host(kernel, h, need, sizes, roles)]
        if hosts:
            host = min(hosts, key=lambda r: sizes[_tiles(kernel, r)[0].name])
            ring["inside"] = {"ring": host["name"], "slot": host["slots"] - 1}
    early = [r for r in loops if _users(kernel, r) == {FRONT} and not _hosts(roles, r)]
    while early and _free(kernel, hw, roles) < 0:
        ring = max(early, key=lambda r: r["slots"])
        if ring["slots"] == 1:
            break
        ring["slots"] -= 1
    return roles


def _sites(kernel: KernelView) -> dict[str, Site]:
    return {s.name: s for s in kernel.sites}


def _tiles(kernel: KernelView, ring: dict):
    return [_sites(kernel)[c].op.dst.buffer for c in ring["copies"]]


def _readers(kernel: KernelView, ring: dict) -> list[Site]:
    return [s for b in _tiles(kernel, ring) for s, _ in kernel.uses(b) if s.role]


def _users(kernel: KernelView, ring: dict) -> set[str]:
    return {s.role for s in _readers(kernel, ring)}


def _hosts(roles: dict, ring: dict) -> bool:
    return any(r.get("inside", {}).get("ring") == ring["name"] for r in roles["rings"])


def _may_host(kernel: KernelView, ring: dict, need: int, sizes: dict[str, int], roles: dict) -> bool:
    return len(ring["copies"]) == 1 and sizes[_tiles(kernel, ring)[0].name] >= need and not _hosts(roles, ring)


def exchanged(kernel: KernelView, hw, roles: dict) -> dict:
    """The roles with two slots for what crosses in a loop, where there is room: the front then runs further ahead.

    Where there is none, the largest tile that crosses takes the slots of a ring that the front alone reads: once the
    front's products are complete nobody needs what was loaded, and the slot is loaded again when the back has read.
    """
    for number, exchange in enumerate(roles["exchanges"]):
        if not _sites(kernel)[exchange["writers"][0]].path:
            continue
        for more in ({"slots": 2}, *_shared_slots(kernel, roles, exchange)):
            rings = [
                {**r, "slots": 2} if r["name"] == more.get("over", {}).get("ring") else r for r in roles["rings"]
            ]
            entries = [{**e, **more} if n == number else e for n, e in enumerate(roles["exchanges"])]
            tried = {**roles, "rings": rings, "exchanges": entries}
            if _free(kernel, hw, tried) >= 0:
                roles = tried
                break
    return roles


def _shared_slots(kernel: KernelView, roles: dict, exchange: dict) -> list[dict]:
    """Two slots of an exchange whose largest tile takes those of a ring, for each ring that fits."""
    uses: dict[str, SharedUse] = {use.name: use for use in shared_uses(kernel, roles)}
    tile = max(exchange["tiles"], key=lambda name: uses[name].bytes)
    path = _sites(kernel)[exchange["writers"][0]].path
    found = []
    for ring in roles["rings"]:
        if len(ring["copies"]) != 1 or "inside" in ring or _hosts(roles, ring) or _users(kernel, ring) != {FRONT}:
            continue
        load, held = _sites(kernel)[ring["copies"][0]], _tiles(kernel, ring)[0]
        early = all(
            s.position < write.position
            for s in _readers(kernel, ring)
            for write in (_sites(kernel)[name] for name in exchange["writers"])
        )
        if load.path == path and len(path) == 1 and early and uses[held.name].bytes == uses[tile].bytes:
            found.append({"slots": 2, "over": {"ring": ring["name"], "tile": tile}})
    return found


def signal_slots(kernel: KernelView, roles: dict) -> int:
    """Slots of the signal by which the front's products go before the back's, 0 where they do not.

    With two slots the next tile is loaded while the back multiplies: waiting for the product that reads it would leave
    the tensor cores idle. The front is at most one signal ahead of the slots that it may fill.
    """
    for ring in roles["rings"]:
        if _users(kernel, ring) == {FRONT, BACK} and ring["slots"] < ENOUGH_SLOTS:
            return 0
    return 1 + max(e["slots"] for e in roles["exchanges"])
