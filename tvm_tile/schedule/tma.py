"""When the tensor memory accelerator can move a tile: conditions on the tensor, the tile and its layout.

Source: CUDA Driver API, ``cuTensorMapEncodeTiled``.
"""

from __future__ import annotations

from tvm import tirx

from ..ir.ops import CopyOp, Region
from ..layout import LayoutError, SharedLayout
from .analysis import GLOBAL, SHARED, dtype_bits, static_shape

__all__ = ["why_not_mapped", "why_not_tma"]


def why_not_tma(op: CopyOp, layout: SharedLayout) -> str | None:
    """Why TMA cannot load (or store) a copy's tile, or None where it can.

    The hardware fills what lies outside of the tensor with zeros and drops stores there: the language's own rule.

    Parameters
    ----------
    op : CopyOp
        A copy between a global tensor and a shared tile.
    layout : SharedLayout
        The tile's layout.
    """
    if {op.src.scope, op.dst.scope} != {GLOBAL, SHARED}:
        return "it does not move between a global tensor and a shared tile"
    outside, inside = (op.src, op.dst) if op.src.scope == GLOBAL else (op.dst, op.src)
    tensor = outside.buffer
    if outside.dtype != inside.dtype:
        return f"it converts {op.src.dtype} to {op.dst.dtype}"
    if op.safe_value != 0:
        return f"elements outside of {tensor.name} give {op.safe_value}, the hardware gives 0"
    if len(static_shape(inside.buffer)) != 2 or not inside.whole:
        return f"{inside.buffer.name} is not used as one whole two-dimensional tile"
    if inside.axes[1] is None or outside.axes[-1] != inside.axes[1]:
        return f"the tile's columns do not run along the last dimension of {tensor.name}"
    reason = why_not_mapped(outside)
    if reason:
        return reason
    try:
        layout.tma_boxes()
    except LayoutError as err:
        return err.message
    return None


def why_not_mapped(region: Region) -> str | None:
    """Why a tensor cannot have a tensor map, or None where it can.

    Parameters
    ----------
    region : Region
        The global side of a copy.
    """
    tensor, bits = region.buffer, dtype_bits(region.dtype)
    rank = len(tensor.ty.shape)
    if not 2 <= rank <= 5:
        return f"{tensor.name} has {rank} dimensions; tensor maps of tiles have 2 to 5"
    strides = list(tensor.ty.strides)
    if strides and not _is(strides[-1], 1):
        return f"the last dimension of {tensor.name} is not contiguous"
    for pitch in strides[:-1] or [tensor.ty.shape[-1]]:
        if not isinstance(pitch, tirx.IntImm):
            return f"the row pitch of {tensor.name} is symbolic, so it may be no multiple of 16 bytes"
        if int(pitch) * bits % 128:
            return f"a row of {tensor.name} has {int(pitch) * bits // 8} bytes, no multiple of 16"
    return None


def _is(value, number: int) -> bool:
    return isinstance(value, tirx.IntImm) and int(value) == number
