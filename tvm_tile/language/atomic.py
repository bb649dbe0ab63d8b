"""Atomic updates of global and shared memory, printing and assertions on the device."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import StringImm, TensorLoad
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileTypeError
from .context import inside_kernel
from .dtypes import constant
from .emit import block, nest
from .regions import Region, as_region, check_disjoint, dtype_of, same_extent, scope_name, scope_of, shape_text
from .values import as_expression, check_uniform, element_of, is_expression, snapshot

__all__ = ["atomic_add", "atomic_max", "atomic_min", "device_assert", "print_"]

_ATOMIC_DTYPES = {
    "add": ("float64", "float32", "float16", "bfloat16", "int32", "uint32", "int64", "uint64"),
    "max": ("float32", "int32", "uint32", "int64", "uint64"),
    "min": ("float32", "int32", "uint32", "int64", "uint64"),
}


def _element(value, what: str) -> TensorLoad:
    if isinstance(value, TensorLoad) and is_buffer_var(value.source):
        buffer = value.source
        if scope_of(buffer) not in ("global", "shared"):
            raise TileTypeError(
                f"{what}: {buffer.name} is {scope_name(buffer)}; only global and shared memory have atomics",
                advice="fragments belong to one thread each: write the assignment, or use T.reduce_sum",
            )
        return value
    raise TileTypeError(f"{what} takes an element such as C[i, j], but got {type(value).__name__}")


def _call(op: str, element: TensorLoad, value):
    dtype = dtype_of(element.source)
    if dtype not in _ATOMIC_DTYPES[op]:
        raise TileTypeError(
            f"T.atomic_{op}: {element.source.name} has dtype {dtype}",
            advice=f"possible: {', '.join(_ATOMIC_DTYPES[op])}",
        )
    address = tirx.address_of(element)
    return tirx.call_extern(dtype, f"tile_atomic_{op}", address, constant(value, dtype, f"T.atomic_{op}"))


def _atomic(op: str, target, value, return_prev: bool):
    what = f"T.atomic_{op}"
    context = inside_kernel(what)
    target = element_of(target)
    scalar = isinstance(value, bool | int | float) or is_expression(value)
    region = None if scalar and isinstance(target, TensorLoad) else as_region(target, what, "the target")
    if region is None:
        element = _element(target, what)
        check_uniform([value, *element.indices])
        call = _call(op, element, value)
        if return_prev:
            # bound at once: an update happens where it is written, once, whatever its value is used for
            return snapshot(call, "previous")
        if context.in_parallel:
            B.evaluate(call)
        else:
            with block(context, "parallel"):
                B.evaluate(call)
        return None
    if return_prev:
        raise TileTypeError(f"{what}: return_prev needs a single element", advice="call it inside T.Parallel")
    _tile(context, op, region, value, what)
    return None


def _tile(context, op: str, region: Region, value, what: str) -> None:
    if context.in_parallel:
        raise TileTypeError(f"{what} of a whole tile inside T.Parallel", advice="update the element C[i, j]")
    source = None
    if not isinstance(value, bool | int | float) and not is_expression(value):
        source = as_region(value, what, "the value")
        if region.start_only:
            region = region.with_extents(
                source.extents if len(source.extents) <= len(region.mins) else source.tile_shape
            )
        left, right = region.tile_shape, source.tile_shape
        if len(left) != len(right) or any(same_extent(a, b) is not True for a, b in zip(left, right, strict=False)):
            raise TileShapeError(
                f"{what}: {region} is {shape_text(region.extents)}, but {source} is {shape_text(source.extents)}"
            )
        check_disjoint(source, region, what, ("the value", "the target"))
    with nest(context, "parallel", region.tile_shape) as axes:
        element = _element(region.buffer[tuple(region.index(axes))], what)
        B.evaluate(_call(op, element, value if source is None else source.buffer[tuple(source.index(axes))]))


def atomic_add(element, value, return_prev: bool = False):
    """Add to memory that other threads and CTAs also update.

    Inside ``T.Parallel`` it runs once an iteration, elsewhere once a CTA (not once a thread). Given a slice or buffer,
    it adds a tile element by element.

    Parameters
    ----------
    element : element, slice or buffer
        Global or shared memory, e.g. ``C[i, j]``.
    value : scalar, expression or tile
        What to add.
    return_prev : bool
        Return the value before the addition (single elements only).

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(C: T.Tensor((2,), "int32")):
    ...     with T.Kernel(1, threads=128) as bx:
    ...         for i in T.Parallel(128):
    ...             T.atomic_add(C[0], 1)  # 128 iterations
    ...         T.atomic_add(C[1], 1)  # once a CTA
    >>> c = np.zeros(2, "int32")
    >>> tvm_tile.compile(kernel, "llvm", lowering="reference")(c)
    >>> c.tolist()
    [128, 1]
    """
    return _atomic("add", element, value, return_prev)


def atomic_max(element, value, return_prev: bool = False):
    """Atomic maximum. Parameters as in :func:`atomic_add`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((128,), "int32"), C: T.Tensor((1,), "int32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             T.atomic_max(C[0], A[bx * 64 + i])
    """
    return _atomic("max", element, value, return_prev)


def atomic_min(element, value, return_prev: bool = False):
    """Atomic minimum. Parameters as in :func:`atomic_add`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((128,), "int32"), C: T.Tensor((1,), "int32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             T.atomic_min(C[0], A[bx * 64 + i])
    """
    return _atomic("min", element, value, return_prev)


def print_(value, msg: str = "") -> None:
    """Print a scalar (once a CTA, or once an iteration inside ``T.Parallel``) or a whole tile from the device.

    Parameters
    ----------
    value : expression, str or buffer
        What to print.
    msg : str
        Text before it.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         T.print(A[bx * 64], "first of the tile")
    """
    context = inside_kernel("T.print")
    if isinstance(value, str):
        value, msg = None, f"{msg}{value}"
    if value is None:
        _statement(context, "print", tirx.call_extern("int32", "tile_print", StringImm(msg)))
        return
    if isinstance(value, bool | int | float) or is_expression(value):
        check_uniform([value])
        _statement(context, "print", tirx.call_extern("int32", "tile_print", StringImm(msg), tirx.convert(value)))
        return
    region = as_region(value, "T.print", "the value")
    if context.in_parallel:
        raise TileTypeError("T.print of a whole tile inside T.Parallel", advice="print the element, e.g. A[i, j]")
    name = region.buffer.name
    with nest(context, "print", region.tile_shape) as axes:
        index = region.index(axes)
        text = f"{msg + ' ' if msg else ''}{name}[{', '.join('%d' for _ in index)}] = "
        B.evaluate(
            tirx.call_extern(
                "int32", "tile_print", StringImm(text), region.buffer[tuple(index)], *[tirx.convert(i) for i in index]
            )
        )


def device_assert(condition, msg: str = "") -> None:
    """Stop the kernel with a message when a condition does not hold.

    Parameters
    ----------
    condition : expression
        bool expression.
    msg : str
        Text of the error.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(50):
    ...             T.device_assert(A[bx * 50 + i] >= 0, "negative")
    """
    context = inside_kernel("T.device_assert")
    if isinstance(condition, bool):
        condition = tirx.const(condition, "bool")
    condition = as_expression(condition)
    if not is_expression(condition) or str(condition.ty.dtype) != "bool":
        raise TileTypeError(
            f"T.device_assert takes a bool expression, but got {_kind(condition)}", advice="compare: value > 0"
        )
    check_uniform([condition])
    _statement(context, "assert", tirx.call_extern("int32", "tile_assert", condition, StringImm(msg)))


def _kind(value) -> str:
    return f"a value of {value.ty.dtype}" if is_expression(value) else type(value).__name__


def _statement(context, op: str, call) -> None:
    if context.in_parallel:
        B.evaluate(call)
        return
    with block(context, op):
        B.evaluate(call)
