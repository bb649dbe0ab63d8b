"""Persistent grids: one CTA an SM visits many tiles, so that the next tile's loads run during an epilogue.

Annotation ``tile.persistent`` on the kernel block: the number of CTAs, 0 for one CTA a tile.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad, Var, is_prim_expr

from ..ir.visit import walk
from .analysis import KernelView
from .decisions import read_persistent, read_ring_loads, read_roles
from .room import room_beside
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule
from .tma_store import least_scratch

__all__ = ["persistent"]


def _apply(sch: TileSchedule, hw):
    sch.refresh()
    return [_decide(sch, kernel, hw) for kernel in sch.kernels] or NotApplicable("no kernels")


def _decide(sch: TileSchedule, kernel: KernelView, hw):
    given = read_persistent(kernel.info.block)
    if given is not None:
        return Decision(kernel.name, "grid", _text(given), GIVEN)
    reason = _why_not(kernel, hw)
    if reason:
        return NotApplicable(f"one CTA a tile: {reason}", kernel.name, "grid")
    sch.annotate_kernel(kernel, "tile.persistent", hw.sms)
    why = "the next tile is loaded while the last one is stored, and all tiles take the same time"
    return Decision(kernel.name, "grid", _text(hw.sms), why)


def _text(ctas: int) -> str:
    return f"{ctas} persistent CTAs" if ctas else "one CTA a tile"


def _why_not(kernel: KernelView, hw) -> str | None:
    if not read_roles(kernel.info.block):
        return "no warps of their own load ahead"
    tiles = 1
    for extent in kernel.info.grid:
        tiles = tiles * int(extent.value) if tiles is not None and isinstance(extent, tirx.IntImm) else None
    if tiles is not None and tiles <= hw.sms:
        return f"the grid of {tiles} is no more than one wave on {hw.sms} SMs"
    loads = read_ring_loads(kernel.info.block)
    for site in kernel.sites:
        if site.name in loads and not any(s.kind == "loop" for s in site.path):
            return f"{site.name} loads once a tile, and the next tile's load would wait until its tile is free"
    reason = _uneven(kernel)
    if reason:
        return reason
    free = room_beside(kernel, hw, tuple(kernel.sites))
    if least_scratch(kernel, hw) > free:
        return f"{free} bytes of shared memory beside the loads' tiles are too few for the epilogue"
    return None


def _uneven(kernel: KernelView) -> str | None:
    """Why tiles may take different time; the hardware balances those better, CTA by CTA."""
    for site in kernel.sites:
        for scope in site.path:
            if scope.kind == "if" and _varies(kernel, scope.node.condition):
                return "a condition depends on the tile"
            if scope.kind == "loop" and any(_varies(kernel, e) for e in (scope.node.min, scope.node.extent)):
                return f"the trips of loop {scope.node.loop_var.name} depend on the tile"
    return None


def _varies(kernel: KernelView, expression) -> bool:
    """Whether a value may differ between CTAs."""
    if not is_prim_expr(expression):
        return False
    names: list[Var] = []
    loads: list = []
    walk(expression, (Var, names.append), (TensorLoad, loads.append))
    if loads or any(name.same_as(axis) for name in names for axis in kernel.info.axes):
        return True
    return any(_varies(kernel, kernel.bound[name][0]) for name in names if name in kernel.bound)


persistent = Rule("persistent", _apply)
