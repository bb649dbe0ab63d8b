"""``T.gemm`` with mma.sync: ldmatrix into double-buffered operand registers, products of one k step while the next
loads.

Each warp owns ``m_repeat x n_repeat`` instructions of the output (layout.WarpPartition). An A operand that is a
fragment is already laid out as the instruction wants it; everything else comes from swizzled shared tiles. Operands
that ldmatrix cannot deliver (8-bit or tf32 elements stored with K along the rows) are gathered element by element.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import tvm
from tvm import tirx
from tvm.ir import Range
from tvm.script import tirx as T

from ...errors import InternalError
from ...ir.ops import GemmOp, Region
from ...layout import Instruction, WarpPartition, a_fragment, load_a, load_b
from ...schedule.decisions import read_convert, read_instruction, read_partial, read_partition
from .build import const, evaluate, seq, unrolled, when
from .fma import lower_fma
from .program import Access, MicroNode, OpNode
from .space import all_of, visit
from .storage import Storage
from .wgmma import lower_wgmma

__all__ = ["lower_gemm"]


def lower_gemm(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of a tile product.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`GemmOp` with its decisions.
    hw : GPU
        The target.
    """
    before, node = _staged_operands(storage, node)
    return before + _product(storage, node)


def _staged_operands(storage: Storage, node: OpNode) -> tuple[list[MicroNode], OpNode]:
    """Steps that bring fragments laid out for something else to shared memory, and the product that reads it."""
    steps: list[MicroNode] = []
    changes = {}
    for name in read_convert(node.op.annotations):
        for operand in ("a", "mask"):
            region = getattr(node.op, operand)
            if region is None or region.buffer.name != name:
                continue
            held = storage.fragments[region.buffer]
            scratch = storage.new_scratch(held.layout.shape, held.dtype, f"{name}_operand")
            steps.append(
                MicroNode([], [Access(scratch.buffer)], partial(_spill, storage, held, scratch), f"stage {name}")
            )
            changes[operand] = replace(region, buffer=scratch.buffer)
    return steps, OpNode(replace(node.op, **changes), node.versions) if changes else node


def _spill(storage: Storage, held, scratch):
    view = storage.view(scratch)

    def one(reg, coords):
        return tirx.BufferStore(view, held.local[reg], [storage.element(scratch, coords)])

    return visit(held.layout, storage.tx, one, primary=True)


def _product(storage: Storage, node: OpNode) -> list[MicroNode]:
    op: GemmOp = node.op
    instruction = read_instruction(op.annotations)
    reads = [
        Access(r.buffer, node.versions.get(r.buffer))
        for r in (op.a, op.b, op.mask)
        if r is not None and r.scope == "shared"
    ]
    if instruction is None:
        return lower_fma(storage, node, reads)
    partition = read_partition(op.annotations)
    if instruction.family == "wgmma":
        return lower_wgmma(storage, node, instruction, partition, reads)
    label = f"gemm {op.name} ({instruction.ptx})"
    if partition.k_groups > 1:
        return _along_k(storage, node, instruction, partition, reads, label)
    return [MicroNode(reads, [], lambda: _Mma(storage, node, instruction, partition).emit(), label)]


