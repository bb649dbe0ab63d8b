"""`SharedLayout`: where the elements of a tile lie in shared memory.

Three forms: plain rows, padded rows, and the XOR swizzles that TMA and wgmma define. A swizzle of span S bytes (128,
64, 32) stores rows of S bytes and permutes their 16-byte chunks by the row, ``chunk ^= (address / 128) % (S / 16)``.
A wider tile is split into column blocks of S bytes, each stored contiguously (*block-major*): exactly what one TMA box
a block writes, and what wgmma descriptors read. ldmatrix uses the same layout, so that all instruction paths agree.

Source: CUDA Driver API, ``CUtensorMapSwizzle``; PTX ISA 8.8, "Shared Memory Matrix Layout".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .arith import Index, product, round_up, scale, total
from .errors import LayoutError

SPANS = (128, 64, 32)
CHUNK_BITS = 128
CHUNK_BYTES = 16
#: Rows after which every swizzle pattern repeats.
PATTERN_ROWS = 8
#: ``CUtensorMapSwizzle`` and the wgmma descriptor number the spans differently.
TMA_SWIZZLE_CODE = {0: 0, 32: 1, 64: 2, 128: 3}
#: Largest extent of a TMA box dimension.
TMA_BOX_LIMIT = 256


@dataclass(frozen=True)
class SharedLayout:
    """Layout of a tile; build it with `row_major`, `padded` or `swizzled`.

    Parameters
    ----------
    shape : tuple of int
        Logical extents. Leading dimensions beyond two are outer copies (pipeline stages, heads).
    dtype_bits : int
        Width of an element.
    span : int
        Swizzle span in bytes, 0 for none.
    pad : int
        Elements added to each row.
    """

    shape: tuple[int, ...]
    dtype_bits: int
    span: int = 0
    pad: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        if not self.shape or any(n < 1 for n in self.shape):
            raise LayoutError(f"a shared tile needs extents of at least 1, got {self.shape}")
        if self.dtype_bits not in (4, 8, 16, 32, 64):
            raise LayoutError(f"elements of {self.dtype_bits} bits have no shared layout")
        if self.pad < 0 or (self.pad and self.span):
            raise LayoutError(f"pad = {self.pad} with swizzle span {self.span}: rows are padded or swizzled, not both")
        if self.span:
            reason = why_not_swizzled(self.shape, self.dtype_bits, self.span)
            if reason:
                raise LayoutError(f"a tile {self.shape} of {self.dtype_bits}-bit elements has no {self.span}-byte "
                                  f"swizzle: {reason}")

    @staticmethod
    def row_major(shape: Sequence[int], dtype_bits: int) -> SharedLayout:
        """Plain rows."""
        return SharedLayout(tuple(shape), dtype_bits)

    @staticmethod
    def padded(shape: Sequence[int], dtype_bits: int, pad: int) -> SharedLayout:
        """Rows with ``pad`` unused elements at the end of each."""
        return SharedLayout(tuple(shape), dtype_bits, 0, pad)

    @staticmethod
    def swizzled(shape: Sequence[int], dtype_bits: int, span: int) -> SharedLayout:
        """XOR swizzle of 128, 64 or 32 bytes."""
        return SharedLayout(tuple(shape), dtype_bits, span)

    # ---- sizes ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the innermost matrix (1 for a vector)."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """Logical columns."""
        return self.shape[-1]

    @property
    def chunk_elements(self) -> int:
        """Elements of a 16-byte chunk."""
        return CHUNK_BITS // self.dtype_bits

    @property
    def block_columns(self) -> int:
        """Columns of one column block: the span, or the whole row where there is no swizzle."""
        return self.span * 8 // self.dtype_bits if self.span else self.columns

    @property
    def row_stride(self) -> int:
        """Elements from one row to the next inside a column block."""
        return self.block_columns + self.pad

    @property
    def blocks(self) -> int:
        """Column blocks."""
        return self.columns // self.block_columns

    @cached_property
    def block_stride(self) -> int:
        """Elements from one column block to the next; keeps each block on the swizzle's own alignment."""
        several = self.span and self.blocks * product(self.shape[:-2]) > 1
        return (round_up(self.rows, PATTERN_ROWS) if several else self.rows) * self.row_stride

    @property
    def matrix_stride(self) -> int:
        """Elements from one matrix to the next along the leading dimensions."""
        return self.blocks * self.block_stride

    @property
    def size(self) -> int:
        """Elements to allocate."""
        return product(self.shape[:-2]) * self.matrix_stride

    @property
    def bytes(self) -> int:
        """Bytes to allocate."""
        return -(-self.size * self.dtype_bits // 8)

    @property
    def alignment(self) -> int:
        """Bytes to which the tile's start has to be aligned: the swizzle works on address bits."""
        return self.span * PATTERN_ROWS if self.span else CHUNK_BYTES

    # ---- index functions --------------------------------------------------------------------------------------

    def offset(self, *coords: Index) -> Index:
        """Element offset of a coordinate from the tile's start."""
        lead, row, column = self._split(coords)
        if not self.span:
            return total([lead, scale(row, self.row_stride), column])
        per_chunk = self.chunk_elements
        inner = column if per_chunk == 1 else column // per_chunk
        start = self._chunk_start(lead, row, inner)
        return total([start, 0 if per_chunk == 1 else column % per_chunk])

    def chunk_offset(self, *coords: Index) -> Index:
        """Element offset of a 16-byte chunk; the last coordinate counts chunks instead of elements.

        For ldmatrix, cp.async and vector accesses, whose column is known to be a whole chunk.
        """
        lead, row, chunk = self._split(coords)
        if not self.span:
            return total([lead, scale(row, self.row_stride), scale(chunk, self.chunk_elements)])
        return self._chunk_start(lead, row, chunk)

    def coords(self, offset: Index) -> tuple[Index, ...]:
        """Coordinates of an element offset (inverse of `offset`); offsets of unused elements have no meaning."""
        lead: list[Index] = []
        for dim in range(len(self.shape) - 2):
            stride = product(self.shape[dim + 1:-2]) * self.matrix_stride
            lead.append(offset // stride)
            offset = offset % stride
        block, offset = offset // self.block_stride, offset % self.block_stride
        row, column = offset // self.row_stride, offset % self.row_stride
        if self.span:
            per_chunk = self.chunk_elements
            chunk = column // per_chunk ^ self._twist(row)
            column = block * self.block_columns + chunk * per_chunk + column % per_chunk
        return (*lead, column) if len(self.shape) == 1 else (*lead, row, column)

    def _split(self, coords: Sequence[Index]) -> tuple[Index, Index, Index]:
        """(offset of the matrix, row, column)."""
        if len(coords) != len(self.shape):
            raise LayoutError(f"{len(coords)} coordinates given for a tile of {len(self.shape)} dimensions")
        if len(coords) == 1:
            return 0, 0, coords[0]
        terms, stride = [], self.matrix_stride
        for dim in reversed(range(len(self.shape) - 2)):
            terms.append(scale(coords[dim], stride))
            stride *= self.shape[dim]
        return total(terms), coords[-2], coords[-1]

    def _twist(self, row: Index) -> Index:
        """What a row XORs into its chunk index."""
        chunks = self.span // CHUNK_BYTES
        rows_per_line = 128 // self.span
        return (row if rows_per_line == 1 else row // rows_per_line) % chunks

    def _chunk_start(self, lead: Index, row: Index, chunk: Index) -> Index:
        chunks = self.span // CHUNK_BYTES
        block: Index = 0
        if self.blocks > 1:
            block = scale(chunk // chunks, self.block_stride)
            chunk = chunk % chunks
        return total([lead, block, scale(row, self.row_stride), scale(chunk ^ self._twist(row), self.chunk_elements)])

    # ---- TMA --------------------------------------------------------------------------------------------------

    def tma_boxes(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """TMA boxes that fill one matrix: ``(row, column, rows, columns, element offset)`` each.

        Raises
        ------
        LayoutError
            For padded rows and for rows that are no multiple of 16 bytes, which no tensor map describes.
        """
        if self.pad:
            raise LayoutError(f"rows padded by {self.pad} elements cannot be written by TMA")
        if self.block_columns * self.dtype_bits % CHUNK_BITS:
            raise LayoutError(f"a TMA box of {self.block_columns} {self.dtype_bits}-bit columns is no "
                              "multiple of 16 bytes")
        if self.block_columns > TMA_BOX_LIMIT and self.rows > 1:
            raise LayoutError(f"a TMA box has at most {TMA_BOX_LIMIT} columns, plain rows have {self.block_columns}",
                              "use a swizzled layout")
        step = min(self.block_columns, TMA_BOX_LIMIT)
        return tuple(
            (row, column, min(TMA_BOX_LIMIT, self.rows - row), min(step, self.columns - column),
             column // self.block_columns * self.block_stride + row * self.row_stride + column % self.block_columns)
            for column in range(0, self.columns, step) for row in range(0, self.rows, TMA_BOX_LIMIT))

    @property
    def tma_swizzle(self) -> int:
        """``CUtensorMapSwizzle`` value of the layout."""
        return TMA_SWIZZLE_CODE[self.span]

    # ---- exchange ---------------------------------------------------------------------------------------------

    def to_json(self) -> list:
        """Nested list of ints, for annotations."""
        return [list(self.shape), self.dtype_bits, self.span, self.pad]

    @staticmethod
    def from_json(data: Sequence) -> SharedLayout:
        """Inverse of `to_json`."""
        if len(data) != 4:
            raise LayoutError(f"a shared layout is stored as 4 entries, got {len(data)}")
        return SharedLayout(tuple(int(n) for n in data[0]), int(data[1]), int(data[2]), int(data[3]))

    def __repr__(self) -> str:
        form = (f"{self.span}-byte swizzle, {self.blocks} column block{'s' if self.blocks > 1 else ''}" if self.span
                else f"rows padded by {self.pad}" if self.pad else "row-major")
        return f"<SharedLayout {'x'.join(map(str, self.shape))} of {self.dtype_bits} bits: {form}, {self.bytes} bytes>"


def why_not_swizzled(shape: Sequence[int], dtype_bits: int, span: int = SPANS[-1]) -> str | None:
    """Why a tile cannot have a swizzle of ``span`` bytes, or None where it can.

    The default span is the smallest one: its reason means that no swizzle is possible at all.
    """
    if span not in SPANS:
        return f"spans are {', '.join(map(str, SPANS))} bytes"
    if len(shape) < 2:
        return "it has one dimension, there are no rows to permute"
    bits = shape[-1] * dtype_bits
    if bits % (span * 8):
        size = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits"
        return (f"a row of {shape[-1]} elements has {size}, no multiple of {span}; use a multiple of "
                f"{span * 8 // dtype_bits} columns")
    return None


@dataclass(frozen=True)
class LayoutChoice:
    """A chosen layout and why; ``swizzled`` is False where the tile could not be swizzled."""

    layout: SharedLayout
    swizzled: bool
    reason: str


#: A swizzle may take this many times the tile's own bytes (blocks are rounded up to 8 rows).
MAX_WASTE = 1.25

#: Accesses that `choose` knows. wgmma reads swizzled tiles only; the others work on any layout.
ACCESSES = ("wgmma", "tma", "ldmatrix", "vector", "word")


def crosses(starts: Iterable[tuple[int, int]], dtype_bits: int, span: int) -> bool:
    """Whether an MN-major operand of wgmma would begin inside a swizzle block and end in the next one.

    Parameters
    ----------
    starts : iterable of (int, int)
        First column and columns of each instruction's operand.
    dtype_bits, span : int
        Width of an element; bytes of a swizzle block.
    """
    block = span * 8 // dtype_bits
    return any(start % block and start % block + extent > block for start, extent in starts)


def choose(
    shape: Sequence[int],
    dtype_bits: int,
    access: str | Iterable[str] = ("vector",),
    starts: Sequence[tuple[int, int]] = (),
) -> LayoutChoice:
    """Choose a tile's layout from how it is accessed.

    The widest swizzle that divides the rows; else rows padded so that the accesses have no bank conflicts (unless TMA
    writes the tile, which cannot pad); else plain rows. Tiles of few rows are not swizzled where that would only waste
    memory.

    Parameters
    ----------
    access : str or iterable of str
        Any of ``wgmma``, ``tma``, ``ldmatrix``, ``vector`` (16-byte rows), ``word``.
    starts : sequence of (int, int)
        First column and columns of wgmma operands that lie along the rows (MN-major).

    Raises
    ------
    LayoutError
        When wgmma has to read a tile that cannot be swizzled.
    """
    wanted = {access} if isinstance(access, str) else set(access)
    unknown = wanted - set(ACCESSES)
    if unknown:
        raise LayoutError(f"unknown access {', '.join(sorted(unknown))}", f"known are {', '.join(ACCESSES)}")
    shape = tuple(int(n) for n in shape)
    plain = SharedLayout.row_major(shape, dtype_bits)
    why = why_not_swizzled(shape, dtype_bits)
    for span in SPANS:
        if why_not_swizzled(shape, dtype_bits, span) is None and not crosses(starts, dtype_bits, span):
            layout = SharedLayout.swizzled(shape, dtype_bits, span)
            if wanted.isdisjoint(("wgmma", "tma")) and (layout.rows == 1 or layout.bytes > MAX_WASTE * plain.bytes):
                why = f"its {layout.rows} rows are too few, a swizzle would take {layout.bytes} bytes for {plain.bytes}"
                break
            parts = " and keeps operands in its blocks" if crosses(starts, dtype_bits, SPANS[0]) else ""
            return LayoutChoice(layout, True, f"{span} bytes is the widest swizzle that divides the rows{parts}")
    if "wgmma" in wanted:
        raise LayoutError(f"wgmma reads swizzled tiles only, and {shape} of {dtype_bits}-bit elements cannot be: {why}")
    if len(shape) < 2 or shape[-2] == 1:
        return LayoutChoice(plain, False, f"not swizzled: {why}")
    if "tma" in wanted:
        return LayoutChoice(plain, False, f"not swizzled: {why}; not padded: TMA writes it")
    pad = _conflict_free_pad(shape[-1], dtype_bits)
    if pad is None or pad == 0:
        return LayoutChoice(plain, False, f"not swizzled: {why}; rows need no padding" if pad == 0
                            else f"not swizzled: {why}; rows are no whole words, padding would not help")
    return LayoutChoice(SharedLayout.padded(shape, dtype_bits, pad), False,
                        f"not swizzled: {why}; rows padded by {pad} elements against bank conflicts")


def _conflict_free_pad(columns: int, dtype_bits: int) -> int | None:
    """Elements that make the row stride an odd number of access units: 16-byte chunks, else 4-byte words."""
    for unit in (CHUNK_BITS, 32):
        if columns * dtype_bits % unit == 0:
            return 0 if columns * dtype_bits // unit % 2 else max(1, unit // dtype_bits)
    return None
