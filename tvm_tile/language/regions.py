"""Arguments of tile primitives: whole buffers, slices and element starts, brought to one form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, TensorRegion, Var
from tvm.sym import Analyzer
from tvm.tirx import is_buffer_var

from ..errors import TileShapeError, TileTypeError
from ..ir.kernels import const_int

__all__ = ["Region", "as_region", "check_disjoint", "const_int", "dtype_of", "scope_of", "scope_name", "shape_text"]

_SCOPES = {
    "global": "global",
    "shared": "shared",
    "shared.dyn": "shared",
    "local.fragment": "fragment",
    "local": "local",
    "local.var": "variable",
}


def dtype_of(buffer: Var) -> str:
    """Element dtype of a buffer."""
    return str(buffer.ty.dtype)


def scope_of(buffer: Var) -> str:
    """``"global"``, ``"shared"``, ``"fragment"``, ``"local"`` or ``"variable"``."""
    return _SCOPES.get(str(buffer.ty.storage_scope), str(buffer.ty.storage_scope))


def scope_name(buffer: Var) -> str:
    """The scope in words, for messages."""
    return {
        "global": "a global tensor",
        "shared": "a shared tile",
        "fragment": "a fragment",
        "local": "per-thread memory",
        "variable": "a T.alloc_var variable",
    }[scope_of(buffer)]


def shape_text(shape: Sequence) -> str:
    """``(64, 32)`` for messages, symbolic extents included."""
    inner = ", ".join(str(e) for e in shape)
    return f"({inner},)" if len(shape) == 1 else f"({inner})"


def same_extent(a, b) -> bool | None:
    """True / False where it can be decided, None where it depends on symbolic values."""
    left, right = const_int(a), const_int(b)
    if left is not None and right is not None:
        return left == right
    difference = Analyzer().simplify(tirx.const(0, "int32") + a - b)
    value = const_int(difference)
    return None if value is None else value == 0


@dataclass
class Region:
    """A box of a buffer: start and extent in each dimension.

    ``start_only`` marks an element start (``A[i, j]``), whose extents come from the other operand.
    """

    buffer: Var
    mins: list
    extents: list
    start_only: bool = False

    @property
    def dtype(self) -> str:
        """Element dtype."""
        return dtype_of(self.buffer)

    @property
    def scope(self) -> str:
        """Where the buffer lives (see :func:`scope_of`)."""
        return scope_of(self.buffer)

    @property
    def tile_shape(self) -> list:
        """The extents without unit dimensions (all dimensions when every one is a unit)."""
        return [e for e in self.extents if const_int(e) != 1]

    def index(self, axes: Sequence) -> list:
        """Indices of one element; ``axes`` has a variable for each dimension of :attr:`tile_shape`."""
        axes = list(axes)
        out = []
        for start, extent in zip(self.mins, self.extents, strict=False):
            if const_int(extent) == 1:
                out.append(start)
            else:
                axis = axes.pop(0)
                out.append(axis if const_int(start) == 0 else start + axis)
        return out

    def full_index(self, axes: Sequence) -> list:
        """Indices of one element; ``axes`` has an entry for every dimension of the buffer."""
        return [a if const_int(s) == 0 else s + a for s, a in zip(self.mins, axes, strict=False)]

    def with_extents(self, extents: Sequence) -> Region:
        """An element start given the other operand's extents, aligned with the trailing dimensions."""
        rank = len(self.mins)
        lead = rank - len(extents)
        return Region(self.buffer, self.mins, [1] * lead + list(extents))

    def __str__(self) -> str:
        if all(const_int(m) == 0 for m in self.mins) and all(
            same_extent(e, s) for e, s in zip(self.extents, self.buffer.ty.shape, strict=False)
        ):
            return self.buffer.name
        if self.start_only:
            return f"{self.buffer.name}[{', '.join(str(m) for m in self.mins)}]"
        parts = []
        for m, e in zip(self.mins, self.extents, strict=False):
            parts.append(str(m) if const_int(e) == 1 else f"{m}:{_add(m, e)}")
        return f"{self.buffer.name}[{', '.join(parts)}]"


