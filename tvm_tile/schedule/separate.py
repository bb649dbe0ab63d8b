"""Tiles that several loops fill one after the other: each loop gets one of its own.

A producer runs ahead into the next loop while the last tiles of this one are still read, so that rings of two loops
cannot share memory. The function is rewritten before the other rules run, as tile IR that means the same; where the
tiles do not fit side by side it stays as it was written.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlockRealize
from tvm.tirx import For

from ..ir.ops import CopyOp
from ..ir.visit import rewrite, substitute
from .analysis import GLOBAL, SHARED, KernelView, Scope, kernel_views, static_shape
from .new_buffers import new_buffer, with_buffers

__all__ = ["separate_tiles"]


def separate_tiles(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc | None, dict[str, list[str]]]:
    """The function with a tile for each loop that fills it: (function or None, kernel -> tiles that were separated).

    Parameters
    ----------
    func : PrimFunc
        Tile IR that no rule has seen.
    """
    separated: dict[str, list[str]] = {}
    for kernel in kernel_views(func):
        fresh: dict[Var, dict[Var, Var]] = {}  # loop variable -> tile -> its own
        taken = {b.name for b in kernel.info.buffers}
        for buffer in kernel.buffers(SHARED):
            loops = _filling_loops(kernel, buffer)
            for loop in loops[1:]:
                own = new_buffer(static_shape(buffer), str(buffer.ty.dtype), buffer.name, SHARED, taken)
                fresh.setdefault(loop.node.loop_var, {})[buffer] = own
            if len(loops) > 1:
                separated.setdefault(kernel.name, []).append(buffer.name)
        if fresh:
            func = _rewritten(func, kernel.name, fresh)
    return (func if separated else None), separated


def _filling_loops(kernel: KernelView, buffer: Var) -> list[Scope]:
    """The pipelined loops each of which loads a tile whole before anything reads it; none if it is used elsewhere."""
    if kernel.views(buffer) or kernel.info.layouts or "tile.shared" in kernel.info.block.annotations:
        return []
    uses = list(kernel.uses(buffer))
    loads = [s for s, access in uses if access.write and s.is_load]
    loops: list[Scope] = []
    for load in loads:
        op = load.op
        if not load.path or load.path[-1].kind != "loop" or not isinstance(op, CopyOp) or op.src.scope != GLOBAL:
            return []
        if not op.dst.whole or op.dst_guard is not None:
            return []
        if int(load.path[-1].annotations.get("tile.num_stages", 0) or 0) < 1:
            return []
        loops.append(load.path[-1])
    for site, _ in uses:
        around = [n for n, loop in enumerate(loops) if any(loop is scope for scope in site.path)]
        if len(around) != 1 or site.position < loads[around[0]].position:
            return []
    return loops


def _rewritten(func: tirx.PrimFunc, name: str, fresh: dict[Var, dict[Var, Var]]) -> tirx.PrimFunc:
    def on_for(loop, mutator):
        out = mutator.default_mutate(loop)
        own = next((tiles for var, tiles in fresh.items() if var.same_as(loop.loop_var)), None)
        return out if own is None else substitute(out, own)

    def on_realize(realize, mutator):
        out = mutator.default_mutate(realize)
        if str(out.block.name_hint) != name or "tile.kernel" not in out.block.annotations:
            return out
        return with_buffers(out, [own for tiles in fresh.values() for own in tiles.values()])

    return func.with_body(rewrite(func.body, [(For, on_for), (SBlockRealize, on_realize)]))
