"""``T.gemm`` with wgmma: asynchronous products of warpgroups, operands read from shared memory through descriptors.

The step only issues and commits; :mod:`wgmma_waits` places the wait where the accumulator is first needed.
Descriptors: start address of the operand in units of 16 bytes, constant bits from :class:`layout.OperandDescriptor`;
K steps advance the start. Source: PTX ISA 8.8, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import Bind

from ...errors import InternalError
from ...ir.ops import GemmOp, Region
from ...layout import Instruction, WarpPartition, a_fragment, operand_descriptor
from ...layout.boxes import WARPGROUP
from .build import const, evaluate, seq, when
from .program import Access, MicroNode, OpNode, WgmmaIssue
from .storage import Storage

__all__ = ["lower_wgmma"]


def lower_wgmma(
    storage: Storage, node: OpNode, instruction: Instruction, partition: WarpPartition, reads: list[Access]
) -> list[MicroNode]:
    """Steps of a product: one that issues and commits it.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`GemmOp` without a tile mask.
    instruction, partition : Instruction, WarpPartition
        The rules' decisions.
    reads : list of Access
        Shared operands.
    """
    op: GemmOp = node.op
    if op.mask is not None:
        raise InternalError("wgmma has no tile mask", op.location)
    reads = [Access(a.buffer, a.version, "async") for a in reads]
    issue = WgmmaIssue(op.c.buffer, op.a.buffer if op.a.scope == "local.fragment" else None)
    emit = _Wgmma(storage, node, instruction, partition)
    return [MicroNode(reads, [], emit.emit, f"gemm {op.name} ({instruction.ptx})", wgmma=issue)]


class _Wgmma:
    def __init__(self, storage: Storage, node: OpNode, instruction: Instruction, partition: WarpPartition) -> None:
        self.storage, self.node, self.op, self.part = storage, node, node.op, partition
        self.inst = instruction.with_n(partition.instruction_n)
        self.registers = self.inst.c_registers
        self.steps = self.op.k // instruction.k
        self.held = storage.fragments[self.op.c.buffer]
        group = storage.warpgroup
        n_groups = partition.n_groups
        self.wm = tirx.floordiv(group, n_groups) if n_groups > 1 else group
        self.wn = tirx.floormod(group, n_groups) if n_groups > 1 else const(0)
        if partition.m_groups == 1:
            self.wm = const(0)
        self.roots: dict[tuple, Var] = {}
        self.bound: list = []

    def emit(self):
        """Fence, products of all K steps, commit."""
        part = self.part
        products = [
            self._product(i, j, step)
            for i in range(part.m_repeat)
            for j in range(part.n_repeat)
            for step in range(self.steps)
        ]
        fence = evaluate(T.ptx.wgmma.fence.sync.aligned())
        body = seq([*self.bound, fence, *products, evaluate(T.ptx.wgmma.commit_group.sync.aligned())])
        used = part.m_groups * part.n_groups * WARPGROUP
        return body if used == self.storage.threads else when(self.storage.tx < used, body)

    def _product(self, i: int, j: int, step: int):
        packed = self.inst.accumulator_bits == 16
        registers = self.held.words if packed or self.inst.c_dtype == "int32" else self.held.local
        row, col = (self._static(m) for m in self.op.c.mins[-2:])
        base = self.held.layout.register_of([row, col]) if row or col else 0
        base = (base // 2 if packed else base) + (i * self.part.n_repeat + j) * self.registers
        accumulators = [registers[base + e] for e in range(self.registers)]
        accumulate = const(0 if self.op.clear_accum and step == 0 else 1)
        b = self._descriptor(self.op.b, not self.op.trans_b, self.wn, self.part.group_n, self.part.n_groups,
                             j * self.inst.n, self.inst.n, step)  # fmt: skip
        sixteen = self.inst.operand_bits == 16
        trans_b = [0 if self.op.trans_b else 1] if sixteen else []
        scales = [] if self.inst.c_dtype == "int32" else [1, 1]
        if self.op.a.scope == "local.fragment":
            a = self._a_words(i, step)
            return evaluate(T.ptx[self.inst.ptx](*accumulators, *a, b, T.ptx.pred(accumulate), *scales, *trans_b))
        a = self._descriptor(self.op.a, self.op.trans_a, self.wm, self.part.group_m, self.part.m_groups,
                             i * self.inst.m, self.inst.m, step)  # fmt: skip
        trans_a = [1 if self.op.trans_a else 0] if sixteen else []
        return evaluate(T.ptx[self.inst.ptx](*accumulators, a, b, T.ptx.pred(accumulate), *scales, *trans_a, *trans_b))

    def _static(self, value) -> int:
        if isinstance(value, int | tirx.IntImm):
            return int(value)
        raise InternalError("a slice of a wgmma fragment that starts at a run-time index", self.op.location)

    def _a_words(self, i: int, step: int):
        held = self.storage.fragments[self.op.a.buffer]
        columns = held.layout.shape[-1]
        layout = a_fragment(self.inst, self.part, columns, self.storage.threads)
        if held.layout.digits != layout.digits:
            raise InternalError(
                f"fragment {self.op.a.buffer.name} {held.layout} is not the A operand {layout}", self.op.location
            )
        row, col = (self._static(m) for m in self.op.a.mins[-2:])
        if row or col % self.inst.k:
            raise InternalError(
                f"a slice of the A operand {self.op.a.buffer.name} that cuts an instruction", self.op.location
            )
        count = self.inst.a_registers
        first = (i * (columns // self.inst.k) + col // self.inst.k + step) * count
        return [held.words[first + e] if held.words is not None else tirx.reinterpret("uint32", held.local[first + e])
                for e in range(count)]  # fmt: skip

    def _descriptor(
        self, region: Region, mn_major: bool, group, group_extent: int, groups: int, mn: int, extent: int, step: int
    ):
        """The 64-bit descriptor of the operand at (group * group_extent + mn, step * k)."""
        tile = self.storage.tile_of(region.buffer)
        matrix = operand_descriptor(tile.layout, extent, k_major=not mn_major)
        lead = [self._static(m) for m in region.mins[:-2]]
        row, col = (self._static(m) for m in region.mins[-2:])
        mn0, k0 = (col, row) if mn_major else (row, col)
        k0 += step * self.inst.k
        offset = matrix.start(mn0 + mn, k0, tuple(lead))
        # what a warpgroup adds must be the same for each of them
        strides = {
            matrix.start(mn0 + mn + (g + 1) * group_extent, k0, tuple(lead)) - matrix.start(mn0 + mn + g *
            group_extent, k0, tuple(lead)) for g in range(groups - 1)
        }  # fmt: skip
        if len(strides) > 1:
            raise InternalError(f"warpgroups read {region.buffer.name} at uneven distances", self.op.location)
        root = self._root(region, tile, group, strides.pop() if strides else 0, matrix.bits & 0xFFFFFFFF)
        high = tirx.const(matrix.bits >> 32 << 32, "uint64")
        return tirx.bitwise_or(high, tirx.Cast("uint64", root + T.uint32(offset >> 4) if offset else root))

    def _root(self, region: Region, tile, group, stride: int, low: int):
        """Lower half of the descriptor of a warpgroup's part of a tile, bound once: instructions only add constants.

        Addresses stay below 256 KB, so that adding to the 14-bit field never carries out of it.
        """
        key = (tile.buffer.name, stride, low)
        if key not in self.roots:
            at = self.storage.base + T.uint32(tile.byte_offset)
            if stride:
                at = at + tirx.Cast("uint32", group) * T.uint32(stride)
            version = self.node.versions.get(region.buffer)
            if version is not None and tile.versions > 1:
                at = at + tirx.Cast("uint32", tirx.convert(version.index)) * T.uint32(tile.version_bytes)
            var = Var(self.storage.unique(f"{tile.buffer.name}_start"), "uint32")
            start = tirx.bitwise_and(tirx.shift_right(at, T.uint32(4)), T.uint32(0x3FFF))
            self.roots[key] = var
            self.bound.append(Bind(var, tirx.bitwise_or(start, T.uint32(low)) if low else start))
        return self.roots[key]
