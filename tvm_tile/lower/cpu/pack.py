"""Packing GEMM operands: transposes and interleaves through vector shuffles, never gathers."""

from __future__ import annotations

from tvm.ir import Expr

from .builder import Builder, shuffle


def transpose_words(b: Builder, quarter) -> list[Expr]:
    """Transpose a 16 x 16 block of 32-bit words held in memory.

    ``quarter(row, chunk)`` loads four consecutive words (chunk 0..3 of a row).  Rows 4l + i are gathered into lane group
    l of vector i by the loads, so that what is left are 4 x 4 transposes inside 128-bit lanes: 8 shuffles for 4 results.

    Returns the 16 columns, in order.
    """
    columns: list[Expr] = []
    for chunk in range(4):
        rows = []
        for i in range(4):
            parts = [quarter(4 * group + i, chunk) for group in range(4)]
            rows.append(b.bind(shuffle(parts, list(range(16))), "rows"))
        columns += _transpose_4x4_lanes(b, rows)
    return columns


def _transpose_4x4_lanes(b: Builder, rows: list[Expr]) -> list[Expr]:
    def unpack(x, y, words: int, high: bool) -> Expr:
        lanes = []
        for group in range(0, 16, 4):
            for i in range(0, 2, words):
                base = group + 2 * high + i
                lanes += [base + w for w in range(words)] + [16 + base + w for w in range(words)]
        return b.bind(shuffle([x, y], lanes), "unpacked")

    low01, high01 = unpack(rows[0], rows[1], 1, False), unpack(rows[0], rows[1], 1, True)
    low23, high23 = unpack(rows[2], rows[3], 1, False), unpack(rows[2], rows[3], 1, True)
    return [unpack(low01, low23, 2, False), unpack(low01, low23, 2, True),
            unpack(high01, high23, 2, False), unpack(high01, high23, 2, True)]
