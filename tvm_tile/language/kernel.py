"""The kernel's frame and what is said about it as a whole: grid, threads, rasterisation, layouts, safe values."""

from __future__ import annotations

import contextlib

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileSyntaxError, TileTypeError
from .context import KernelContext, current, inside_kernel, tile_op
from .dtypes import constant, number_of
from .emit import block
from .regions import const_int, dtype_of, scope_of
from .values import as_expression, is_expression, reads_memory

__all__ = ["Kernel", "annotate_layout", "annotate_safe_value", "assume", "sync_threads", "use_swizzle", "ws"]

_TAGS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
MAX_THREADS = 1024


class Kernel:
    """Launch grid and CTA size: ``with T.Kernel(grid_x, grid_y, threads=128) as (bx, by):``.

    Parameters
    ----------
    *grid : int or expression
        One to three extents, x first; they may use symbolic dimensions and scalar parameters.
    threads : int
        Threads of a CTA, 1 to 1024.

    Returns
    -------
    Var or tuple of Var
        The CTA's coordinates; a single extent yields one variable.

    Examples
    --------
    >>> m, n = T.dynamic("m, n")
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((m, n), "float32")):
    ...     with T.Kernel(T.ceildiv(n, 8), T.ceildiv(m, 8), threads=64) as (bx, by):
    ...         for i, j in T.Parallel(8, 8):
    ...             A[by * 8 + i, bx * 8 + j] = 0
    """

    def __init__(self, *grid, threads: int = 128) -> None:
        context = current("T.Kernel")
        if context.kernel is not None:
            raise TileSyntaxError(
                "T.Kernel inside another T.Kernel",
                advice="close the first kernel: several kernels of one function run one after another",
            )
        if not 1 <= len(grid) <= 3:
            raise TileShapeError(f"T.Kernel takes one to three grid extents, but got {len(grid)}")
        for extent in grid:
            if const_int(extent) is None and not tvm.ir.is_prim_expr(extent):
                raise TileTypeError(
                    f"T.Kernel: grid extent {extent!r} is not an integer",
                    advice="use // or T.ceildiv to compute grid extents",
                )
            if tvm.ir.is_prim_expr(extent) and not str(extent.ty.dtype).startswith(("int", "uint")):
                raise TileTypeError(
                    f"T.Kernel: grid extent {extent} has dtype {extent.ty.dtype}",
                    advice="use // or T.ceildiv to compute grid extents",
                )
            if tvm.ir.is_prim_expr(extent) and reads_memory(extent):
                raise TileTypeError(
                    f"T.Kernel: grid extent {extent} reads memory; the grid is chosen by the host before the kernel "
                    f"runs",
                    advice="pass the extent as a scalar parameter, e.g. n: T.int32",
                )
            if const_int(extent) is not None and const_int(extent) < 0:
                raise TileShapeError(f"T.Kernel: grid extent {extent} is negative")
        count = const_int(threads)
        if count is None:
            raise TileTypeError(f"T.Kernel: threads must be a Python integer, but it is {threads!r}")
        if not 1 <= count <= MAX_THREADS:
            raise TileShapeError(
                f"T.Kernel: threads={count} is not between 1 and {MAX_THREADS}",
                advice="128, 256 or 384 threads suit most kernels",
            )
        self.context = context
        self.kernel = KernelContext(count, tuple(grid))
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        context, stack, grid = self.context, self.stack, self.kernel.grid
        loops = {}
        for d in reversed(range(len(grid))):  # x innermost, as the hardware numbers CTAs
            loops[d] = stack.enter_context(B.thread_binding(grid[d], thread=_TAGS[d]))
            IRBuilder.name("b" + "xyz"[d] + "_", loops[d])
        stack.enter_context(B.sblock(context.unique("kernel")))
        axes = [B.axis.spatial(grid[d], loops[d]) for d in range(len(grid))]
        context.kernel = self.kernel
        context.kernels += 1
        stack.enter_context(context.scope("kernel"))
        return axes[0] if len(axes) == 1 else tuple(axes)

    def __exit__(self, *exc):
        if exc[0] is None:
            attrs = {"tile.kernel": 1, "tile.threads": self.kernel.threads, **self.kernel.annotations}
            if self.kernel.layouts:
                attrs["tile.layouts"] = self.kernel.layouts
            B.sblock_attr(attrs)
        self.context.kernel = None
        return self.stack.__exit__(*exc)


