"""Register-blocked GEMM on the vector units: C += A * B with fused multiply-adds.

A is read one scalar at a time and broadcast, so any strides will do; B and C are read as vectors along N, whose row
strides are padded to whole vectors by the caller.  The block of C held in registers follows the shape of the register
file (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var

from .builder import Builder, load, splat, vload


@dataclass(frozen=True)
class VectorUnit:
    """The vector registers of a target: how many, and how many bits each."""

    bits: int
    registers: int

    def lanes(self, dtype: str) -> int:
        """Elements of ``dtype`` a register holds."""
        return self.bits // tirx.const(0, dtype).ty.dtype.bits

    def block(self) -> tuple[int, int]:
        """Rows and vectors of the register block: accumulators, one row of B and a broadcast must fit."""
        vectors = 2
        return (self.registers - vectors - 2) // vectors, vectors


@dataclass(frozen=True)
class Matrix:
    """A matrix in a flat buffer: element (i, j) is at ``offset + i * rows + j * columns``."""

    buffer: Var
    offset: object
    rows: int
    columns: int = 1

    def at(self, i, j):
        """Flat index of element (i, j)."""
        return self.offset + i * self.rows + j * self.columns


def panel_width(unit: VectorUnit, dtype: str) -> int:
    """Columns of a panel of the packed right operand: what one register block reads in a row, at least 16."""
    return max(16, unit.block()[1] * unit.lanes(dtype))


def emit_gemm(
    b: Builder, unit: VectorUnit, dtype: str, a: Matrix, packed: Var, c: Matrix, m: int, n: int, k: int, clear: bool
) -> None:
    """C[m, n] (+)= A[m, k] * B[k, n], all of ``dtype``.

    ``packed`` holds B in panels of :func:`panel_width` columns, each k x width and contiguous, so that a register block
    streams through the first-level cache; ``c`` has contiguous rows whose storage holds ``n`` rounded up to vectors.
    What stands in the padding of B is multiplied into the padding of C only.
    """
    lanes, width = unit.lanes(dtype), panel_width(unit, dtype)
    max_rows, max_vectors = unit.block()
    total = -(-n // lanes)
    parts = [(0, total // max_vectors, max_vectors), (total // max_vectors * max_vectors, 1, total % max_vectors)]
    for n_first, n_blocks, vectors in parts:
        if not (n_blocks and vectors):
            continue
        with b.loop(n_blocks, "nb") as nb:
            column = (nb * vectors + n_first) * lanes
            start = tirx.floordiv(column, width) * (k * width) + tirx.floormod(column, width)
            right = Matrix(packed, b.bind(start, "panel"), width)
            for m_first, m_blocks, rows in _even_blocks(m, max_rows):
                with b.loop(m_blocks, "mb") as mb:
                    _emit_block(b, dtype, lanes, a, right, c, mb * rows + m_first, column, rows, vectors, k, clear)


def _even_blocks(total: int, largest: int) -> list[tuple[int, int, int]]:
    """Split ``total`` into blocks of nearly the same size: (first, blocks, size) for at most two sizes."""
    count = -(-total // largest)
    small, rest = divmod(total, count)
    parts = [(0, rest, small + 1), (rest * (small + 1), count - rest, small)]
    return [part for part in parts if part[1]]


def _emit_block(
    b: Builder,
    dtype: str,
    lanes: int,
    a: Matrix,
    right: Matrix,
    c: Matrix,
    row,
    column,
    rows: int,
    vectors: int,
    k: int,
    clear: bool,
) -> None:
    sums = [[b.register(dtype, lanes, "acc") for _ in range(vectors)] for _ in range(rows)]
    for i in range(rows):
        for j in range(vectors):
            start = splat(0, dtype, lanes) if clear else vload(c.buffer, c.at(row + i, column + j * lanes), lanes)
            b.store(sums[i][j], start, 0)
    with b.loop(k, "k") as kk:
        b_row = [b.bind(vload(right.buffer, right.at(kk, j * lanes), lanes), "b") for j in range(vectors)]
        for i in range(rows):
            value = b.bind(splat(load(a.buffer, a.at(row + i, kk)), dtype, lanes), "a")
            for j in range(vectors):
                b.store(sums[i][j], load(sums[i][j], 0) + value * b_row[j], 0)
    for i in range(rows):
        for j in range(vectors):
            b.vstore(c.buffer, load(sums[i][j], 0), c.at(row + i, column + j * lanes), lanes)
