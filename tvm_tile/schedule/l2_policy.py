"""What L2 keeps of a load: ``tile.l2`` on the copy, "evict_first" for tiles of one CTA, else "evict_normal".

A tile that one CTA reads is of no use once it has it; evicted first, it leaves the room to what is read again. Measured
on an H200, with the hint and without, each pair in one run: GEMM with 1, 16, 64 and 128 rows 33.7 and 34.1, 33.9 and
34.1, 35.1 and 35.7, 39.3 and 39.5 us. Tiles of several CTAs stay, because they do not read them at the same time: MLA
decode, whose keys two CTAs read, took 240 and 232 us, persistent causal attention 1215 and 1113 us.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.ir import Var

from ..errors import TileTypeError
from ..ir.ops import CopyOp
from ..ir.visit import mentions, substitute
from .analysis import KernelView, Site
from .decisions import L2_POLICIES, read_ring_loads
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["l2_policy"]

#: Steps along an axis of the grid from which its places are counted.
SAMPLES = 64


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        loads = read_ring_loads(kernel.info.block)
        for site in kernel.sites:
            if site.name not in loads:
                continue
            given = sch.given(site, "tile.l2")
            if given is not None:
                if given not in L2_POLICIES:
                    raise TileTypeError(f"tile.l2 of {site.name} is {given!r}, not one of {', '.join(L2_POLICIES)}")
                answers.append(Decision(kernel.name, site.name, f"L2: {given}", GIVEN))
                continue
            readers = _readers(kernel, site)
            if readers != 1:
                continue
            sch.annotate(site, "tile.l2", "evict_first")
            answers.append(Decision(kernel.name, site.name, "L2: evict_first", "one CTA reads each tile"))
    return answers or NotApplicable("every tile is read by several CTAs")


def _readers(kernel: KernelView, site: Site) -> int | None:
    """CTAs that load the same tile at least, None where that is not known.

    A dimension along which a loop moves counts as swept by every CTA: causal rows read keys from different ends, and
    all of them read most.
    """
    op: CopyOp = site.op
    loops = [scope.node.loop_var for scope in site.loops]
    place = [low for low in (_expanded(kernel, low) for low in op.src.mins) if not any(mentions(low, v) for v in loops)]
    readers = 1.0
    for axis, extent in zip(kernel.info.axes, kernel.info.grid, strict=True):
        if not isinstance(extent, int | tirx.IntImm):
            return None
        steps = min(int(extent), SAMPLES)
        places = _distinct(place, axis, steps)
        readers *= int(extent) if places == 1 else steps / places
    return max(1, round(readers))


def _expanded(kernel: KernelView, expression):
    """An index in terms of the grid, loops and memory: bound names replaced by what they stand for."""
    expression = tirx.convert(expression)
    known = {v: value for v, (value, _) in kernel.bound.items() if mentions(expression, v)}
    return _expanded(kernel, substitute(expression, known)) if known else expression


def _distinct(place: list, axis: Var, steps: int) -> int:
    """Different places along one axis of the grid."""
    moving = [low for low in place if mentions(low, axis)]
    if not moving:
        return 1
    analyzer = tvm.sym.Analyzer()
    seen = set()
    for step in range(steps):
        at = [analyzer.simplify(substitute(low, {axis: tirx.const(step, axis.ty.dtype)})) for low in moving]
        seen.add(tuple(str(value) for value in at))
    return len(seen)


l2_policy = Rule("l2_policy", _apply)
