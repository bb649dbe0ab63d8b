"""Packing GEMM operands: transposes and interleaves through vector shuffles, never gathers.

Two layouts of the right operand, both padded to whole panels (the padding is zero): ``vnni``, for the matrix unit (see
:mod:`.amx`), and ``rows`` for the vector unit: panels of ``width`` columns, each row-major in the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr, Var

from ...layout.arith import round_up
from .builder import Builder, const_int, lanes_of, load, ramp, shuffle, vload, vtype
from .convert import compute_dtype, narrow, storage_dtype, widen
from .fma import VectorUnit

BLOCK = 16  # the transposes work on 16 x 16 words


@dataclass(frozen=True)
class MatrixView:
    """A matrix inside a flat buffer of any storage type: element (i, j) is at ``offset + i * rows + j * columns``.

    Strides and offset are ints or expressions; ``dtype`` is the program's element type.
    """

    flat: Var
    dtype: str
    offset: object
    rows: object
    columns: object
    wide: bool = False

    def at(self, i, j) -> Expr:
        """Flat index of an element."""
        return self._term(self.offset, 1) + self._term(i, self.rows) + self._term(j, self.columns)

    def _term(self, value, factor) -> Expr:
        kind = "int64" if self.wide else "int32"

        def cast(x):
            if const_int(x) is not None:
                return tirx.const(const_int(x), kind)
            return x if str(x.ty.dtype) == kind else tirx.Cast(kind, x)

        return cast(value) if const_int(factor) == 1 else cast(value) * cast(factor)

    @property
    def transposed(self) -> MatrixView:
        """The same elements with the roles of the indices exchanged."""
        return MatrixView(self.flat, self.dtype, self.offset, self.columns, self.rows, self.wide)


@dataclass(frozen=True)
class PanelLayout:
    """Layout of a packed right operand of ``k`` x ``n`` elements.

    ``pack`` is the number of K elements in a 32-bit word (``vnni``), or 0 for ``rows``, whose elements are of type
    ``compute``; ``width`` is the number of columns of a panel, ``lanes`` that of a vector or hardware tile.
    """

    k: int
    n: int
    dtype: str
    pack: int
    lanes: int
    compute: str = ""
    width: int = 16

    @property
    def k_padded(self) -> int:
        """Rows with padding."""
        return round_up(self.k, 16 * self.pack) if self.pack else self.k

    @property
    def n_padded(self) -> int:
        """Columns with padding: whole panels."""
        return round_up(self.n, self.width)

    @property
    def columns(self) -> int:
        """Columns that the product writes: whole vectors or hardware tiles."""
        return round_up(self.n, self.lanes)

    @property
    def count(self) -> int:
        """Elements of the packed storage."""
        return self.k_padded * self.n_padded

    @property
    def flat_dtype(self) -> str:
        """Type of the packed storage."""
        return storage_dtype(self.dtype) if self.pack else self.compute

    @property
    def ragged(self) -> bool:
        """Whether there is padding, which must be zero."""
        return (self.k_padded, self.n_padded) != (self.k, self.n)

    def at(self, k, n):
        """Flat index of element (k, n)."""
        p = self.pack
        k, n = tirx.convert(k), tirx.convert(n)
        if not p:
            return (tirx.floordiv(n, self.width) * self.k + k) * self.width + tirx.floormod(n, self.width)
        panel = tirx.floordiv(n, 16) * (self.k_padded // p) + tirx.floordiv(k, p)
        return panel * (16 * p) + tirx.floormod(n, 16) * p + tirx.floormod(k, p)


def emit_pack(b: Builder, unit: VectorUnit, source: MatrixView, layout: PanelLayout, packed: Var) -> None:
    """Write the elements of ``source`` (k x n) into ``packed``."""
    k, n = layout.k, layout.n
    if layout.pack:
        fast_k, fast_n = k // (BLOCK * layout.pack) * (BLOCK * layout.pack), n // BLOCK * BLOCK
        if const_int(source.rows) == 1:
            _pack_vnni_transposed(b, source, layout, packed, fast_k, fast_n)
        elif const_int(source.columns) == 1:
            fast_k = k // layout.pack * layout.pack
            _pack_vnni_rows(b, source, layout, packed, fast_k, fast_n)
        else:
            fast_k = fast_n = 0
    else:
        lanes = unit.lanes(layout.flat_dtype)
        words = tirx.const(0, layout.flat_dtype).ty.dtype.bits == 32
        if const_int(source.columns) == 1:
            fast_k, fast_n = k, n // lanes * lanes
            with b.loop(k, "pk") as i, b.loop(n // lanes, "pn") as j:
                bits = vload(source.flat, source.at(i, j * lanes), lanes)
                b.vstore(packed, _computed(b, bits, source.dtype, layout), layout.at(i, j * lanes), lanes)
        elif const_int(source.rows) == 1 and words:
            fast_k, fast_n = k // BLOCK * BLOCK, n // BLOCK * BLOCK
            _pack_rows_transposed(b, source, layout, packed, fast_k, fast_n)
        else:
            fast_k = fast_n = 0
    if not (fast_k and fast_n):
        fast_k = fast_n = 0
    _pack_scalars(b, source, layout, packed, (0, k), (fast_n, n))
    _pack_scalars(b, source, layout, packed, (fast_k, k), (0, fast_n))


def _pack_scalars(b: Builder, source: MatrixView, layout: PanelLayout, packed: Var, ks, ns) -> None:
    """The ragged edges, element by element."""
    if ks[0] == ks[1] or ns[0] == ns[1]:
        return
    with b.loop(ks[1] - ks[0], "sk") as i, b.loop(ns[1] - ns[0], "sn") as j:
        k, n = i + ks[0], j + ns[0]
        bits = load(source.flat, source.at(k, n))
        b.store(packed, bits if layout.pack else _computed(b, bits, source.dtype, layout), layout.at(k, n))


def _computed(b: Builder, bits: Expr, dtype: str, layout: PanelLayout) -> Expr:
    """Stored bits as values of the type that the product is computed in."""
    value = widen(b, b.bind(bits, "bits"), dtype)
    if compute_dtype(dtype) == layout.compute:
        return value
    return tirx.Cast(vtype(layout.compute, lanes_of(value)), value)


def _pack_vnni_transposed(b: Builder, source: MatrixView, layout: PanelLayout, packed: Var, k: int, n: int) -> None:
    """K is contiguous in memory: transpose blocks of 16 columns x 16 words."""
    pack = layout.pack
    if not (k and n):
        return
    with b.loop(n // BLOCK, "pn") as pn, b.loop(k // (BLOCK * pack), "pk") as pk:

        def quarter(column, chunk):
            index = source.at(pk * (BLOCK * pack) + chunk * 4 * pack, pn * BLOCK + column)
            return tirx.reinterpret("uint32x4", vload(source.flat, index, 4 * pack))

        start = (pn * (layout.k_padded // (BLOCK * pack)) + pk) * (BLOCK * BLOCK * pack)
        for i, row in enumerate(transpose_words(b, quarter)):
            words = tirx.reinterpret(vtype(layout.flat_dtype, BLOCK * pack), row)
            b.vstore(packed, words, start + i * (BLOCK * pack), BLOCK * pack)


def _pack_vnni_rows(b: Builder, source: MatrixView, layout: PanelLayout, packed: Var, k: int, n: int) -> None:
    """N is contiguous in memory: ``pack`` rows are woven into words.

    Several panels are filled side by side, so that whole cache lines are read: with a power of two between rows, the
    lines would be gone from the cache before the next panel needs their other half.
    """
    panels = n // BLOCK
    if not (k and panels):
        return
    together = 4 if 32 // layout.pack == 16 else 8
    for first, groups, count in (
        (0, panels // together, together),
        (panels // together * together, 1, panels % together),
    ):
        if groups and count:
            with b.loop(groups, "pn") as pn, b.loop(k // layout.pack, "pk") as pk:
                for i in range(count):
                    _weave(b, source, layout, packed, pk, pn * count + (first + i))


def _weave(b: Builder, source: MatrixView, layout: PanelLayout, packed: Var, pk, panel) -> None:
    """One row of words of one panel."""
    pack, bits = layout.pack, 32 // layout.pack
    unsigned = f"uint{bits}"
    words = None
    for i in range(pack):
        row = vload(source.flat, source.at(pk * pack + i, panel * BLOCK), BLOCK)
        if storage_dtype(source.dtype) != unsigned:
            row = tirx.reinterpret(vtype(unsigned, BLOCK), row)
        wide = tirx.Cast(vtype("uint32", BLOCK), row)
        wide = wide if i == 0 else wide << tirx.Broadcast(tirx.const(i * bits, "uint32"), BLOCK)
        words = wide if words is None else tirx.bitwise_or(words, wide)
    start = (panel * (layout.k_padded // pack) + pk) * (BLOCK * pack)
    b.vstore(packed, tirx.reinterpret(vtype(layout.flat_dtype, BLOCK * pack), words), start, BLOCK * pack)


def _pack_rows_transposed(b: Builder, source: MatrixView, layout: PanelLayout, packed: Var, k: int, n: int) -> None:
    """K is contiguous in memory: transpose 16 x 16 blocks of 32-bit compute values."""
    if not (k and n):
        return
    with b.loop(n // BLOCK, "pn") as pn, b.loop(k // BLOCK, "pk") as pk:

        def quarter(column, chunk):
            bits = vload(source.flat, source.at(pk * BLOCK + chunk * 4, pn * BLOCK + column), 4)
            return _computed(b, bits, source.dtype, layout)

        for i, row in enumerate(transpose_words(b, quarter)):
            b.vstore(packed, row, layout.at(pk * BLOCK + i, pn * BLOCK), BLOCK)


def emit_convert(b: Builder, unit: VectorUnit, source: MatrixView, target: MatrixView, rows: int, columns: int) -> None:
    """Copy a matrix, converting between types; vectors run along whichever index is contiguous on both sides."""
    if const_int(source.columns) != 1 and const_int(source.rows) == 1 and const_int(target.rows) == 1:
        emit_convert(b, unit, source.transposed, target.transposed, columns, rows)
        return
    lanes = 1
    if const_int(source.columns) == 1 and const_int(target.columns) == 1:
        widest = max(tirx.const(0, compute_dtype(d)).ty.dtype.bits for d in (source.dtype, target.dtype))
        lanes = unit.bits // max(widest, 8)
    full = columns // lanes

    def piece(i, j, count: int) -> None:
        value = widen(b, b.bind(vload(source.flat, source.at(i, j), count), "bits"), source.dtype)
        if compute_dtype(source.dtype) != compute_dtype(target.dtype):
            value = tirx.Cast(vtype(compute_dtype(target.dtype), count), value)
        b.store(target.flat, narrow(b, value, target.dtype), ramp(target.at(i, j), count))

    with b.loop(rows, "ci") as i:
        if full:
            with b.loop(full, "cj") as j:
                piece(i, j * lanes, lanes)
        if columns % lanes:
            with b.loop(columns % lanes, "cj") as j:
                piece(i, j + full * lanes, 1)


def transpose_words(b: Builder, quarter) -> list[Expr]:
    """Transpose a 16 x 16 block of 32-bit words held in memory.

    ``quarter(row, chunk)`` loads four consecutive words (chunk 0..3 of a row).  Rows 4l + i are gathered into lane
    group l of vector i by the loads, so that what is left are 4 x 4 transposes inside 128-bit lanes: 8 shuffles for 4
    results.

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
    return [
        unpack(low01, low23, 2, False),
        unpack(low01, low23, 2, True),
        unpack(high01, high23, 2, False),
        unpack(high01, high23, 2, True),
    ]