def _add(a, b):
    left, right = const_int(a), const_int(b)
    if left is not None and right is not None:
        return left + right
    return Analyzer().simplify(tirx.const(0, "int32") + a + b)


def as_region(value, what: str, argument: str) -> Region:
    """The region behind an argument of a primitive.

    Parameters
    ----------
    value : buffer, slice or element
        What the user wrote.
    what, argument : str
        The primitive and the argument's name, for the error.

    Raises
    ------
    TileTypeError
        When the argument is none of these.
    """
    from .values import element_of, snapshot

    value = element_of(value)
    if is_buffer_var(value):
        return Region(value, [0] * len(value.ty.shape), list(value.ty.shape))
    # Starts that read memory are taken now: the operation itself may change that memory.
    if isinstance(value, TensorRegion) and is_buffer_var(value.source):
        return Region(
            value.source,
            [snapshot(r.min, "start") for r in value.region],
            [snapshot(_simplify(r.extent), "extent") for r in value.region],
        )
    if isinstance(value, TensorLoad) and is_buffer_var(value.source):
        mins, extents, is_start = [], [], True
        for index in value.indices:
            if isinstance(index, tirx.Ramp):
                if const_int(index.stride) != 1:
                    raise TileShapeError(
                        f"{what}: {argument} is a slice with step {index.stride}; only step 1 is possible",
                        advice="copy the whole range and pick elements in T.Parallel",
                    )
                mins.append(snapshot(index.base, "start"))
                extents.append(index.lanes)
                is_start = False
            else:
                mins.append(snapshot(index, "start"))
                extents.append(1)
        return Region(value.source, mins, extents, start_only=is_start)
    kind = type(value).__name__
    if tvm.ir.is_prim_expr(value):
        kind = f"an expression of dtype {value.ty.dtype}"
    elif value is None or isinstance(value, bool | int | float | str):
        kind = repr(value)
    raise TileTypeError(
        f"{what}: {argument} must be a buffer, a slice of one, or an element such as A[i, j], but it is {kind}",
        advice="allocate tiles with T.alloc_shared or T.alloc_fragment, or pass a tensor parameter",
    )


def _simplify(extent):
    if const_int(extent) is not None:
        return const_int(extent)
    out = Analyzer().simplify(extent)
    value = const_int(out)
    return out if value is None else value


def check_static(region: Region, what: str, argument: str) -> list[int]:
    """The region's extents as ints.

    Raises
    ------
    TileShapeError
        When an extent is symbolic.
    """
    out = []
    for extent in region.extents:
        value = const_int(extent)
        if value is None:
            raise TileShapeError(
                f"{what}: the extent {extent} of {argument} ({region}) is not a compile-time constant",
                advice="tiles have fixed sizes: use a Python integer for the tile and let T.copy handle the ragged "
                "edge",
            )
        out.append(value)
    return out


def check_disjoint(a: Region, b: Region, what: str, names: tuple[str, str] = ("src", "dst")) -> None:
    """Refuse an operation whose operands overlap in memory.

    Raises
    ------
    TileShapeError
        When both are parts of one buffer (or views of it) and cannot be proven to be apart.
    """
    from .context import active

    roots = active().roots
    if not roots.get(a.buffer, a.buffer).same_as(roots.get(b.buffer, b.buffer)):
        return
    if a.buffer.same_as(b.buffer):
        analyzer = Analyzer()
        for a_min, a_extent, b_min, b_extent in zip(a.mins, a.extents, b.mins, b.extents, strict=False):
            apart = (_add(a_min, a_extent), b_min), (_add(b_min, b_extent), a_min)
            if any(analyzer.can_prove(tirx.const(0, "int32") + end <= start) for end, start in apart):
                return
    raise TileShapeError(
        f"{what}: {names[0]} ({a}) and {names[1]} ({b}) share memory, so elements would be overwritten before they "
        f"are read",
        advice="use another buffer for the result, or slices that are apart",
    )
