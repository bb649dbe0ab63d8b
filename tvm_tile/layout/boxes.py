"""Boxes of a fragment: which runs of registers hold a 64-row rectangle on each warpgroup, as wgmma accumulates it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .fragment import Fragment

__all__ = ["BOX_ROWS", "WARPGROUP", "warpgroup_boxes"]

WARPGROUP = 128
BOX_ROWS = 64


@lru_cache(maxsize=256)
def warpgroup_boxes(layout: Fragment, columns: int) -> tuple[int, ...] | None:
    """First registers of the boxes of ``64 x columns`` elements that tile every warpgroup's share of a fragment.

    Inside a box register ``e`` of thread ``t`` of a warpgroup holds row ``16 (t // 32) + t % 32 // 4 + 8 (e // 2 % 2)``
    and column ``8 (e // 4) + 2 (t % 4) + e % 2``: the accumulator of wgmma. Source: PTX ISA 8.8, wgmma.mma_async.

    Parameters
    ----------
    layout : Fragment
        A two-dimensional fragment.
    columns : int
        Columns of a box, a multiple of 8.

    Returns
    -------
    tuple of int or None
        One entry a box, in the order of the registers; None where the fragment is not made of such boxes.
    """
    registers = columns * BOX_ROWS // WARPGROUP
    if layout.ndim != 2 or layout.is_padded or layout.replicate or columns % 8:
        return None
    if layout.used_threads % WARPGROUP or layout.registers % registers:
        return None
    thread, register = np.arange(layout.used_threads)[:, None], np.arange(layout.registers)[None, :]
    shape = (layout.used_threads, layout.registers)
    row, column = (np.broadcast_to(c, shape) for c in layout.coords(thread, register))
    first, e = register - register % registers, register % registers
    lane = thread % WARPGROUP
    row0, column0 = (c[thread - lane, first] for c in (row, column))
    rows = row0 + 16 * (lane // 32) + lane % 32 // 4 + 8 * (e // 2 % 2)
    if not (np.array_equal(row, rows) and np.array_equal(column, column0 + 8 * (e // 4) + 2 * (lane % 4) + e % 2)):
        return None
    return tuple(range(0, layout.registers, registers))
