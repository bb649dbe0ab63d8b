"""Prefix sums: elements to a scratch tile, lines scanned there by warps (or threads), results back to their owners.

A line is scanned by one warp in steps of 32 elements (shuffles, Hillis and Steele 1986) where there are few lines,
and by one thread each where there are many. Narrow types are summed in 32 bits.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import Bind, BufferStore

from ...errors import TileTypeError
from ...ir.ops import CumsumOp, Region
from ...layout import default_fragment
from .build import const, loop, seq, when
from .convert import cast
from .loops import ElementLoop
from .program import Access, MicroNode, OpNode
from .reduce import accumulator_dtype
from .space import expr
from .storage import SharedTile, Storage, dtype_bits

__all__ = ["lower_cumsum"]

_WARP = 32
_FULL = 0xFFFFFFFF


def lower_cumsum(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of a prefix sum.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`CumsumOp`.
    hw : GPU
        The target machine.
    """
    return _Scan(storage, node, hw).steps()


class _Scan:
    def __init__(self, storage: Storage, node: OpNode, hw) -> None:
        self.storage, self.node, self.hw = storage, node, hw
        self.op: CumsumOp = node.op
        self.extents = [int(a.extent) for a in self.op.axes]  # the scanned axis last
        self.length = self.extents[-1]
        self.lines = 1
        for extent in self.extents[:-1]:
            self.lines *= extent
        self.dtype = accumulator_dtype(self.op.src.dtype)
        self.stride = self.length + (self.length % 2 == 0)  # an odd stride: threads on neighbouring lines hit all banks

    def steps(self) -> list[MicroNode]:
        """Write, scan, read."""
        op, storage, node = self.op, self.storage, self.node
        for region in (op.src, op.dst):
            if region.buffer not in storage.fragments and region.buffer not in storage.tiles:
                raise TileTypeError(
                    f"T.cumsum: {region.buffer.name} is per-thread memory, which CUDA targets cannot scan",
                    op.location,
                    "use a fragment (T.alloc_fragment) or a shared tile",
                )
        scratch = storage.new_scratch((self.lines * self.stride,), self.dtype, f"{op.src.buffer.name}_scan")
        shared = Access(scratch.buffer)

        def outer(region: Region) -> list[Access]:
            return [Access(region.buffer, node.versions.get(region.buffer))] if region.buffer in storage.tiles else []

        label = f"cumsum {op.name}"
        return [
            MicroNode(outer(op.src), [shared], lambda: self._write(scratch), f"{label}: to scratch"),
            MicroNode([shared], [shared], lambda: self._scan(scratch), f"{label}: scan"),
            MicroNode([shared], outer(op.dst), lambda: self._read(scratch), f"{label}: from scratch"),
        ]

    def _space(self, region: Region) -> ElementLoop:
        storage = self.storage
        if region.buffer in storage.fragments:
            window = (region.buffer, region.mins, region.axes)
            return ElementLoop(storage, self.node, storage.fragments[region.buffer].layout, window)
        bits = dtype_bits(region.dtype)
        return ElementLoop(storage, self.node, default_fragment(self.extents, storage.threads, bits, bits))

    def _slot(self, values: list):
        line = const(0)
        for value, extent in zip(values[:-1], self.extents[:-1], strict=True):
            line = line * extent + value
        return line * self.stride + values[-1]

    def _element(self, region: Region, values: list):
        storage = self.storage
        tile = storage.tile_of(region.buffer)
        at = []
        for low, axis in zip(region.mins, region.axes, strict=True):
            low = storage.rewrite(expr(low), versions=self.node.versions)
            at.append(low if axis is None else values[axis] + low)
        return storage.view(tile), storage.element(tile, at, self.node.versions.get(region.buffer))

    def _write(self, scratch: SharedTile):
        storage, region = self.storage, self.op.src
        space = self._space(region)

        def one(reg, values):
            if region.buffer in storage.fragments:
                value = storage.fragments[region.buffer].local[reg]
            else:
                view, at = self._element(region, values)
                value = view[at]
            return BufferStore(storage.view(scratch), cast(value, self.dtype, self.hw), [self._slot(values)])

        return space.visit(one, primary=True)

    def _read(self, scratch: SharedTile):
        storage, region = self.storage, self.op.dst
        space = self._space(region)
        in_registers = region.buffer in storage.fragments

        def one(reg, values):
            value = cast(storage.view(scratch)[self._slot(values)], region.dtype, self.hw)
            if in_registers:
                return BufferStore(storage.fragments[region.buffer].local, value, [reg])
            view, at = self._element(region, values)
            return BufferStore(view, value, [at])

        return space.visit(one, primary=not in_registers)

    def _scan(self, scratch: SharedTile):
        threads = self.storage.threads
        if threads % _WARP == 0 and self.lines * 8 <= threads * 2 and self.length > 8:
            return self._by_warps(scratch)
        return self._by_threads(scratch)

    def _position(self, step):
        return (self.length - 1) - step if self.op.reverse else step

    def _by_threads(self, scratch: SharedTile):
        storage, threads = self.storage, self.storage.threads
        view, total = storage.view(scratch), storage.new_local((1,), self.dtype, "scan_total")

        def line(number):
            at = number * threads + storage.tx

            def step(k):
                slot = at * self.stride + self._position(k)
                return [BufferStore(total, total[0] + view[slot], [const(0)]), BufferStore(view, total[0], [slot])]

            body = seq([BufferStore(total, tirx.const(0, self.dtype), [const(0)]), loop(self.length, step, "k")])
            return body if self.lines % threads == 0 else when(at < self.lines, body)

        return loop(-(-self.lines // threads), line, "line")

    def _by_warps(self, scratch: SharedTile):
        storage, warps = self.storage, self.storage.threads // _WARP
        view = storage.view(scratch)
        value, carry = (storage.new_local((1,), self.dtype, name) for name in ("scan_value", "scan_carry"))
        warp, lane = tirx.floordiv(storage.tx, const(_WARP)), tirx.floormod(storage.tx, const(_WARP))
        mask, zero = T.uint32(_FULL), tirx.const(0, self.dtype)

        def line(number):
            row = number * warps + warp

            def chunk(k):
                position = Var("position", "int32")
                inside = position < self.length
                if self.lines % warps:
                    inside = tirx.And(inside, row < self.lines)
                slot = row * self.stride + self._position(position)
                stmts = [
                    Bind(position, k * _WARP + lane),
                    BufferStore(value, zero, [const(0)]),
                    when(inside, BufferStore(value, view[slot], [const(0)])),
                ]
                for distance in (1, 2, 4, 8, 16):
                    moved = Var("moved", self.dtype)
                    up = getattr(T.cuda, "__shfl_up_sync")(mask, value[0], distance, _WARP)
                    stmts += [
                        Bind(moved, up),
                        when(lane >= distance, BufferStore(value, value[0] + moved, [const(0)])),
                    ]
                last = getattr(T.cuda, "__shfl_sync")(mask, value[0], _WARP - 1, _WARP)
                stmts += [
                    BufferStore(value, value[0] + carry[0], [const(0)]),
                    when(inside, BufferStore(view, value[0], [slot])),
                    BufferStore(carry, last, [const(0)]),
                ]
                return stmts

            chunks = -(-self.length // _WARP)
            return seq([BufferStore(carry, zero, [const(0)]), loop(chunks, chunk, "chunk")])

        return loop(-(-self.lines // warps), line, "line")