def use_swizzle(panel_size: int, order: str = "row", enable: bool = True) -> None:
    """Visit the grid in panels, so that neighbouring CTAs share data in the L2 cache.

    Parameters
    ----------
    panel_size : int
        Rows (or columns) of a panel, at least 1.
    order : str
        ``"row"`` or ``"column"``.
    enable : bool
        False leaves the grid as it is.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((64, 64), "float32")):
    ...     with T.Kernel(64, 64, threads=32) as (bx, by):
    ...         T.use_swizzle(10)
    ...         A[bx, by] = 1
    """
    context = inside_kernel("T.use_swizzle")
    size = const_int(panel_size)
    if size is None or size < 1:
        raise TileShapeError(
            f"T.use_swizzle: panel_size must be a positive integer, but it is {panel_size!r}",
            advice="8 to 16 rows of CTAs suit most grids; enable=False turns it off",
        )
    if order not in ("row", "column"):
        raise TileSyntaxError(f"T.use_swizzle: order must be 'row' or 'column', but it is {order!r}")
    if enable:
        context.kernel.annotations["tile.swizzle"] = [size, order]


def annotate_layout(layouts: dict) -> None:
    """Fix the layout of on-chip buffers: ``T.annotate_layout({A_shared: layout})``.

    Parameters
    ----------
    layouts : dict
        Buffer -> ``tvm_tile.layout.SharedLayout`` (shared tiles) or ``tvm_tile.layout.Fragment`` (fragments). A layout
        that an instruction cannot read is refused when the kernel is compiled.

    Examples
    --------
    >>> from tvm_tile.layout import SharedLayout
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((64, 64), "float16")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_shared((64, 64), "float16")
    ...         T.annotate_layout({tile: SharedLayout.swizzled((64, 64), 16, 128)})
    ...         T.copy(A, tile)
    """
    context = inside_kernel("T.annotate_layout")
    if not isinstance(layouts, dict):
        raise TileTypeError(f"T.annotate_layout takes a dict of buffer -> layout, but got {type(layouts).__name__}")
    for buffer, layout in layouts.items():
        if not is_buffer_var(buffer):
            raise TileTypeError(f"T.annotate_layout: {buffer!r} is not a buffer")
        scope = scope_of(buffer)
        if scope not in ("shared", "fragment"):
            raise TileTypeError(f"T.annotate_layout: {buffer.name} is not a shared tile or a fragment")
        if buffer.name in context.kernel.layouts:
            raise TileSyntaxError(f"T.annotate_layout: {buffer.name} already has a layout")
        if not hasattr(layout, "to_json") or not hasattr(layout, "shape"):
            raise TileTypeError(
                f"T.annotate_layout: {layout!r} is not a layout",
                advice="make one with tvm_tile.layout, e.g. SharedLayout",
            )
        if tuple(layout.shape) != tuple(int(e) for e in buffer.ty.shape):
            raise TileShapeError(
                f"T.annotate_layout: the layout is for shape {tuple(layout.shape)}, "
                f"but {buffer.name} is {tuple(int(e) for e in buffer.ty.shape)}",
                advice="make the layout for the buffer's own shape",
            )
        context.kernel.layouts[buffer.name] = layout.to_json()


def annotate_safe_value(values: dict) -> None:
    """What out-of-bounds reads of a tensor give instead of 0: ``T.annotate_safe_value({A: -T.infinity("float32")})``.

    Parameters
    ----------
    values : dict
        Global tensor -> constant. It holds for all reads of the tensor in this kernel.

    Raises
    ------
    TileTypeError
        When a key is not a global tensor, or the value is not a constant of the tensor's dtype.
    TileSyntaxError
        When the tensor already has another safe value in this kernel.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         T.annotate_safe_value({A: -T.infinity("float32")})
    ...         tile = T.alloc_shared((128,), "float32")
    ...         T.copy(A[0], tile)  # the last 28 elements are -inf
    """
    context = inside_kernel("T.annotate_safe_value")
    if not isinstance(values, dict):
        raise TileTypeError(f"T.annotate_safe_value takes a dict of tensor -> value, but got {type(values).__name__}")
    for buffer, value in values.items():
        if not is_buffer_var(buffer) or scope_of(buffer) != "global":
            raise TileTypeError(
                "T.annotate_safe_value: the keys must be global tensors",
                advice="only reads of global memory can be out of bounds",
            )
        number = number_of(value)
        if number is None:
            raise TileTypeError(
                f"T.annotate_safe_value: the value for {buffer.name} must be a constant, but it is {value}"
            )
        number = constant(number, dtype_of(buffer), "T.annotate_safe_value")
        safe = context.kernel.annotations.setdefault("tile.safe_values", {})
        # as text: infinities do not survive the printer as numbers
        text = repr(number.value)
        if safe.setdefault(buffer.name, text) != text:
            raise TileSyntaxError(
                f"T.annotate_safe_value: {buffer.name} already has the safe value {safe[buffer.name]}",
                advice="one value holds for all reads of a tensor in a kernel",
            )


