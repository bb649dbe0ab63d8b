"""Shared memory that a kernel's tiles leave free: what the compiler's own scratch may take."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.ops import CopyOp, CumsumOp, GemmOp, ReduceOp
from .analysis import GLOBAL, KernelView, Site, dtype_bits
from .decisions import read_copy, read_partition, read_persistent
from .resources import shared_uses

__all__ = ["BARRIERS", "room_beside", "scratch_bytes"]

#: Barriers at the start of the pool, rounded up to the alignment of swizzled tiles.
BARRIERS = 1024
#: What reductions across warps and scans may take each.
REDUCTION = 4096


def room_beside(kernel: KernelView, hw, sites: Sequence[Site]) -> int:
    """Bytes free beside all tiles that are live at (or after) any of some operations.

    Parameters
    ----------
    kernel : KernelView
        A kernel whose pipelines are decided.
    hw : GPU
        The machine.
    sites : sequence of Site
        Where the space is needed; in a persistent kernel every tile is live everywhere.
    """
    uses = shared_uses(kernel)
    # the front and the back run side by side: scratch of theirs has its own space
    if not read_persistent(kernel.info.block) and not kernel.split:
        first = min((s.loops[0].position if s.loops else s.position for s in sites), default=0)
        if len(sites) < len(kernel.sites):
            uses = [u for u in uses if u.last >= first]
    return hw.shared_per_block - BARRIERS - sum(u.total for u in uses)


def scratch_bytes(site: Site) -> int:
    """Scratch of an operation other than a TMA store, an upper estimate."""
    op = site.op
    if isinstance(op, ReduceOp | CumsumOp):
        return REDUCTION
    if isinstance(op, GemmOp) and (part := read_partition(op.annotations)) is not None and part.k_groups > 1:
        return op.m * op.n * 4
    if isinstance(op, CopyOp) and (plan := read_copy(op.annotations)) is not None and plan.kind == "staged":
        if op.src.scope == GLOBAL:
            return 0
        size = dtype_bits(op.dst.dtype) // 8
        for extent in site.extents:
            size *= extent or 1
        return size
    return 0
