"""Parameters and on-chip memory: tensors, symbolic dimensions, shared tiles, fragments, scratch, variables."""

from __future__ import annotations

import re
from numbers import Integral

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import buffer_data, is_buffer_var
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileSyntaxError, TileTypeError
from .context import inside_kernel
from .dtypes import check_dtype, constant
from .regions import const_int, dtype_of, scope_of, shape_text

__all__ = [
    "StridedTensor",
    "Tensor",
    "VarHandle",
    "alloc_fragment",
    "alloc_local",
    "alloc_shared",
    "alloc_var",
    "dynamic",
    "reshape",
    "view",
]


def dynamic(names: str, dtype: str = "int32"):
    """Symbolic dimensions: ``m, n = T.dynamic("m, n")``.

    Parameters
    ----------
    names : str
        Names, separated by commas or spaces.
    dtype : str
        ``"int32"`` or ``"int64"``.

    Returns
    -------
    Var or tuple of Var
        One variable a name; a single name yields the variable itself.

    Examples
    --------
    >>> m, n = T.dynamic("m, n")
    >>> A = T.Tensor((m, n * 2), "float16")
    """
    if dtype not in ("int32", "int64"):
        raise TileTypeError(f"T.dynamic: dtype must be int32 or int64, but it is {dtype!r}")
    parts = [p for p in re.split(r"[,\s]+", names.strip()) if p] if isinstance(names, str) else []
    if not parts or any(not p.isidentifier() for p in parts):
        raise TileSyntaxError(f'T.dynamic takes names such as "m, n", but got {names!r}')
    out = tuple(Var(p, dtype) for p in parts)
    return out[0] if len(out) == 1 else out


def _shape(shape, what: str) -> tuple:
    if isinstance(shape, Integral | tirx.IntImm) or tvm.ir.is_prim_expr(shape):
        shape = (shape,)
    if not isinstance(shape, list | tuple | tvm.ir.Array):
        raise TileTypeError(f"{what}: the shape must be a tuple of extents, but it is {shape!r}")
    out = []
    for extent in shape:
        value = const_int(extent)
        if value is None and not tvm.ir.is_prim_expr(extent):
            advice = f"declare it before: {extent} = T.dynamic({extent!r})" if isinstance(extent, str) else None
            raise TileTypeError(
                f"{what}: extent {extent!r} in shape {shape_text(shape)} is not an integer", advice=advice
            )
        if value is not None and value < 0:
            raise TileShapeError(f"{what}: extent {value} in shape {shape_text(shape)} is negative")
        out.append(value if value is not None else extent)
    return tuple(out)


def Tensor(shape, dtype="float32"):  # noqa: N802  (a type in annotations)
    """A contiguous tensor parameter: ``A: T.Tensor((M, K), "float16")``.

    Parameters
    ----------
    shape : tuple
        Extents: ints, :func:`dynamic` variables or expressions of them.
    dtype : str
        Element dtype.

    Examples
    --------
    >>> n = T.dynamic("n")
    >>> A = T.Tensor((n, 64), "float16")
    >>> [str(extent) for extent in A.shape]
    ['n', '64']
    """
    return B.buffer(_shape(shape, "T.Tensor"), check_dtype(dtype, "T.Tensor"))


def StridedTensor(shape, strides, dtype="float32"):  # noqa: N802
    """A tensor parameter with explicit element strides.

    Parameters
    ----------
    shape, strides : tuple
        Extents and strides in elements, of the same length; strides may be symbolic (checked at the call).
    dtype : str
        Element dtype.

    Examples
    --------
    >>> n, stride = T.dynamic("n, stride")
    >>> A = T.StridedTensor((n, 64), (stride, 1), "float16")
    """
    shape, strides = _shape(shape, "T.StridedTensor"), _shape(strides, "T.StridedTensor")
    if len(shape) != len(strides):
        raise TileShapeError(
            f"T.StridedTensor: shape {shape_text(shape)} has {len(shape)} dimensions, "
            f"strides {shape_text(strides)} has {len(strides)}"
        )
    return B.buffer(shape, check_dtype(dtype, "T.StridedTensor"), strides=list(strides))


