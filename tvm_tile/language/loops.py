"""Loops: element-wise work over the threads, software pipelines, persistent tiles, ranges of expressions."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable

import tvm
from tvm import tirx
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileSyntaxError, TileTypeError
from .context import FunctionContext, current, inside_kernel, tile_op
from .emit import nest
from .regions import const_int
from .values import as_expression, is_expression, snapshot

__all__ = [
    "Parallel",
    "Persistent",
    "Pipelined",
    "TileLoop",
    "TileRange",
    "grid",
    "serial",
    "tile_range",
    "unroll",
    "vectorized",
]


class TileLoop:
    """A loop construct of the language; :meth:`open` enters its frames.

    ``kind`` is the scope it opens (see :class:`FunctionContext`).
    """

    kind = "loop"

    def __init__(self, context: FunctionContext) -> None:
        self.context = context

    def open(self, stack: contextlib.ExitStack):
        """Enter the frames; the values for the loop's target."""
        raise NotImplementedError


def _bound(value, what: str, name: str):
    """A loop bound: an integer expression, taken once before the loop."""
    number = const_int(value)
    if number is not None:
        return number
    value = as_expression(value)
    if not is_expression(value):
        raise TileTypeError(f"{what}: {name} must be an integer expression, but it is {value!r}")
    if not str(value.ty.dtype).startswith(("int", "uint")):
        raise TileTypeError(f"{what}: {name} = {value} has dtype {value.ty.dtype}, not an integer one",
                            advice="use // or T.ceildiv, or T.cast(value, \"int32\")")  # fmt: skip
    return value


