"""Where a buffer's elements are: a flat buffer of the storage type, strides, and the layout of packed operands."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var

from ...errors import InternalError
from .builder import Builder, const_int
from .convert import storage_dtype

_INT32_MAX = 2**31 - 1


@dataclass
class Storage:
    """A buffer of the program as the generated code addresses it.

    Attributes
    ----------
    source : Var
        The program's buffer.
    flat : Var
        One-dimensional buffer of ``storage_dtype(dtype)``.
    strides : list
        Elements between neighbours in each dimension.
    offset : int or Expr
        Flat index of the first element.
    wide : bool
        Indices need 64 bits.
    panel : PanelLayout or None
        Set for the packed right operand of matrix products; such a buffer is written by copies only.  ``transposed``
        says that the program's buffer is N x K.
    bytewise : bool
        ``flat`` holds bytes: the memory is shared by buffers of different element types (``T.view``), and only accesses
        of one type keep LLVM's alias analysis honest.
    """

    source: Var
    flat: Var
    strides: list
    offset: object = 0
    wide: bool = False
    panel: object = None
    transposed: bool = False
    bytewise: bool = False

    @property
    def dtype(self) -> str:
        """Element type of the program's buffer."""
        return str(self.source.ty.dtype)

    @property
    def shape(self) -> list:
        """Extents of the program's buffer."""
        return list(self.source.ty.shape)

    def flat_index(self, indices: list) -> Expr:
        """Flat index of an element."""
        if self.panel is not None:
            raise InternalError(f"element access to the packed operand {self.source.name}")
        dtype = "int64" if self.wide else "int32"
        total = tirx.const(0, dtype)
        for index, stride in zip(indices, [*self.strides], strict=True):
            total = total + _widen(index, dtype) * _widen(stride, dtype)
        return total + _widen(self.offset, dtype) if const_int(self.offset) != 0 else total


def _widen(value, dtype: str) -> Expr:
    if isinstance(value, int):
        return tirx.const(value, dtype)
    if isinstance(value, tirx.IntImm):
        return tirx.const(int(value.value), dtype)
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def row_major(shape: list) -> list:
    """Strides of a dense row-major array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step = (
            extent * step
            if const_int(extent) is None or const_int(step) is None
            else const_int(extent) * const_int(step)
        )
    return strides[::-1]


def global_storage(b: Builder, buffer: Var) -> Storage:
    """The storage of a tensor parameter (written into the function's prologue)."""
    ty = buffer.ty
    shape = [_as_int_or_expr(e) for e in ty.shape]
    declared = [_as_int_or_expr(s) for s in ty.strides]
    strides = declared or row_major([_wide_extent(e) for e in shape])
    count = 1
    for extent in shape:
        count = count * extent if isinstance(extent, int) and isinstance(count, int) else None
        if count is None:
            break
    reach = None
    if count is not None and all(isinstance(s, int) for s in strides):
        reach = sum((e - 1) * s for e, s in zip(shape, strides, strict=False) if e > 0) + 1
    wide = reach is None or reach > _INT32_MAX
    size = tirx.const(max(reach, 1), "int64") if reach is not None else tirx.const(_INT32_MAX, "int64")
    dtype = storage_dtype(str(ty.dtype))
    flat = b.view(
        buffer, dtype, size if reach is None or wide else int(max(reach, 1)), f"{buffer.name}_flat", scratch=False
    )
    return Storage(buffer, flat, strides, 0, wide)


def _as_int_or_expr(value):
    number = const_int(value)
    return value if number is None else number


def _wide_extent(value):
    return value if isinstance(value, int) or str(value.ty.dtype) == "int64" else tirx.Cast("int64", value)