def _static_shape(shape, what: str) -> tuple[int, ...]:
    shape = _shape(shape, what)
    for extent in shape:
        if not isinstance(extent, int):
            raise TileShapeError(
                f"{what}: extent {extent} of shape {shape_text(shape)} is not a compile-time constant; "
                "on-chip memory has a fixed size",
                advice="use a tile size that is a Python integer; T.copy zero-fills the part of a tile beyond a "
                "ragged edge",
            )
        if extent == 0:
            raise TileShapeError(
                f"{what}: shape {shape_text(shape)} has no elements", advice="each extent is at least 1"
            )
    if not shape:
        raise TileShapeError(f"{what}: the shape is empty", advice="use T.alloc_var for a scalar")
    return shape


def _alloc(shape, dtype, scope: str, what: str):
    context = inside_kernel(what)
    if context.in_parallel and scope != "local":
        raise TileSyntaxError(
            f"{what} inside T.Parallel", advice=f"allocate before the loop: {what} belongs to the kernel"
        )
    return B.sblock_alloc_buffer(_static_shape(shape, what), check_dtype(dtype, what), scope=scope)


def alloc_shared(shape, dtype="float16"):
    """A tile in shared memory, visible to all threads of the CTA.

    Parameters
    ----------
    shape : tuple of int
        Extents, compile-time constants.
    dtype : str
        Element dtype.

    Raises
    ------
    TileShapeError
        When an extent is symbolic, zero or negative.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_shared((64,), "float32")
    ...         T.copy(A[bx * 64], tile)
    """
    return _alloc(shape, dtype, "shared", "T.alloc_shared")


def alloc_fragment(shape, dtype="float32"):
    """A tile in registers, distributed over the CTA's threads (its layout is inferred).

    Parameters
    ----------
    shape : tuple of int
        Extents, compile-time constants.
    dtype : str
        Element dtype.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_fragment((64,), "float32")
    ...         T.copy(A[bx * 64], tile)
    """
    return _alloc(shape, dtype, "local.fragment", "T.alloc_fragment")


def alloc_local(shape, dtype="float32"):
    """Scratch memory private to each thread; indexed with compile-time or uniform indices.

    Parameters
    ----------
    shape : tuple of int
        Extents, compile-time constants.
    dtype : str
        Element dtype.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(1, threads=32) as bx:
    ...         for i in T.Parallel(25):
    ...             four = T.alloc_local((4,), "float32")
    ...             for k in T.unroll(4):
    ...                 four[k] = A[i * 4 + k]
    ...             B[i] = T.max(T.max(four[0], four[1]), T.max(four[2], four[3]))
    """
    return _alloc(shape, dtype, "local", "T.alloc_local")


class VarHandle:
    """What ``T.alloc_var`` returns to the parser: the variable and its initial value."""

    def __init__(self, buffer: Var, init) -> None:
        self.buffer = buffer
        self.init = init

    @property
    def load(self) -> TensorLoad:
        """The variable's value."""
        return self.buffer[0]


def alloc_var(dtype="int32", init=None):
    """A mutable scalar with one value for the whole CTA: read as ``v``, written as ``v = expr``.

    Parameters
    ----------
    dtype : str
        Dtype of the value.
    init : scalar or expression, optional
        Initial value; without it, the variable must be written before it is read.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         blocks = T.alloc_var("int32", init=0)
    ...         for k in T.serial(10):
    ...             if A[k * 10] > 0:
    ...                 blocks = blocks + 1
    ...         B[bx] = blocks
    """
    context = inside_kernel("T.alloc_var")
    if context.in_parallel:
        raise TileSyntaxError("T.alloc_var inside T.Parallel", advice="declare the variable before the loop")
    dtype = check_dtype(dtype, "T.alloc_var")
    return VarHandle(B.sblock_alloc_buffer((1,), dtype, scope="local.var"), init)