class TileRange(TileLoop):
    """``range(lo, hi[, step])`` with TIR expressions, and the serial, unrolled and vectorised loops."""

    def __init__(self, context, what: str, make: Callable, *args, step=1, annotations=None) -> None:
        super().__init__(context)
        if not 1 <= len(args) <= 3:
            raise TileSyntaxError(f"{what} takes 1 to 3 arguments, but got {len(args)}")
        names = ("stop",) if len(args) == 1 else ("start", "stop", "step")
        values = [_bound(value, what, name) for value, name in zip(args, names, strict=False)]
        self.start, self.stop = (0, values[0]) if len(values) == 1 else values[:2]
        self.step = const_int(values[2] if len(values) == 3 else step)
        self.make, self.annotations = make, annotations
        if self.step is None:
            raise TileTypeError(
                f"{what}: the step must be a Python integer, but it is {values[2] if len(values) == 3 else step}",
                advice="count with step 1 and multiply",
            )
        if self.step == 0:
            raise TileShapeError(f"{what}: the step must not be zero")

    def open(self, stack):
        start, stop = snapshot(self.start, "start"), snapshot(self.stop, "stop")
        options = {} if self.annotations is None else {"annotations": self.annotations}
        if self.step == 1:
            return self._enter(stack, self.make(start, stop, **options))
        # counted from 0 with step 1, so that every later stage sees plain loops
        distance = stop - start if self.step > 0 else start - stop
        count = (
            tirx.ceildiv(tirx.convert(distance), abs(self.step))
            if isinstance(distance, tvm.ir.Expr)
            else -(-distance // abs(self.step))
        )
        if isinstance(count, int):
            count = max(count, 0)
        return start + self._enter(stack, self.make(0, count, **options)) * self.step

    def _enter(self, stack, frame):
        value = stack.enter_context(frame)
        stack.enter_context(self.context.scope(self.kind))
        return value


def tile_range(*args):
    """``range`` as kernels see it: the builtin one for Python integers, :class:`TileRange` for expressions."""
    if all(isinstance(a, int) and not isinstance(a, bool) for a in args):
        return builtins.range(*args)
    return TileRange(current("range"), "range", B.serial, *args)


def serial(start, stop=None, *, step: int = 1, annotations: dict | None = None):
    """A loop whose iterations run in order: ``for i in T.serial(n):``; ``range`` is the same.

    Parameters
    ----------
    start, stop : int or expression
        Bounds; one alone is the number of iterations.
    step : int
        Distance of the values, not zero.
    annotations : dict, optional
        Annotations of the TIR loop.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         for k in T.serial(1, 100, step=2):
    ...             B[k] = A[k]
    """
    return _plain("T.serial", B.serial, start, stop, step, annotations)


def unroll(start, stop=None, *, step: int = 1, annotations: dict | None = None):
    """A loop that the compiler unrolls. Parameters as in :func:`serial`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         for k in T.unroll(4):
    ...             B[k] = A[k]
    """
    return _plain("T.unroll", B.unroll, start, stop, step, annotations)


def vectorized(start, stop=None, *, annotations: dict | None = None):
    """A loop that runs in vector lanes; its bounds are constants. Parameters as in :func:`serial`.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         for i in T.Parallel(25):
    ...             for k in T.vectorized(4):
    ...                 B[i * 4 + k] = A[i * 4 + k]
    """
    for value in (start, stop):
        if value is not None and const_int(value) is None:
            raise TileShapeError(
                f"T.vectorized: the bound {value} is not a compile-time constant", advice="use T.serial"
            )
    return _plain("T.vectorized", B.vectorized, start, stop, 1, annotations)


def _plain(what, make, start, stop, step, annotations):
    bounds = (start,) if stop is None else (start, stop)
    return TileRange(inside_kernel(what), what, make, *bounds, step=step, annotations=annotations)


class _Grid(TileLoop):
    def __init__(self, context, extents) -> None:
        super().__init__(context)
        self.extents = extents

    def open(self, stack):
        values = stack.enter_context(B.grid(*[snapshot(e, "extent") for e in self.extents]))
        stack.enter_context(self.context.scope(self.kind))
        return values


def grid(*extents):
    """Nested serial loops: ``for i, j in T.grid(m, n):``.

    Parameters
    ----------
    *extents : int or expression
        Number of iterations of each loop, outermost first.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         for i, j in T.grid(10, 10):
    ...             B[i * 10 + j] = A[j * 10 + i]
    """
    if not extents:
        raise TileShapeError("T.grid needs at least one extent")
    return _Grid(inside_kernel("T.grid"), [_bound(e, "T.grid", "extent") for e in extents])


class _Parallel(TileLoop):
    kind = "parallel"

    def __init__(self, context, extents) -> None:
        super().__init__(context)
        self.extents = extents

    def open(self, stack):
        axes = stack.enter_context(nest(self.context, "parallel", [snapshot(e, "extent") for e in self.extents]))
        stack.enter_context(self.context.scope(self.kind))
        return axes[0] if len(axes) == 1 else tuple(axes)


def Parallel(*extents):  # noqa: N802
    """Element-wise work over the CTA's threads: ``for i, j in T.Parallel(M, N):``.

    The iterations are independent of each other: an iteration may not read what another one writes (checked), and the
    compiler chooses which thread runs which of them.

    Parameters
    ----------
    *extents : int or expression
        Extents of the iteration space.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             B[bx * 64 + i] = T.exp2(A[bx * 64 + i])
    """
    context = tile_op("T.Parallel")
    if not extents:
        raise TileShapeError("T.Parallel needs at least one extent")
    extents = [_bound(extent, "T.Parallel", "extent") for extent in extents]
    for value in extents:
        if isinstance(value, int) and value < 1:
            raise TileShapeError(f"T.Parallel: extent {value} is not positive")
    return _Parallel(context, extents)


class _Pipelined(TileLoop):
    kind = "pipeline"

    def __init__(self, context, start, stop, annotations) -> None:
        super().__init__(context)
        self.start, self.stop, self.annotations = start, stop, annotations

    @property
    def manual(self) -> bool:
        """Whether order and stage are given by hand."""
        return "tile.order" in self.annotations or "tile.stage" in self.annotations

    def open(self, stack):
        loop = stack.enter_context(
            B.serial(snapshot(self.start, "start"), snapshot(self.stop, "stop"), annotations=self.annotations)
        )
        stack.enter_context(self.context.scope(self.kind))
        return loop

    def check_statements(self, count: int) -> None:
        """``order`` and ``stage`` must have one entry for each statement of the body."""
        for name in ("order", "stage"):
            given = self.annotations.get(f"tile.{name}")
            if given is not None and len(given) != count:
                raise TileShapeError(
                    f"T.Pipelined: {name}={list(given)} has {len(given)} entries, but the loop's body has {count} "
                    f"statements",
                    advice="give one entry for each statement of the body, in source order (aliases do not count)",
                )


def Pipelined(start, stop=None, num_stages=None, order=None, stage=None):  # noqa: N802
    """A software-pipelined loop: copies of later iterations overlap the work of earlier ones.

    ``T.Pipelined(n, num_stages=2)``, ``T.Pipelined(start, stop, num_stages)``, ``T.Pipelined(range(lo, hi), 2)``. Any
    trip count is right, also 0 and fewer iterations than stages.

    Parameters
    ----------
    start, stop : int or expression
        Bounds; one alone is the number of iterations.
    num_stages : int
        Buffers for each shared tile that the loop fills: 0 and 1 mean no overlap.
    order, stage : list of int, optional
        A manual schedule: for each statement of the body its position and its stage (from 0); the depth is
        ``max(stage) + 1``.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         tile = T.alloc_shared((10,), "float32")
    ...         total = T.alloc_fragment((10,), "float32")
    ...         T.clear(total)
    ...         for k in T.Pipelined(10, num_stages=2):
    ...             T.copy(A[k * 10], tile)
    ...             for i in T.Parallel(10):
    ...                 total[i] += tile[i]
    ...         T.copy(total, B[0:10])
    """
    context = tile_op("T.Pipelined")
    if isinstance(start, TileRange | builtins.range):
        if stop is not None and num_stages is None:
            stop, num_stages = None, stop
        if stop is not None:
            raise TileSyntaxError("T.Pipelined(range(lo, hi), num_stages): the range already has both bounds")
        if const_int(start.step) != 1:
            raise TileShapeError(
                f"T.Pipelined: the range has step {start.step}; only step 1 is possible",
                advice="iterate over T.ceildiv(hi - lo, step) and multiply",
            )
        start, stop = start.start, start.stop
    elif stop is None:
        start, stop = 0, start
    elif (
        num_stages is None
        and const_int(stop) is not None
        and (const_int(start) is None or const_int(start) > const_int(stop))
    ):
        raise TileSyntaxError(
            f"T.Pipelined({start}, {stop}) would count from {start} to {stop}",
            advice=f"write T.Pipelined({start}, num_stages={stop}), or name num_stages to give both bounds",
        )
    start, stop = _bound(start, "T.Pipelined", "start"), _bound(stop, "T.Pipelined", "stop")
    stages = 0 if num_stages is None else const_int(num_stages)
    if stages is None:
        raise TileTypeError(
            f"T.Pipelined: num_stages must be a Python integer, but it is {num_stages!r}",
            advice="make it a parameter of the Python factory around the kernel",
        )
    if stages < 0:
        raise TileShapeError(
            f"T.Pipelined: num_stages={stages} is negative", advice="use 0 for no overlap, 2 to 4 to hide copies"
        )
    if "pipeline" in context.scopes and stages > 1:
        raise TileSyntaxError(
            "T.Pipelined with num_stages > 1 inside another T.Pipelined",
            advice="pipeline the innermost loop only and make the outer one T.serial",
        )
    annotations = {"tile.num_stages": stages}
    for name, given in (("order", order), ("stage", stage)):
        if given is None:
            continue
        values = [const_int(v) for v in given] if isinstance(given, list | tuple) else [None]
        if any(v is None or v < 0 for v in values):
            raise TileTypeError(
                f"T.Pipelined: {name} must be a list of non-negative integers, but it is {given!r}",
                advice="one entry for each statement of the loop's body",
            )
        annotations[f"tile.{name}"] = values
    if order is not None and sorted(annotations["tile.order"]) != list(builtins.range(len(order))):
        raise TileShapeError(
            f"T.Pipelined: order={list(order)} is not a permutation of 0..{len(order) - 1}",
            advice="order gives each statement its position, from 0",
        )
    if stage is not None:
        annotations["tile.num_stages"] = max(annotations["tile.stage"], default=0) + 1
    return _Pipelined(context, start, stop, annotations)


class _Persistent(TileLoop):
    def __init__(self, context, domain, ctas, index) -> None:
        super().__init__(context)
        self.domain, self.ctas, self.index = domain, ctas, index

    def open(self, stack):
        domain = [snapshot(e, "extent") for e in self.domain]
        total = domain[0]
        for extent in domain[1:]:
            total = total * extent
        total = tirx.convert(total)
        waves = tirx.ceildiv(total, self.ctas)
        wave = stack.enter_context(B.serial(0, waves, annotations={"tile.persistent": 1}))
        tile = wave * self.ctas + self.index
        stack.enter_context(self.context.scope(self.kind))
        stack.enter_context(B.If(tile < total))
        stack.enter_context(B.Then())
        out = []
        for extent in reversed(domain[1:]):
            out.append(tirx.floormod(tile, extent))
            tile = tirx.floordiv(tile, extent)
        out.append(tile)
        out.reverse()
        return out[0] if len(out) == 1 else tuple(out)


def Persistent(domain, ctas, index):  # noqa: N802
    """Tiles of a persistent kernel: CTA ``index`` of ``ctas`` visits tiles index, index + ctas, ...

    ``with T.Kernel(132) as b: for m, n in T.Persistent([m_tiles, n_tiles], 132, b): ...``

    Parameters
    ----------
    domain : list of int or expression
        Extents of the tile space, the last one fastest.
    ctas : int or expression
        Number of CTAs that share the work.
    index : expression
        This CTA's number.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(4, threads=32) as bx:
    ...         for i, j in T.Persistent([10, 10], 4, bx):
    ...             B[i * 10 + j] = A[j * 10 + i]
    """
    context = tile_op("T.Persistent")
    domain = list(domain) if isinstance(domain, list | tuple | tvm.ir.Array) else [domain]
    if not domain:
        raise TileShapeError("T.Persistent: the tile space has no dimensions")
    domain = [_bound(extent, "T.Persistent", "extent") for extent in domain]
    ctas, index = _bound(ctas, "T.Persistent", "ctas"), _bound(index, "T.Persistent", "index")
    if isinstance(ctas, int) and ctas < 1:
        raise TileShapeError(f"T.Persistent: ctas={ctas} is not positive")
    return _Persistent(context, domain, ctas, index)
