"""ldmatrix and stmatrix: which row each lane addresses, for operands and accumulators of mma.sync.

Both move up to four 8x8 matrices of 16-bit units (8 rows of 16 bytes); lane ``8 i + r`` addresses row ``r`` of matrix
``i``, and matrix ``i`` becomes 32-bit register ``i``. The patterns below list the matrices in the order of the
instruction's registers. Source: PTX ISA 8.8, ``ldmatrix``, ``stmatrix``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arith import Index, digit_value, scale, total
from .banks import Access
from .errors import LayoutError
from .instructions import MMA, Instruction

_UNIT_BYTES = 16


@dataclass(frozen=True)
class MatrixMove:
    """One ldmatrix or stmatrix.

    Attributes
    ----------
    count : int
        Matrices moved: 1, 2 or 4 (also the 32-bit registers).
    trans : bool
        The ``.trans`` form.
    steps : tuple of (int, int)
        (rows, columns) in storage from matrix 0 to matrix 1, and from matrix 0 to matrix 2.
    extent : tuple of int
        Rows and columns of the stored tile that one move covers.
    elements : int
        Elements of a 16-byte row.
    """

    store: bool
    count: int
    trans: bool
    steps: tuple[tuple[int, int], ...]
    extent: tuple[int, int]
    elements: int

    @property
    def ptx(self) -> str:
        """Full PTX name."""
        name = "stmatrix" if self.store else "ldmatrix"
        return f"{name}.sync.aligned.m8n8.x{self.count}{'.trans' if self.trans else ''}.shared.b16"

    def address(self, lane: Index) -> tuple[Index, Index]:
        """(row, column) in the stored tile that a lane addresses, relative to the move's origin.

        Lanes beyond ``8 * count`` repeat the addresses of lower lanes: the instruction ignores them, but they stay
        in bounds.
        """
        row_steps = [s[0] for s in self.steps]
        if row_steps[:1] == [8]:  # rows 0..15 come from the low four lane bits at once
            rows: list[Index] = [digit_value(lane, 1, 16, 32)]
            row_steps[0] = 0
        else:
            rows = [digit_value(lane, 1, 8, 32)]
        rows += [scale(digit_value(lane, 8 << i, 2, 32), step) for i, step in enumerate(row_steps) if step]
        columns = [scale(digit_value(lane, 8 << i, 2, 32), s[1]) for i, s in enumerate(self.steps) if s[1]]
        return total(rows), total(columns)

    def access(self, row: int = 0, column: int = 0, lead: tuple[int, ...] = ()) -> Access:
        """The move at an origin, for `conflicts`."""
        lanes = []
        for lane in range(8 * self.count):
            r, c = self.address(lane)
            lanes.append((*lead, row + r, column + c))
        return Access(self.ptx, tuple(lanes), _UNIT_BYTES)


def load_a(instruction: Instruction, count: int | None = None, trans: bool = False) -> MatrixMove:
    """ldmatrix for A: from a tile stored ``[M, K]``, or with ``trans`` from one stored ``[K, M]``.

    The default count loads one instruction's operand.
    """
    unit = _check(instruction, trans)
    along_m, along_k = (8, 0), (0, unit)
    order = [along_m] + ([along_k] if instruction.a_registers == 4 else []) + [(16, 0)]
    return _build(False, instruction.a_registers, count, trans, order, unit)


def load_b(instruction: Instruction, count: int | None = None, trans: bool = False) -> MatrixMove:
    """ldmatrix for B: from a tile stored ``[N, K]``, or with ``trans`` from one stored ``[K, N]``.

    A count above the instruction's registers loads neighbouring instructions along N.
    """
    unit = _check(instruction, trans)
    order = [(0, unit), (8, 0)] if instruction.b_registers == 2 else [(8, 0), (16, 0)]
    return _build(False, instruction.b_registers, count, trans, order, unit)


def store_c(count: int = 4, trans: bool = False) -> MatrixMove:
    """stmatrix for an accumulator converted to 16 bits: to a tile stored ``[M, N]``, or with ``trans`` ``[N, M]``.

    x4 stores 16 rows of two neighbouring n = 8 instructions (or 16 columns of a wgmma accumulator).
    """
    return _build(True, 2, count, trans, [(8, 0), (0, 8)], 8)


def _check(instruction: Instruction, trans: bool) -> int:
    if instruction.family != MMA:
        raise LayoutError(f"ldmatrix feeds mma.sync, not {instruction.ptx}")
    if trans and instruction.operand_bits != 16:
        raise LayoutError(f"ldmatrix.trans moves 16-bit elements, {instruction.a_dtype} has {instruction.operand_bits} "
                          "bits", "store the operand with K contiguous, or load it element by element")
    return _UNIT_BYTES * 8 // instruction.operand_bits


def _build(store: bool, least: int, count: int | None, trans: bool, order: list[tuple[int, int]],
           unit: int) -> MatrixMove:
    count = least if count is None else count
    if count not in (1, 2, 4) or count < least:
        raise LayoutError(f"ldmatrix/stmatrix x{count} does not cover an operand of {least} registers",
                          "counts are 1, 2 and 4")
    steps = tuple(order[:count.bit_length() - 1])
    # The orders above are for K- or N-contiguous storage; .trans swaps the roles of stored rows and columns.
    extent = (8 + sum(s[0] for s in steps), unit + sum(s[1] for s in steps))
    if trans:
        steps = tuple((c, r) for r, c in steps)
        extent = (extent[1], extent[0])
    return MatrixMove(store, count, trans, steps, extent, unit)