def is_variable(value) -> bool:
    """Whether a bound name is a ``T.alloc_var`` variable."""
    return isinstance(value, TensorLoad) and is_buffer_var(value.source) and scope_of(value.source) == "variable"


def store_variable(buffer: Var, value, what: str = "assignment") -> None:
    """Write a ``T.alloc_var`` variable."""
    B.buffer_store(buffer, constant(value, dtype_of(buffer), what), [0])


def _elements(shape) -> int | None:
    total = 1
    for extent in shape:
        value = const_int(extent)
        if value is None:
            return None
        total *= value
    return total


def _alias(buffer, shape, dtype: str, what: str):
    context = inside_kernel(what)
    if context.in_parallel:
        raise TileSyntaxError(f"{what} inside T.Parallel", advice="make the view before the loop")
    if not is_buffer_var(buffer):
        raise TileTypeError(f"{what} takes a whole buffer, but got {type(buffer).__name__}")
    scope = scope_of(buffer)
    if scope == "global":
        raise TileTypeError(
            f"{what}: {buffer.name} is a global tensor; only on-chip buffers can be viewed differently",
            advice="declare the parameter with the shape you want to index, or reshape the tensor before the call",
        )
    shape = _static_shape(shape, what)
    bits_old = _elements(buffer.ty.shape) * tvm.runtime.DataType(dtype_of(buffer)).bits
    bits_new = _elements(shape) * tvm.runtime.DataType(dtype).bits
    if bits_old != bits_new:
        raise TileShapeError(
            f"{what}: {buffer.name} {shape_text(buffer.ty.shape)} {dtype_of(buffer)} holds {bits_old // 8} bytes, "
            f"but {shape_text(shape)} {dtype} needs {bits_new // 8}",
            advice="a view keeps the number of bytes",
        )
    alias = B.decl_buffer(shape, dtype, data=buffer_data(buffer), scope=str(buffer.ty.storage_scope))
    context.roots[alias] = context.roots.get(buffer, buffer)
    return alias


def reshape(buffer, shape):
    """The same elements in row-major order under another shape; no data moves.

    Parameters
    ----------
    buffer : buffer
        A shared tile, fragment or per-thread array.
    shape : tuple of int
        Extents with the same number of elements.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_shared((4, 16), "float32")
    ...         flat = T.reshape(tile, (64,))
    ...         T.copy(A[bx * 64], flat)
    """
    return _alias(buffer, shape, dtype_of(buffer) if is_buffer_var(buffer) else "", "T.reshape")


def view(buffer, shape=None, dtype=None):
    """The same bytes under another shape and dtype; no data moves.

    Parameters
    ----------
    buffer : buffer
        A shared tile or per-thread array (a fragment keeps its dtype).
    shape : tuple of int, optional
        Extents; the buffer's own by default.
    dtype : str, optional
        Element dtype; the buffer's own by default.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_shared((64,), "float32")
    ...         bits = T.view(tile, dtype="int32")
    ...         T.copy(A[bx * 64], tile)
    ...         for i in T.Parallel(64):
    ...             bits[i] = bits[i] & 0x7FFFFFFF  # drops the sign
    """
    if not is_buffer_var(buffer):
        raise TileTypeError(f"T.view takes a whole buffer, but got {type(buffer).__name__}")
    dtype = dtype_of(buffer) if dtype is None else check_dtype(dtype, "T.view")
    if scope_of(buffer) == "fragment" and dtype != dtype_of(buffer):
        raise TileTypeError(
            f"T.view: {buffer.name} is a fragment of {dtype_of(buffer)} and cannot be viewed as {dtype}: "
            "its elements are spread over the threads",
            advice="copy it to a shared tile and view that, or convert values with T.copy",
        )
    return _alias(buffer, buffer.ty.shape if shape is None else shape, dtype, "T.view")


def name_value(name: str, value) -> None:
    """Give a freshly made buffer or variable the name it is bound to."""
    IRBuilder.name(name, value)