def _along_k(storage: Storage, node: OpNode, instruction: Instruction, partition: WarpPartition, reads, label):
    """Steps of a product whose warps share sub-tiles along K: partial sums, and behind the last product the exchange.

    Each warp of a pair hands over the rows that the other one keeps, and adds those that it is given to its own.
    """
    begins, ends = read_partial(node.op.annotations)
    c = node.op.c.buffer
    count = partition.m_repeat * partition.n_repeat * 4
    sums = storage.partial_sums(c, count)
    mma = _Mma(storage, node, instruction, partition, sums)
    held = storage.fragments[c].local

    def cleared(buffer, registers: int):
        return unrolled(registers, lambda r: tirx.BufferStore(buffer, tirx.const(0, "float32"), [r]), "r")

    def product():
        before = [cleared(sums, count)] if begins else []
        if node.op.clear_accum:
            before.append(cleared(held, count // 2))
        return seq([*before, mma.emit()])

    if not ends:
        return [MicroNode(reads, [], product, label)]
    scratch = storage.new_scratch((partition.warps * count // 2 * 32,), "float32", f"{c.name}_halves")
    lane, warp = tirx.floormod(storage.tx, 32), tirx.floordiv(storage.tx, 32)
    upper = tirx.EQ(tirx.floormod(warp, 2), 0)

    def slot(of, r):
        return (of * (count // 2) + r) * 32 + lane

    def halves(r):
        """(a sum of the upper rows, the one in the same place of the lower rows)."""
        first = tirx.floordiv(r, 2) * 4 + tirx.floormod(r, 2)
        return sums[first], sums[first + 2]

    def hand_over(r):
        high, low = halves(r)
        return tirx.BufferStore(storage.view(scratch), tirx.Select(upper, low, high), [slot(warp, r)])

    def take(r):
        high, low = halves(r)
        total = tirx.Select(upper, high, low) + storage.view(scratch)[slot(tirx.bitwise_xor(warp, 1), r)]
        return tirx.BufferStore(held, held[r] + total, [r])

    def only(stmt):
        used = partition.warps * 32
        return stmt if used == storage.threads else when(storage.tx < used, stmt)

    written = [Access(scratch.buffer)]
    return [
        MicroNode(reads, written, lambda: seq([product(), only(unrolled(count // 2, hand_over, "r"))]), label),
        MicroNode(written, [], lambda: only(unrolled(count // 2, take, "r")), f"{label}: sums of both halves of K"),
    ]


@dataclass
class _Operand:
    """Registers of one operand for one k step: ``count`` words, in two sets that alternate."""

    words: object
    count: int

    def word(self, step: int, index):
        """Word ``index`` of the set that step ``step`` uses."""
        return self.words[(step % 2) * self.count + index]


class _Mma:
    def __init__(
        self, storage: Storage, node: OpNode, instruction: Instruction, partition: WarpPartition, sums=None
    ) -> None:
        self.storage, self.node, self.op = storage, node, node.op
        self.inst, self.part, self.sums = instruction, partition, sums
        self.analyzer = tvm.sym.Analyzer()
        self.analyzer.bind(storage.tx, Range(0, storage.threads))
        warp = tirx.floordiv(storage.tx, 32)
        self.lane = tirx.floormod(storage.tx, 32)
        self.k_start = const(0)
        if partition.k_groups > 1:
            self.k_start = tirx.floormod(warp, partition.k_groups) * (self.op.k // partition.k_groups)
            warp = tirx.floordiv(warp, partition.k_groups)
        self.wm = tirx.floordiv(warp, partition.n_groups) if partition.n_groups > 1 else warp
        self.wn = tirx.floormod(warp, partition.n_groups) if partition.n_groups > 1 else const(0)
        if partition.m_groups == 1:
            self.wm = const(0)
        self.steps = self.op.k // instruction.k // partition.k_groups
        self.c = storage.fragments[self.op.c.buffer]
        self.c_rows, self.c_cols = self._fragment_origin(self.op.c)

    # ---- the product

    def emit(self):
        """The whole product as one statement."""
        mi, ni = self.part.m_repeat, self.part.n_repeat
        stmts = []
        accumulators, before, after = self._accumulators()
        stmts += before
        a_at_hand = self.op.a.scope != "shared"
        a = (
            None
            if a_at_hand
            else _Operand(
                self.storage.new_local((2 * mi * self.inst.a_registers,), "uint32", "a_regs"),
                mi * self.inst.a_registers,
            )
        )
        b = _Operand(
            self.storage.new_local((2 * ni * self.inst.b_registers,), "uint32", "b_regs"), ni * self.inst.b_registers
        )

        def load(step: int):
            return [None if a_at_hand else self._load_a(a, step), self._load_b(b, step)]

        stmts += load(0)
        for step in range(self.steps):
            if step + 1 < self.steps:
                stmts += load(step + 1)
            stmts.append(
                unrolled(mi, lambda i, s=step: unrolled(ni, lambda j: self._product(accumulators, a, b, s, i, j), "j"))
            )
        stmts += after
        body = seq(stmts)
        used = self.part.warps * 32
        return body if used == self.storage.threads else when(self.storage.tx < used, body)

    def _product(self, accumulators, a, b, step: int, i, j):
        inst = self.inst
        c = [accumulators((i * self.part.n_repeat + j) * self._c_words + e) for e in range(self._c_words)]
        if a is None:
            left = [self._a_fragment_word(i, step, e) for e in range(inst.a_registers)]
        else:
            left = [a.word(step, i * inst.a_registers + e) for e in range(inst.a_registers)]
        right = [b.word(step, j * inst.b_registers + e) for e in range(inst.b_registers)]
        return evaluate(T.ptx[inst.ptx](*c, *left, *right, *c))

    @property
    def _c_words(self) -> int:
        return self.inst.m * self.inst.n * self.inst.accumulator_bits // 32 // 32

    def _accumulators(self):
        """(word -> register expression, statements before, statements after)."""
        if self.sums is not None:
            return (lambda w: self.sums[w]), [], []
        op, count = self.op, self.part.m_repeat * self.part.n_repeat * self._c_words
        packed = self.inst.accumulator_bits == 16
        # the instructions take pairs of float16 and integers as untyped words
        untyped = packed or self.inst.c_dtype == "int32"
        registers = self.c.words if untyped else self.c.local
        zero = tirx.const(0, "uint32" if untyped else self.c.dtype)
        if op.mask is not None:
            return self._masked(zero, count, packed)
        before = (
            [unrolled(count, lambda r: tirx.BufferStore(registers, zero, [self._c_base(packed) + r]), "r")]
            if op.clear_accum
            else []
        )
        return (lambda w: registers[self._c_base(packed) + w]), before, []

    def _c_base(self, packed: bool):
        """Register where C's region starts inside its fragment (slices along whole instruction blocks)."""
        base = self.c.layout.register_of([self.c_rows, self.c_cols]) if (self.c_rows or self.c_cols) else 0
        return base // 2 if packed else base

    def _masked(self, zero, count: int, packed: bool):
        """Masked elements keep C's old value, or get ``mask_value``: the sum is made apart and merged."""
        if packed:
            raise InternalError("a tile mask with a float16 accumulator", self.op.location)
        op, registers = self.op, self.c.local
        total = self.storage.new_local((count,), str(zero.ty.dtype), "masked_sum")
        before = [unrolled(count, lambda r: tirx.BufferStore(total, zero, [r]), "r")]
        layout = self.c.layout

        def merge(reg):
            row, col = layout.coords(self.storage.tx, reg)
            keep = self._mask_at(row, col, reg)
            old = tirx.const(0, self.c.dtype) if op.clear_accum else registers[reg]
            other = old if op.mask_value is None else op.mask_value
            added = tirx.Cast(self.c.dtype, total[reg])  # of integers: the same bits
            merged = tirx.BufferStore(registers, tirx.Select(keep, old + added, other), [reg])
            # nothing set the registers of padding
            return when(all_of([(row, col)[dim] < extent for dim, extent in layout.bounds()]), merged)

        return (lambda w: total[w]), before, [unrolled(count, merge, "r")]

    def _mask_at(self, row, col, reg):
        mask: Region = self.op.mask
        dtype = mask.dtype
        lead = len(mask.mins) - 2
        row, col = self.analyzer.simplify(row), self.analyzer.simplify(col)
        if mask.scope == "local.fragment":
            held = self.storage.fragments[mask.buffer]
            if held.layout.register_of([0, 0]) != 0 or held.layout.digits != self.c.layout.digits:
                raise InternalError(f"the mask {mask.buffer.name} is laid out differently from C", self.op.location)
            value = held.local[reg]
        else:
            tile = self.storage.tile_of(mask.buffer)
            m, n = self.op.m, self.op.n
            # padded rows and columns read somewhere inside the tile: their results are never looked at
            at = [*mask.mins[:lead], mask.mins[lead] + tirx.min(row, m - 1), mask.mins[lead + 1] + tirx.min(col, n - 1)]
            value = self.storage.view(tile)[self.storage.element(tile, at, self.node.versions.get(mask.buffer))]
        return value if dtype == "bool" else value != tirx.const(0, dtype)

    # ---- operands

    def _fragment_origin(self, region: Region) -> tuple[int, int]:
        origin = [self.analyzer.simplify(tirx.convert(m)) for m in region.mins[-2:]]
        if not all(isinstance(m, tirx.IntImm) for m in origin):
            raise InternalError(
                f"a slice of fragment {region.buffer.name} that starts at a run-time index", self.op.location
            )
        return int(origin[0].value), int(origin[1].value)

    def _a_fragment_word(self, i, step: int, e: int):
        held = self.storage.fragments[self.op.a.buffer]
        row0, col0 = self._fragment_origin(self.op.a)
        layout = a_fragment(self.inst, self.part, held.layout.shape[-1], self.storage.threads)
        if held.layout.digits != layout.digits:
            raise InternalError(
                f"fragment {self.op.a.buffer.name} {held.layout} is not the A operand {layout}", self.op.location
            )
        if row0 % self.inst.m or col0 % self.inst.k or row0:
            raise InternalError(
                f"a slice of the A operand {self.op.a.buffer.name} that cuts an instruction", self.op.location
            )
        total_steps = held.layout.shape[-1] // self.inst.k
        word = (i * total_steps + (col0 // self.inst.k + step)) * self.inst.a_registers + e
        return held.words[word] if held.words is not None else tirx.reinterpret("uint32", held.local[word])

    def _depth(self, step: int):
        """Where a k step begins."""
        at = step * self.inst.k
        return at if self.part.k_groups == 1 else self.k_start + at

    def _load_a(self, a: _Operand, step: int):
        def one(i):
            rows = self.wm * self.part.group_m + i * self.inst.m
            if self._gathers(self.op.a, self.op.trans_a):
                return self._gather_a(a, step, i, rows)
            move = load_a(self.inst, trans=self.op.trans_a)
            row, col = move.address(self.lane)
            m, k = (col, row) if self.op.trans_a else (row, col)
            at = self._address(self.op.a, self.op.trans_a, rows + m, self._depth(step) + k, self.op.m)
            words = [a.word(step, i * self.inst.a_registers + e) for e in range(move.count)]
            return seq([evaluate(T.ptx[move.ptx](*words, at)), self._round_tf32(words)])

        return unrolled(self.part.m_repeat, one)

    def _load_b(self, b: _Operand, step: int):
        if self._gathers(self.op.b, not self.op.trans_b):
            return unrolled(self.part.n_repeat, lambda j: self._gather_b(b, step, j), "j")
        per_move = max(1, 4 // self.inst.b_registers)
        whole, rest = divmod(self.part.n_repeat, per_move)
        stored_kn = not self.op.trans_b

        def one(j, count: int):
            move = load_b(self.inst, count, trans=stored_kn)
            row, col = move.address(self.lane)
            n, k = (col, row) if stored_kn else (row, col)
            cols = self.wn * self.part.group_n + j * self.inst.n
            at = self._address(
                self.op.b, self.op.trans_b, cols + n, self._depth(step) + k, self.op.n, outer_first=self.op.trans_b
            )
            words = [b.word(step, j * self.inst.b_registers + e) for e in range(count)]
            return seq([evaluate(T.ptx[move.ptx](*words, at)), self._round_tf32(words)])

        stmts = []
        if whole:
            stmts.append(unrolled(whole, lambda j: one(j * per_move, 4), "j"))
        done = whole * per_move
        while rest:
            step_n = 1 if per_move == 1 or rest == 1 else 2
            step_n = min(step_n, rest)
            stmts.append(one(const(done), step_n * self.inst.b_registers))
            done, rest = done + step_n, rest - step_n
        return seq(stmts)

    def _address(self, region: Region, transposed: bool, outer, k, limit: int, outer_first: bool | None = None):
        """Shared address of operand element (outer, k); rows or columns of padding read inside the tile."""
        tile = self.storage.tile_of(region.buffer)
        padded = self.part.padded_m if region is self.op.a else self.part.padded_n
        if padded != limit:
            outer = tirx.min(outer, limit - 1)
        rows_are_outer = (not transposed) if outer_first is None else outer_first
        pair = (outer, k) if rows_are_outer else (k, outer)
        lead = len(region.mins) - 2
        at = [*region.mins[:lead], *[self._plus(m, p) for m, p in zip(region.mins[lead:], pair, strict=True)]]
        element = self.storage.element(
            tile, [self.analyzer.simplify(tirx.convert(x)) for x in at], self.node.versions.get(region.buffer)
        )
        return self.storage.address(tile, self.analyzer.simplify(tirx.convert(element)))

    @staticmethod
    def _plus(a, b):
        return b if isinstance(a, int | tirx.IntImm) and int(a) == 0 else a + b

    def _round_tf32(self, words):
        """Tensor cores truncate float32 operands: round them to nearest first (PTX ISA, cvt.rna.tf32)."""
        if self.inst.a_dtype != "tf32":
            return None
        return seq([evaluate(T.ptx["cvt.rna.tf32.f32"](w, tirx.reinterpret("float32", w))) for w in words])

    # ---- operands that ldmatrix cannot deliver

    def _gathers(self, region: Region, k_along_rows: bool) -> bool:
        return k_along_rows and self.inst.operand_bits != 16

    def _element(self, region: Region, pair, limit: int, outer_position: int):
        tile = self.storage.tile_of(region.buffer)
        pair = list(pair)
        padded = self.part.padded_m if region is self.op.a else self.part.padded_n
        if padded != limit:
            pair[outer_position] = tirx.min(pair[outer_position], limit - 1)
        lead = len(region.mins) - 2
        at = [*region.mins[:lead], *[self._plus(m, p) for m, p in zip(region.mins[lead:], pair, strict=True)]]
        element = self.storage.element(
            tile, [self.analyzer.simplify(tirx.convert(x)) for x in at], self.node.versions.get(region.buffer)
        )
        return self.storage.view(tile)[element]

    def _pack(self, elements):
        """Elements of one 32-bit register, lowest first."""
        if self.inst.operand_bits == 32:
            return tirx.reinterpret("uint32", elements[0])
        word = None
        for n, element in enumerate(elements):
            part = tirx.Cast("uint32", tirx.reinterpret("uint8", element))
            part = part if n == 0 else tirx.shift_left(part, tirx.const(8 * n, "uint32"))
            word = part if word is None else word | part
        return word

    def _gather_a(self, a: _Operand, step: int, i, rows):
        per = 32 // self.inst.operand_bits
        group, quad = tirx.floordiv(self.lane, 4), tirx.floormod(self.lane, 4)
        stmts = []
        for e in range(self.inst.a_registers):
            row = rows + group + 8 * (e % 2)
            k0 = self._depth(step) + quad * per + 4 * per * (e // 2)
            values = [self._element(self.op.a, (k0 + x, row), self.op.m, 1) for x in range(per)]
            stmts.append(
                tirx.BufferStore(a.words, self._pack(values), [(step % 2) * a.count + i * self.inst.a_registers + e])
            )
        return seq(
            [
                *stmts,
                self._round_tf32([a.word(step, i * self.inst.a_registers + e) for e in range(self.inst.a_registers)]),
            ]
        )

    def _gather_b(self, b: _Operand, step: int, j):
        per = 32 // self.inst.operand_bits
        group, quad = tirx.floordiv(self.lane, 4), tirx.floormod(self.lane, 4)
        stmts = []
        for e in range(self.inst.b_registers):
            col = self.wn * self.part.group_n + j * self.inst.n + group
            k0 = self._depth(step) + quad * per + 4 * per * e
            values = [self._element(self.op.b, (k0 + x, col), self.op.n, 1) for x in range(per)]
            stmts.append(
                tirx.BufferStore(b.words, self._pack(values), [(step % 2) * b.count + j * self.inst.b_registers + e])
            )
        return seq(
            [
                *stmts,
                self._round_tf32([b.word(step, j * self.inst.b_registers + e) for e in range(self.inst.b_registers)]),
            ]
        )
