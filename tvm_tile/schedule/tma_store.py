"""Epilogues by TMA: a fragment goes to its tensor through small shared boxes that the copy engine drains.

A copy from a fragment to a tensor becomes kind ``tma``: each warpgroup writes boxes of 64 rows and up to 128 bytes by
stmatrix (or 8-byte stores), and one thread of it stores them. ``tile.slots`` says how many boxes a warpgroup has: fewer
than its share of the fragment needs make a ring.
"""

from __future__ import annotations

from ..errors import TileTargetError
from ..ir.ops import CopyOp
from ..layout import LayoutError, SharedLayout
from ..layout.boxes import BOX_ROWS, WARPGROUP, warpgroup_boxes
from .analysis import FRAGMENT, GLOBAL, KernelView, Site, dtype_bits
from .decisions import CopyPlan, encode, read_copy, read_fragments, read_roles, read_slots
from .room import room_beside, scratch_bytes
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule
from .tma import why_not_mapped

__all__ = ["least_scratch", "store_columns", "tma_store"]

#: (fragment, tensor) dtypes: those that the stores convert on the way.
PAIRS = (("float32", "float16"), ("float32", "bfloat16"))
#: Bytes of a box's row, widest first: the swizzle spans.
SPANS = (128, 64, 32)


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        sites = [s for s in kernel.sites if isinstance(s.op, CopyOp) and _is_store(s.op)]
        others = sum(scratch_bytes(s) for s in kernel.sites if s not in sites)
        taken = others
        for site in sites:
            answer, size = _decide(sch, kernel, site, hw, taken)
            answers.append(answer)
            taken += size
    return answers or NotApplicable("no copy from a fragment to a tensor")


def _is_store(op: CopyOp) -> bool:
    return op.src.scope == FRAGMENT and op.dst.scope == GLOBAL


def _decide(sch: TileSchedule, kernel: KernelView, site: Site, hw, taken: int):
    reason = why_not_tma_store(kernel, site, hw)
    given = read_copy(site.op.annotations)
    if given is not None and given.kind == "tma":
        return _check(kernel, site, reason)
    if reason:
        return NotApplicable(f"no TMA store: {reason}", kernel.name, site.name), scratch_bytes(site)
    columns, boxes = store_columns(kernel, site)
    groups = read_fragments(kernel.info.block)[site.op.src.buffer.name].used_threads // WARPGROUP
    each = _box_bytes(site.op, columns) * groups
    free = room_beside(kernel, hw, (site,)) - taken
    slots = next((n for n in range(boxes, 0, -1) if boxes % n == 0 and n * each <= free), 0)
    if not slots:
        return (
            NotApplicable(f"no TMA store: {free} bytes of shared memory are free, a box a warpgroup takes {each}",
                          kernel.name, site.name),
            scratch_bytes(site),
        )  # fmt: skip
    vector = 16 * 8 // dtype_bits(site.op.dst.dtype)
    _replace(sch, site, "tile.copy", encode(CopyPlan("tma", columns)))
    _replace(sch, site, "tile.slots", slots)
    _replace(sch, site, "tile.vector", vector)  # the map needs a base on 16 bytes
    why = "one thread a warpgroup stores whole boxes, and bounds cost nothing"
    if slots < boxes:
        why += f"; {boxes} boxes pass through them in turn"
    return Decision(kernel.name, site.name, _text(site.op, columns, slots), why), slots * each


def _text(op: CopyOp, columns: int, slots: int) -> str:
    moved = f"{op.src.buffer.name} -> {op.dst.buffer.name} by tma"
    return f"{moved}, boxes of {BOX_ROWS} x {columns}, {slots} a warpgroup"


