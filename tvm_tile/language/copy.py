"""``T.copy``: moves a tile between global, shared and fragment memory; ``T.fill`` and ``T.clear``."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileTypeError
from .context import tile_op
from .dtypes import constant
from .emit import nest
from .regions import Region, as_region, check_disjoint, check_static, same_extent, scope_name, shape_text
from .values import snapshot

__all__ = ["clear", "copy", "fill"]


def copy(src, dst) -> None:
    """Copy a tile, converting the dtype where the two sides differ.

    Reads of a global tensor out of bounds give 0 (or the ``T.annotate_safe_value``); writes out of bounds are dropped.

    Parameters
    ----------
    src, dst : buffer, slice or element
        Global tensor, shared tile or fragment. An element (``A[i, j]``) is where the tile starts: its extents are the
        other side's, aligned with the trailing dimensions. Unit dimensions are squeezed.

    Raises
    ------
    TileShapeError
        When the two sides have different extents.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_shared((64,), "float32")
    ...         T.copy(A[bx * 64], tile)  # the second tile ends beyond A: zeros
    ...         T.copy(tile, B[bx * 64])  # what lies beyond B is dropped
    >>> a, b = np.arange(100, dtype="float32"), np.empty(100, "float32")
    >>> tvm_tile.compile(kernel, "llvm", lowering="reference")(a, b)
    >>> bool((a == b).all())
    True
    """
    context = tile_op("T.copy")
    source, target = as_region(src, "T.copy", "src"), as_region(dst, "T.copy", "dst")
    for region, argument in ((source, "src"), (target, "dst")):
        if region.scope == "variable":
            raise TileTypeError(
                f"T.copy: {argument} ({region.buffer.name}) is a T.alloc_var variable",
                advice="assign it: v = A[i], A[i] = v",
            )
    source, target = _align(source, target)
    for region, argument in ((source, "src"), (target, "dst")):
        if region.scope != "global":
            check_static(region, "T.copy", argument)
    check_disjoint(source, target, "T.copy")
    with nest(context, "copy", target.tile_shape) as axes:
        value = source.buffer[tuple(source.index(axes))]
        if source.dtype != target.dtype:
            # an explicit conversion: float -> integer truncates as a cast does
            value = tirx.Cast(target.dtype, value)
        B.buffer_store(target.buffer, value, target.index(axes))


def _align(source: Region, target: Region) -> tuple[Region, Region]:
    """Resolve element starts and check that both sides have the same extents."""
    if source.start_only and target.start_only:
        raise TileShapeError(
            f"T.copy: both {source} and {target} are single elements, so the tile's extent is unknown",
            advice="slice one side, e.g. A[i:i + 64, 0:32], or pass a whole buffer",
        )
    for start, other, flip in ((source, target, False), (target, source, True)):
        if not start.start_only:
            continue
        extents = other.extents
        if len(extents) > len(start.mins):
            extents = other.tile_shape
        if len(extents) > len(start.mins):
            raise TileShapeError(
                f"T.copy: {other} has {len(other.tile_shape)} dimensions {shape_text(other.tile_shape)}, "
                f"but {start} starts in a tensor of {len(start.mins)}",
                advice=f"index {start.buffer.name} with {len(other.tile_shape)} or more coordinates",
            )
        start = start.with_extents(extents)
        source, target = (other, start) if flip else (start, other)
    left, right = source.tile_shape, target.tile_shape
    if len(left) != len(right) or any(same_extent(a, b) is not True for a, b in zip(left, right, strict=False)):
        unknown = len(left) == len(right) and all(
            same_extent(a, b) is not False for a, b in zip(left, right, strict=False)
        )
        raise TileShapeError(
            f"T.copy: {source} is {shape_text(source.extents)}, but {target} is {shape_text(target.extents)}",
            advice=(
                "the extents are equal only for some values of the symbolic dimensions: write A[start, ...] and let "
                "the "
                "tile give the extent"
                if unknown
                else "make both sides the same shape, or give one side as an element start such as A[i, j]"
            ),
        )
    return source, target


def fill(dst, value) -> None:
    """Set every element of a buffer or slice.

    Parameters
    ----------
    dst : buffer or slice
        Shared tile, fragment, per-thread array or global tensor.
    value : scalar or expression
        The same value for all elements.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_fragment((64,), "float32")
    ...         T.fill(tile, -T.infinity("float32"))
    ...         T.fill(tile[0:8], 1)
    ...         T.copy(tile, B[bx * 64])
    """
    context = tile_op("T.fill")
    region = _target(dst, "T.fill")
    number = snapshot(constant(value, region.dtype, "T.fill"), "fill_value")
    with nest(context, "fill", region.tile_shape) as axes:
        B.buffer_store(region.buffer, number, region.index(axes))


def clear(dst) -> None:
    """Set every element of a buffer or slice to zero.

    Parameters
    ----------
    dst : buffer or slice
        Shared tile, fragment, per-thread array or global tensor.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         total = T.alloc_fragment((64,), "float32")
    ...         T.clear(total)
    ...         T.copy(total, B[bx * 64])
    """
    context = tile_op("T.clear")
    region = _target(dst, "T.clear")
    with nest(context, "fill", region.tile_shape) as axes:
        B.buffer_store(region.buffer, constant(0, region.dtype, "T.clear"), region.index(axes))


def _target(dst, what: str) -> Region:
    region = as_region(dst, what, "dst")
    if region.scope == "variable":
        raise TileTypeError(f"{what}: dst is a T.alloc_var variable", advice="assign it: v = value")
    return region


def on_chip(region: Region, what: str, argument: str) -> None:
    """Refuse a global tensor where a tile is needed."""
    if region.scope == "global":
        raise TileTypeError(
            f"{what}: {argument} ({region.buffer.name}) is {scope_name(region.buffer)}; it must be on chip",
            advice="T.copy it into a shared tile or fragment first",
        )
