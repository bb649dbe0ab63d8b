"""Loads of tiles taller than their tensor: ``tile.rows`` on the copy, the rows that a TMA load brings.

A tile of 64 rows over a tensor of 3 has 61 rows of zeros in every load. The copy engine takes longer for rows outside
of the tensor than for rows inside (measured on an H200: one row of a tensor in boxes of 64 took 1.4 times the time of
64 rows), so those rows are cleared once, before the loads, and the loads leave them out.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ..ir.ops import CopyOp
from .analysis import KernelView, Site, static_shape
from .decisions import read_ring_loads, read_rows, read_shared
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["box_rows"]


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        loads = read_ring_loads(kernel.info.block)
        for site in kernel.sites:
            if site.name not in loads:
                continue
            rows, given = rows_inside(kernel, site), read_rows(site.op.annotations)
            if given is not None:
                answers.append(Decision(kernel.name, site.name, f"loads of {given} rows", GIVEN))
            elif rows is not None:
                sch.annotate(site, "tile.rows", rows)
                why = f"{site.op.src.buffer.name} has no more; the rest of {site.op.dst.buffer.name} is cleared once"
                answers.append(Decision(kernel.name, site.name, f"loads of {rows} rows", why))
    return answers or NotApplicable("no load is taller than its tensor")


def rows_inside(kernel: KernelView, site: Site) -> int | None:
    """Rows of a load's tile that can lie inside of the tensor, None where that may be all of them."""
    op: CopyOp = site.op
    buffer = op.dst.buffer
    axis = op.dst.axes[0]
    dim = next((d for d, a in enumerate(op.src.axes[:-1]) if axis is not None and a == axis), None)
    if dim is None or not read_shared(kernel.info.block)[buffer.name].span:
        return None
    extent = op.src.buffer.ty.shape[dim]
    if not isinstance(extent, tirx.IntImm) or int(extent) >= static_shape(buffer)[0]:
        return None
    if sum(access.write for _, access in kernel.uses(buffer)) != 1:
        return None
    analyzer = tvm.sym.Analyzer()
    for var, size in zip(kernel.info.axes, kernel.info.grid, strict=True):
        analyzer.bind(var, tvm.ir.Range(0, size))
    if not analyzer.can_prove(tirx.convert(op.src.mins[dim]) >= 0):
        return None
    return int(extent)


box_rows = Rule("box_rows", _apply)
