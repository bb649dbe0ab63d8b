"""The order in which CTAs visit the grid: ``tile.raster`` on the kernel block, from ``T.use_swizzle``."""

from __future__ import annotations

from tvm import tirx

from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["rasterisation"]


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        given = sch.given_kernel(kernel, "tile.raster")
        if given is not None:
            answers.append(Decision(kernel.name, "grid", f"panels of {given[0]}, {given[1]}", GIVEN))
            continue
        if kernel.info.swizzle is None:
            answers.append(NotApplicable("no T.use_swizzle: launch order", kernel.name, "grid"))
            continue
        panel, order = kernel.info.swizzle
        grid = kernel.info.grid
        if len(grid) < 2 or any(isinstance(e, tirx.IntImm) and int(e.value) == 1 for e in grid[:2]):
            answers.append(NotApplicable("T.use_swizzle: the grid has one row of CTAs only", kernel.name, "grid"))
            continue
        if panel == 1:
            answers.append(NotApplicable("T.use_swizzle(1) is launch order", kernel.name, "grid"))
            continue
        sch.annotate_kernel(kernel, "tile.raster", [panel, order])
        why = (
            f"T.use_swizzle: the CTAs that run together share {'rows' if order == 'row' else 'columns'} of tiles in L2"
        )
        answers.append(Decision(kernel.name, "grid", f"panels of {panel}, {order}", why))
    return answers


rasterisation = Rule("rasterisation", _apply)
