"""Reductions and scans of tiles: max, min, sum, absmax, abssum, any, all, cumsum."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileTypeError
from .context import tile_op
from .copy import on_chip
from .dtypes import is_float, is_integer, isnan
from .emit import block, nest
from .regions import Region, as_region, check_disjoint, check_static, const_int, shape_text

__all__ = ["all_of", "any_of", "cumsum", "reduce_abssum", "reduce_absmax", "reduce_max", "reduce_min", "reduce_sum"]


def _extreme(dtype: str, largest: bool):
    """The identity of min (``largest``) or max in a dtype."""
    if is_float(dtype):
        # e4m3fn has no infinity: its largest finite value is the identity
        limit = 448.0 if dtype == "float8_e4m3fn" else math.inf
        return tirx.const(limit if largest else -limit, dtype)
    if dtype == "bool":
        return tirx.const(largest, "bool")
    return tirx.max_value(dtype) if largest else tirx.min_value(dtype)


def _pick(a, b, larger: bool):
    """max or min of two values where NaN wins, whichever side it is on (IEEE 754-2019 maximum / minimum)."""
    dtype = str(a.ty.dtype)
    better = a > b if larger else a < b
    if is_float(dtype):
        better = tirx.Or(better, isnan(a))
    return tirx.Select(better, a, b)


def _absolute(x):
    return x if str(x.ty.dtype).startswith("u") or str(x.ty.dtype) == "bool" else tirx.abs(x)


# kind -> (identity of a dtype, combine, transform of an element)
_KINDS = {
    "max": (lambda d: _extreme(d, False), lambda a, b: _pick(a, b, True), lambda x: x),
    "min": (lambda d: _extreme(d, True), lambda a, b: _pick(a, b, False), lambda x: x),
    "sum": (lambda d: tirx.const(0, d), lambda a, b: a + b, lambda x: x),
    "absmax": (lambda d: tirx.const(0, d), lambda a, b: _pick(a, b, True), _absolute),
    "abssum": (lambda d: tirx.const(0, d), lambda a, b: a + b, _absolute),
    "any": (lambda d: tirx.const(False, d), lambda a, b: tirx.Or(a, b), lambda x: x),
    "all": (lambda d: tirx.const(True, d), lambda a, b: tirx.And(a, b), lambda x: x),
}


def _reduce(kind: str, src, dst, dim: int, clear: bool, what: str) -> None:
    context = tile_op(what)
    source, target = as_region(src, what, "src"), as_region(dst, what, "dst")
    on_chip(source, what, "src")
    on_chip(target, what, "dst")
    shape, out = check_static(source, what, "src"), check_static(target, what, "dst")
    axis = const_int(dim)
    if axis is None:
        raise TileTypeError(f"{what}: dim must be a Python integer, but it is {dim!r}")
    if not -len(shape) <= axis < len(shape):
        raise TileShapeError(
            f"{what}: dim={axis} is out of range for {source} of shape {shape_text(shape)}",
            advice=f"dim is between {-len(shape)} and {len(shape) - 1}",
        )
    axis %= len(shape)
    rest = shape[:axis] + shape[axis + 1 :]
    kept = shape[:axis] + [1] + shape[axis + 1 :]
    if out not in (rest or [1], kept):
        raise TileShapeError(
            f"{what}: {source} {shape_text(shape)} over dim {axis} gives {shape_text(rest or [1])}, "
            f"but dst is {shape_text(out)}",
            advice=f"allocate dst as T.alloc_fragment({shape_text(rest or [1])}, {target.dtype!r})",
        )
    if source.dtype == "bool" and kind in ("sum", "absmax", "abssum"):
        raise TileTypeError(
            f"{what}: cannot reduce bool values", advice="use T.any_of or T.all_of, or copy them to int32 first"
        )
    if source.dtype != target.dtype and (is_float(source.dtype) and is_integer(target.dtype)):
        raise TileTypeError(
            f"{what}: src is {source.dtype}, dst is {target.dtype}",
            advice=f"reduce into {source.dtype} and convert with T.copy",
        )
    check_disjoint(source, target, what)
    identity, combine, transform = _KINDS[kind]
    order = [d for d in range(len(shape)) if d != axis] + [axis]  # the reduced axis innermost
    extents = [shape[d] for d in order]
    kinds = "S" * (len(shape) - 1) + "R"
    attrs = {"tile.reduce": kind, "tile.dim": axis, "tile.clear": int(bool(clear))}
    with nest(context, "reduce", extents, attrs, kinds) as axes:
        by_dim = dict(zip(order, axes, strict=False))
        at = _target_index(target, out, kept, rest, by_dim, axis)
        if clear:
            with B.init():
                B.buffer_store(target.buffer, identity(target.dtype), at)
        element = source.buffer[tuple(source.full_index([by_dim[d] for d in range(len(shape))]))]
        if source.dtype != target.dtype:
            element = tirx.Cast(target.dtype, element)
        B.buffer_store(target.buffer, combine(target.buffer[tuple(at)], transform(element)), at)


def _target_index(target: Region, out, kept, rest, by_dim, axis) -> list:
    if out == kept:
        return target.full_index([0 if d == axis else by_dim[d] for d in range(len(kept))])
    if not rest:
        return target.full_index([0])
    return target.full_index([by_dim[d] for d in sorted(by_dim) if d != axis])


def reduce_max(src, dst, dim: int = -1, clear: bool = True) -> None:
    """Maximum over one dimension; NaN propagates.

    Parameters
    ----------
    src : buffer or slice
        Fragment or shared tile.
    dst : buffer or slice
        ``src``'s shape without ``dim`` (or with extent 1 there); ``(1,)`` for a one-dimensional ``src``.
    dim : int
        The reduced dimension.
    clear : bool
        Start afresh; False combines with the values in ``dst``.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_fragment((8, 16), "float32")
    ...         row = T.alloc_fragment((8,), "float32")
    ...         T.copy(A, tile)
    ...         T.reduce_max(tile, row, dim=1)
    ...         T.copy(row, B)
    """
    _reduce("max", src, dst, dim, clear, "T.reduce_max")


def reduce_min(src, dst, dim: int = -1, clear: bool = True) -> None:
    """Minimum over one dimension; NaN propagates. Parameters as in :func:`reduce_max`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_fragment((8, 16), "float32")
    ...         row = T.alloc_fragment((8,), "float32")
    ...         T.copy(A, tile)
    ...         T.reduce_min(tile, row, dim=1)
    ...         T.copy(row, B)
    """
    _reduce("min", src, dst, dim, clear, "T.reduce_min")


def reduce_sum(src, dst, dim: int = -1, clear: bool = True) -> None:
    """Sum over one dimension. Parameters as in :func:`reduce_max`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_fragment((8, 16), "float32")
    ...         row = T.alloc_fragment((8,), "float32")
    ...         T.copy(A, tile)
    ...         T.reduce_sum(tile, row, dim=1)
    ...         T.copy(row, B)
    """
    _reduce("sum", src, dst, dim, clear, "T.reduce_sum")


def reduce_absmax(src, dst, dim: int = -1, clear: bool = True) -> None:
    """Largest absolute value over one dimension; NaN propagates. Parameters as in :func:`reduce_max`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_fragment((8, 16), "float32")
    ...         row = T.alloc_fragment((8,), "float32")
    ...         T.copy(A, tile)
    ...         T.reduce_absmax(tile, row, dim=1)
    ...         T.copy(row, B)
    """
    _reduce("absmax", src, dst, dim, clear, "T.reduce_absmax")


def reduce_abssum(src, dst, dim: int = -1, clear: bool = True) -> None:
    """Sum of absolute values over one dimension. Parameters as in :func:`reduce_max`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((8, 16), "float32"), B: T.Tensor((8,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_fragment((8, 16), "float32")
    ...         row = T.alloc_fragment((8,), "float32")
    ...         T.copy(A, tile)
    ...         T.reduce_abssum(tile, row, dim=1)
    ...         T.copy(row, B)
    """
    _reduce("abssum", src, dst, dim, clear, "T.reduce_abssum")


def _vote(kind: str, src, what: str):
    context = tile_op(what)
    source = as_region(src, what, "src")
    shape = check_static(source, what, "src")
    if source.dtype != "bool" and not is_integer(source.dtype):
        raise TileTypeError(
            f"{what}: {source} has dtype {source.dtype}; it must be bool or an integer",
            advice="compare element-wise first: flags[i] = x[i] > 0 in T.Parallel",
        )
    result = B.sblock_alloc_buffer((1,), "bool", scope="local.var")
    from .alloc import name_value

    name_value(context.unique(f"{kind}_result"), result)
    identity, combine, _ = _KINDS[kind]
    attrs = {"tile.reduce": kind, "tile.dim": -1, "tile.clear": 1}
    with nest(context, "reduce", shape, attrs, "R" * len(shape)) as axes:
        with B.init():
            B.buffer_store(result, identity("bool"), [0])
        element = source.buffer[tuple(source.full_index(axes))]
        if source.dtype != "bool":
            element = element != tirx.const(0, source.dtype)
        B.buffer_store(result, combine(result[0], element), [0])
    return result[0]


def any_of(src):
    """Whether any element of a tile is true (non-zero): a bool for the whole CTA.

    Parameters
    ----------
    src : buffer or slice
        bool or integer elements, on chip or global.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((16,), "bool"), B: T.Tensor((1,), "int32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_shared((16,), "bool")
    ...         T.copy(A, tile)
    ...         if T.any_of(tile):
    ...             B[0] = 1
    """
    return _vote("any", src, "T.any_of")


def all_of(src):
    """Whether all elements of a tile are true (non-zero): a bool for the whole CTA.

    Parameters
    ----------
    src : buffer or slice
        bool or integer elements, on chip or global.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((16,), "bool"), B: T.Tensor((1,), "int32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_shared((16,), "bool")
    ...         T.copy(A, tile)
    ...         if T.all_of(tile):
    ...             B[0] = 1
    """
    return _vote("all", src, "T.all_of")


def cumsum(src, dst=None, dim: int = 0, reverse: bool = False) -> None:
    """Inclusive prefix sum along one dimension.

    Parameters
    ----------
    src : buffer or slice
        Shared tile or fragment.
    dst : buffer or slice, optional
        Same shape as ``src``; in place without it.
    dim : int
        The scanned dimension.
    reverse : bool
        Sum from the end.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((16,), "int32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_shared((16,), "int32")
    ...         T.copy(A, tile)
    ...         T.cumsum(tile)
    ...         T.copy(tile, A)
    >>> a = np.ones(16, "int32")
    >>> tvm_tile.compile(kernel, "llvm", lowering="reference")(a)
    >>> a[:4].tolist()
    [1, 2, 3, 4]
    """
    what = "T.cumsum"
    context = tile_op(what)
    source = as_region(src, what, "src")
    target = source if dst is None else as_region(dst, what, "dst")
    for region, argument in ((source, "src"), (target, "dst")):
        on_chip(region, what, argument)
    shape = check_static(source, what, "src")
    if check_static(target, what, "dst") != shape:
        raise TileShapeError(
            f"{what}: src is {shape_text(shape)}, but dst is {shape_text(target.extents)}", advice="dst has src's shape"
        )
    if source.dtype != target.dtype:
        raise TileTypeError(
            f"{what}: src is {source.dtype}, but dst is {target.dtype}",
            advice="scan in one dtype and convert with T.copy",
        )
    if str(source) != str(target):
        check_disjoint(source, target, what)
    if source.dtype == "bool":
        raise TileTypeError(f"{what}: cannot sum bool values", advice="copy them to int32 first")
    axis = const_int(dim)
    if axis is None or not -len(shape) <= axis < len(shape):
        raise TileShapeError(
            f"{what}: dim={dim} is out of range for {source} of shape {shape_text(shape)}",
            advice=f"dim is between {-len(shape)} and {len(shape) - 1}",
        )
    axis %= len(shape)
    attrs = {"tile.dim": axis, "tile.reverse": int(bool(reverse))}
    size = shape[axis]
    with block(context, "cumsum", attrs):
        # the loops are inside the block: the scanned axis must run in order
        lead = [d for d in range(len(shape)) if d != axis]
        with B.grid(*[shape[d] for d in lead], size) as loops:
            loops = list(loops) if len(shape) > 1 else [loops]
            position = size - 1 - loops[-1] if reverse else loops[-1]
            by_dim = dict(zip(lead, loops[:-1], strict=False)) | {axis: position}
            here = [by_dim[d] for d in range(len(shape))]
            step = 1 if reverse else -1
            before = [by_dim[d] + step if d == axis else by_dim[d] for d in range(len(shape))]
            value = source.buffer[tuple(source.full_index(here))]
            previous = target.buffer[tuple(target.full_index(before))]
            total = tirx.if_then_else(loops[-1] > 0, previous + value, value)
            B.buffer_store(target.buffer, total, target.full_index(here))
