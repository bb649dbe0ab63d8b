"""wgmma shared-memory matrix descriptors over swizzled tiles.

A descriptor is 64 bits: start address, leading and stride byte offsets (each in units of 16 bytes, 14 bits) and the
swizzle mode. Source: PTX ISA 8.8, "Matrix Descriptor Format" and "Shared Memory Matrix Layout".

K-major operands are tiles stored ``[M or N, K]``; MN-major ones are stored ``[K, M or N]`` (16-bit elements only).
Hardware applies the XOR to address bits, so an offset inside the swizzle span is simply added to the start.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import LayoutError
from .shared import PATTERN_ROWS, SharedLayout

_SWIZZLE_CODE = {0: 0, 128: 1, 64: 2, 32: 3}
_FIELD = (1 << 14) - 1
#: Bytes along K that one instruction consumes, for every dtype.
K_BYTES = 32


def encode(start: int, leading: int, stride: int, span: int) -> int:
    """Descriptor for byte values: start address, leading and stride offsets, and the swizzle span."""
    for name, value in (("start", start), ("leading offset", leading), ("stride offset", stride)):
        if value % 16 or not 0 <= value >> 4 <= _FIELD:
            raise LayoutError(f"descriptor {name} = {value} bytes", "a multiple of 16 below 256 KB is needed")
    if span not in _SWIZZLE_CODE:
        raise LayoutError(f"descriptor swizzle span {span}", "one of 0, 32, 64, 128 bytes")
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | _SWIZZLE_CODE[span] << 62


def decode(descriptor: int) -> tuple[int, int, int, int]:
    """(start, leading, stride, span) in bytes; inverse of `encode`."""
    span = next(s for s, code in _SWIZZLE_CODE.items() if code == descriptor >> 62 & 3)
    return (descriptor & _FIELD) << 4, (descriptor >> 16 & _FIELD) << 4, (descriptor >> 32 & _FIELD) << 4, span


@dataclass(frozen=True)
class OperandDescriptor:
    """How wgmma reads one operand from a shared tile.

    Attributes
    ----------
    layout : SharedLayout
        The tile: ``[mn, k]`` (K-major) or ``[k, mn]`` (MN-major), leading dimensions allowed.
    k_major : bool
    mn : int
        Extent along M or N of one instruction: 64 for A, its n for B.
    bits : int
        The descriptor without the start address; OR the encoded start into it.
    """

    layout: SharedLayout
    k_major: bool
    mn: int
    bits: int

    @property
    def trans(self) -> int:
        """The instruction's ``imm-trans`` operand (1 for MN-major)."""
        return 0 if self.k_major else 1

    def start(self, mn: int, k: int, lead: tuple[int, ...] | None = None) -> int:
        """Byte offset of the start address from the tile's start, for an instruction at element ``(mn, k)``.

        ``lead`` selects among the leading dimensions (pipeline stages); the first by default.

        Raises
        ------
        LayoutError
            Where an instruction cannot start there.
        """
        layout = self.layout
        lead = (0,) * (len(layout.shape) - 2) if lead is None else lead
        per_k = K_BYTES * 8 // layout.dtype_bits
        extent_mn = layout.rows if self.k_major else layout.columns
        extent_k = layout.columns if self.k_major else layout.rows
        if mn % 8 or k % per_k:
            raise LayoutError(f"wgmma cannot start at ({mn}, {k})", f"steps are 8 along M/N and {per_k} along K")
        if mn < 0 or k < 0 or mn + self.mn > extent_mn or k + per_k > extent_k:
            raise LayoutError(f"wgmma at ({mn}, {k}) reads {self.mn} x {per_k} of a tile of {extent_mn} x {extent_k}")
        span = layout.block_columns
        if not self.k_major and mn % span and mn % span + self.mn > span:
            raise LayoutError(f"an MN-major operand of {self.mn} elements at {mn} crosses a swizzle block of {span}",
                              f"start at a multiple of {span}")
        row, column = (mn, k) if self.k_major else (k, mn)
        # Rows that are multiples of 8 have no twist: the layout's own offset is the address before the XOR.
        return layout.offset(*lead, row, column) * layout.dtype_bits // 8

    def advance(self, k_step: int) -> int:
        """What to add to the encoded start for K step ``k_step`` (units of 16 bytes)."""
        per_k = K_BYTES * 8 // self.layout.dtype_bits
        return self.start(0, k_step * per_k) >> 4


def operand_descriptor(layout: SharedLayout, mn: int, k_major: bool = True) -> OperandDescriptor:
    """Descriptor of an operand, for instructions that take ``mn`` elements along M or N.

    Raises
    ------
    LayoutError
        For a tile that is not swizzled, or an MN-major tile of other than 16-bit elements.
    """
    if not layout.span:
        raise LayoutError(f"wgmma operand {layout!r} is not swizzled", "use a swizzled layout")
    if not k_major and layout.dtype_bits != 16:
        raise LayoutError(f"MN-major wgmma operands have 16-bit elements, this tile has {layout.dtype_bits}",
                          "store the tile with K contiguous")
    pattern = PATTERN_ROWS * layout.span
    # Swizzled K-major operands ignore the leading offset; 1 is what the documentation asks for.
    leading = 16 if k_major else layout.block_stride * layout.dtype_bits // 8
    return OperandDescriptor(layout, k_major, mn, encode(0, leading, pattern, layout.span))