def _check(kernel: KernelView, site: Site, reason: str | None):
    """A given TMA store, once more: (answer, bytes of scratch)."""
    columns, boxes = (0, 0) if reason else store_columns(kernel, site)
    slots = read_slots(site.op.annotations)
    if not reason and (read_copy(site.op.annotations).vector != columns or not slots or boxes % slots):
        reason = f"boxes of {columns} columns, and slots that divide {boxes} boxes, are possible"
    if reason:
        raise TileTargetError(
            f"T.copy: {site.op.src.buffer.name} -> {site.op.dst.buffer.name} was to be stored by TMA: {reason}",
            site.location,
        )
    groups = read_fragments(kernel.info.block)[site.op.src.buffer.name].used_threads // WARPGROUP
    text = _text(site.op, columns, slots)
    return Decision(kernel.name, site.name, text, GIVEN), slots * groups * _box_bytes(site.op, columns)


def _replace(sch: TileSchedule, site: Site, key: str, value) -> None:
    """Decide anew what the copy rule decided without knowledge of roles."""
    block = sch.schedule.get_sblock(site.name, "main")
    if key in site.op.annotations:
        sch.schedule.unannotate(block, key)
    sch.schedule.annotate(block, key, value)
    site.op.annotations[key] = value


def least_scratch(kernel: KernelView, hw) -> int:
    """The fewest bytes of scratch with which a kernel's operations can be lowered."""
    total = 0
    for site in kernel.sites:
        size = scratch_bytes(site)
        if isinstance(site.op, CopyOp) and _is_store(site.op) and why_not_tma_store(kernel, site, hw) is None:
            columns, boxes = store_columns(kernel, site)
            groups = read_fragments(kernel.info.block)[site.op.src.buffer.name].used_threads // WARPGROUP
            # two boxes, so that one is written while the other is stored
            size = _box_bytes(site.op, columns) * groups * (1 if boxes % 2 else 2)
        total += size
    return total


def _box_bytes(op: CopyOp, columns: int) -> int:
    return BOX_ROWS * columns * dtype_bits(op.dst.dtype) // 8


def store_columns(kernel: KernelView, site: Site) -> tuple[int, int]:
    """(columns of a box, boxes of a warpgroup); (0, 0) where the fragment is not made of boxes."""
    layout = read_fragments(kernel.info.block)[site.op.src.buffer.name]
    bits = dtype_bits(site.op.dst.dtype)
    for span in SPANS:
        columns = span * 8 // bits
        found = warpgroup_boxes(layout, columns)
        if found:
            return columns, len(found)
    return 0, 0


def why_not_tma_store(kernel: KernelView, site: Site, hw) -> str | None:
    """Why a copy from a fragment to a tensor cannot go through the copy engine, or None where it can."""
    op: CopyOp = site.op
    if not read_roles(kernel.info.block):
        return "the kernel has one role"
    if not hw.supports("stmatrix"):
        return f"{hw.name} has no stmatrix"
    if (plan := read_copy(op.annotations)) is None or plan.kind not in ("staged", "vector", "scalar", "tma"):
        return "another instruction was given"
    source, target = op.src.dtype, op.dst.dtype
    if (source, target) not in PAIRS and (source != target or dtype_bits(target) not in (16, 32)):
        return f"it converts {source} to {target}"
    if not op.src.whole or None in op.src.axes or len(op.src.axes) != 2:
        return f"{op.src.buffer.name} is not stored as one whole matrix"
    reason = why_not_mapped(op.dst)
    if reason:
        return reason
    row, column = op.src.axes
    if op.dst.axes[-1] != column or row not in op.dst.axes[:-1]:
        return f"the fragment's columns do not run along the last dimension of {op.dst.buffer.name}"
    for other in kernel.sites:
        for access in other.of(GLOBAL):
            if access.buffer.same_as(op.dst.buffer) and other is not site:
                return f"{other.name} accesses {op.dst.buffer.name} too"
    if any(s.kind not in ("loop", "if") for s in site.path):
        return "T.ws and while loops keep all threads in one role"
    columns, _ = store_columns(kernel, site)
    if not columns:
        return f"{op.src.buffer.name} is not made of a warpgroup's boxes of 64 rows"
    try:
        SharedLayout.swizzled((BOX_ROWS, columns), dtype_bits(target), columns * dtype_bits(target) // 8)
    except LayoutError as err:
        return err.message
    return None


tma_store = Rule("tma_store", _apply)