class WarpGroup:
    """The context manager of :func:`ws`."""

    def __init__(self, context, index: int) -> None:
        self.context, self.index = context, index
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(B.sblock(self.context.unique("ws")))
        B.sblock_attr({"tile.ws": self.index})
        self.stack.enter_context(self.context.scope("ws"))

    def __exit__(self, *exc):
        return self.stack.__exit__(*exc)


def ws(group: int):
    """Expert control: the body runs on warpgroup ``group`` only (``with T.ws(0):``).

    The result is that of source order. On a GPU warpgroups run side by side where they share nothing, and wait for each
    other where they use the same tiles; ``T.sync_threads`` inside is a barrier of the warpgroup alone. Fragments and
    variables belong to one warpgroup or to all threads. On a CPU the bodies run one after another.

    Parameters
    ----------
    group : int
        Warpgroup number, from 0; the kernel must have at least ``128 * (group + 1)`` threads.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=256) as bx:
    ...         tile = T.alloc_shared((100,), "float32")
    ...         with T.ws(0):
    ...             T.copy(A, tile)
    ...         T.sync_threads()
    ...         with T.ws(1):
    ...             T.copy(tile, B)
    """
    context = tile_op("T.ws")
    index = const_int(group)
    if index is None or index < 0:
        raise TileTypeError(f"T.ws: the warpgroup must be a non-negative Python integer, but it is {group!r}")
    if "ws" in context.scopes:
        raise TileSyntaxError("T.ws inside another T.ws")
    if context.kernel.threads < 128 * (index + 1):
        raise TileShapeError(
            f"T.ws({index}): the kernel has {context.kernel.threads} threads, so its warpgroups of 128 "
            f"are 0 to {context.kernel.threads // 128 - 1}",
            advice=f"launch T.Kernel(..., threads={128 * (index + 1)})",
        )

    return WarpGroup(context, index)


def sync_threads() -> None:
    """A barrier for all threads of the CTA; the compiler places the ones it needs by itself.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         A[0] = 1
    ...         T.sync_threads()
    ...         B[0] = A[0]
    """
    context = tile_op("T.sync_threads")
    with block(context, "sync"):
        B.evaluate(tirx.call_extern("int32", "tile_sync"))


def assume(condition, message: str = "") -> None:
    """A condition on the parameters that holds for every call; it is checked at the call and used by the compiler.

    Parameters
    ----------
    condition : expression
        A bool expression of scalar parameters and symbolic dimensions, e.g. ``T.assume(n % 8 == 0)``.
    message : str, optional
        Text of the error when it does not hold.

    Examples
    --------
    >>> n = T.dynamic("n")
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((n,), "float32")):
    ...     T.assume(n % 64 == 0)
    ...     with T.Kernel(n // 64, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             A[bx * 64 + i] = 0
    """
    context = current("T.assume")
    if context.kernel is not None:
        raise TileSyntaxError(
            "T.assume inside T.Kernel", advice="state assumptions before the kernel, at the top of the function"
        )
    if isinstance(condition, bool):
        if not condition:
            raise TileShapeError("T.assume: the condition is always false" + (f": {message}" if message else ""))
        return
    condition = as_expression(condition)
    if not is_expression(condition) or str(condition.ty.dtype) != "bool":
        what = f"{condition} of dtype {condition.ty.dtype}" if is_expression(condition) else type(condition).__name__
        raise TileTypeError(f"T.assume takes a bool expression, but got {what}", advice="compare: T.assume(n % 8 == 0)")
    if reads_memory(condition):
        raise TileTypeError(
            f"T.assume({condition}) reads a tensor; it is checked before the kernel runs",
            advice="assume something of scalar parameters and shapes, or use T.device_assert",
        )
    frame = B.Assert(condition, message or f"T.assume({condition}) does not hold")
    frame.add_callback(lambda: frame.__exit__(None, None, None))
    frame.__enter__()
