"""Fragment to tensor by TMA: boxes of a warpgroup's accumulator go to shared memory and are stored by one thread.

Each warpgroup works on its own boxes, with a named barrier of its own: no warpgroup waits for another. Where a
warpgroup has fewer slots than boxes, or a loop or a persistent kernel comes back to them, a slot is written again once
the copy engine has read it (``cp.async.bulk.wait_group.read``). Source: PTX ISA 8.8, ``cp.async.bulk``, ``stmatrix``.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...errors import InternalError
from ...ir.ops import CopyOp
from ...layout import SharedLayout
from ...layout.boxes import BOX_ROWS, WARPGROUP, warpgroup_boxes
from ...schedule.decisions import read_slots
from .build import const, evaluate, seq, unrolled, when
from .convert import convert_pair, move
from .program import Access, MicroNode, OpNode
from .space import expr
from .storage import Storage, dtype_bits

__all__ = ["drain_stores", "lower_tma_store"]

#: Named barriers of the warpgroups, after those of the consumers together and of their turns.
FIRST_BARRIER = 4
_MATRICES = 4  # of one stmatrix
_LANES = 32


def drain_stores(storage: Storage):
    """Wait, at the end of a kernel, until the copy engine has read all boxes; None where there are none."""
    if not storage.stores_by_tma:
        return None
    return when(_is_first(storage), evaluate(T.ptx.cp.async_.bulk.wait_group.read(0)))


def lower_tma_store(storage: Storage, node: OpNode, columns: int, hw) -> list[MicroNode]:
    """The step of a copy from a fragment to a tensor.

    Parameters
    ----------
    storage : Storage
        The kernel's storage, with its tensor maps.
    node : OpNode
        A :class:`CopyOp`.
    columns : int
        Columns of a box.
    hw : GPU
        The target machine.
    """
    op: CopyOp = node.op
    held = storage.fragments[op.src.buffer]
    boxes = warpgroup_boxes(held.layout, columns)
    slots = read_slots(op.annotations)
    if storage.maps is None or boxes is None or not slots or len(boxes) % slots:
        raise InternalError(f"copy {op.name} cannot be a TMA store", op.location)
    made = _Store(storage, node, columns, boxes, slots, hw)
    storage.stores_by_tma = True
    # a persistent kernel's boxes have their own space and their own barriers
    writes = [] if storage.persistent else [Access(made.tile.buffer)]
    return [MicroNode([], writes, made.emit, f"copy {op.name} (tma store)")]


def _is_first(storage: Storage):
    """The thread of each warpgroup that stores."""
    return tirx.EQ(tirx.floormod(storage.tx, const(WARPGROUP)), const(0))


class _Store:
    def __init__(self, storage: Storage, node: OpNode, columns: int, boxes: tuple[int, ...], slots: int, hw) -> None:
        self.storage, self.node, self.op, self.hw = storage, node, node.op, hw
        self.columns, self.boxes, self.slots = columns, boxes, slots
        self.again = storage.persistent or storage.loops > 0  # the slots are full when the step comes round
        self.held = storage.fragments[self.op.src.buffer]
        self.groups = self.held.layout.used_threads // WARPGROUP
        self.source, self.target = self.op.src.dtype, self.op.dst.dtype
        bits = dtype_bits(self.target)
        rows = self.groups * slots * BOX_ROWS
        layout = SharedLayout.swizzled((rows, columns), bits, columns * bits // 8)
        self.tile = storage.new_scratch((rows, columns), self.target, f"{self.op.src.buffer.name}_boxes", layout)
        self.tile.lasting = "always" if storage.persistent else "onwards"
        self.packed = None
        if self.source != self.target:
            self.packed = storage.new_local((_MATRICES,), "uint32", f"{self.op.src.buffer.name}_packed")

    def emit(self):
        """Boxes one after another; all at once where each has a slot of its own."""
        if self.slots == len(self.boxes):
            parts = [self._wait(0)] if self.again else []
            parts += [self._write(n) for n in range(len(self.boxes))]
            parts += [self._publish(), self._store(range(len(self.boxes)))]
        else:
            parts = []
            for n in range(len(self.boxes)):
                if n >= self.slots or self.again:
                    parts.append(self._wait(self.slots - 1))
                parts += [self._write(n), self._publish(), self._store([n])]
        body = seq(parts)
        if self.held.layout.used_threads == self.storage.threads:
            return body
        return when(self.storage.warpgroup < self.groups, body)

    # ---- synchronisation of one warpgroup

    def _meet(self):
        barrier = T.uint32(FIRST_BARRIER) + tirx.Cast("uint32", self.storage.warpgroup)
        return evaluate(T.ptx.bar.sync(barrier, T.uint32(WARPGROUP)))

    def _wait(self, pending: int):
        """Until the slot written next has been read."""
        wait = evaluate(T.ptx.cp.async_.bulk.wait_group.read(pending))
        return seq([when(_is_first(self.storage), wait), self._meet()])

    def _publish(self):
        """What the threads wrote becomes visible to the copy engine."""
        return seq([evaluate(T.ptx.fence.proxy.async_.shared__cta()), self._meet()])

    # ---- one box

    def _slot_row(self, n: int):
        """First row of a box's slot in the scratch tile."""
        return (self.storage.warpgroup * self.slots + n % self.slots) * BOX_ROWS

    def _write(self, n: int):
        thread = tirx.floormod(self.storage.tx, const(WARPGROUP))
        lane, warp = tirx.floormod(thread, const(_LANES)), tirx.floordiv(thread, const(_LANES))
        if dtype_bits(self.target) == 16:
            return self._matrices(n, lane, warp)
        return self._pairs(n, lane, warp)

    def _matrices(self, n: int, lane, warp):
        """16 x 16 elements a warp and instruction: lanes 0-15 address the left half's rows, 16-31 the right's."""
        storage = self.storage
        row = self._slot_row(n) + warp * 16 + tirx.floormod(lane, const(16))
        half = tirx.floordiv(lane, const(16))

        def one(pair):
            at = self.tile.layout.chunk_offset(row, pair * 2 + half)
            address = storage.address(self.tile, at)
            first = self.boxes[n] + pair * 2 * _MATRICES
            if self.packed is None:
                words = [self.held.words[tirx.floordiv(first, const(2)) + e] for e in range(_MATRICES)]
                return self._stmatrix(address, words)
            stmts = []
            for e in range(_MATRICES):
                low, high = (self.held.local[first + 2 * e + k] for k in range(2))
                stmts.append(
                    convert_pair(self.source, self.target, tirx.address_of(self.packed[e]), low, high, self.hw)
                )
            stmts.append(self._stmatrix(address, [self.packed[e] for e in range(_MATRICES)]))
            return seq(stmts)

        return unrolled(self.columns // 16, one, "pair")

    def _stmatrix(self, address, words: list):
        return evaluate(T.ptx["stmatrix.sync.aligned.m8n8.x4.shared.b16"](address, *words))

    def _pairs(self, n: int, lane, warp):
        """Two neighbouring 32-bit elements an access."""
        view = self.storage.view(self.tile)
        row = self._slot_row(n) + warp * 16 + tirx.floordiv(lane, const(4))
        column = tirx.floormod(lane, const(4)) * 2

        def one(pair):
            # registers 2 pair, 2 pair + 1: columns 8 (pair // 2) + ..., rows + 8 for odd pairs
            at = self.storage.element(
                self.tile,
                [row + tirx.floormod(pair, const(2)) * 8, column + tirx.floordiv(pair, const(2)) * 8],
            )
            register = self.held.local[self.boxes[n] + pair * 2]
            return move(8, tirx.address_of(tirx.BufferLoad(view, [at])), tirx.address_of(register))

        return unrolled(self.columns // 4, one, "pair")

    def _store(self, numbers):
        stmts = [self._store_one(n) for n in numbers]
        return when(_is_first(self.storage), seq([*stmts, evaluate(T.ptx.cp.async_.bulk.commit_group())]))

    def _store_one(self, n: int):
        storage, region = self.storage, self.op.dst
        rank = len(region.buffer.ty.shape)
        row_axis, column_axis = self.op.src.axes
        row_dim = next(d for d in range(rank - 1) if region.axes[d] == row_axis)
        # where the warpgroup's box begins: what its first thread holds in the box's first register
        row, column = self.held.layout.coords(storage.warpgroup * WARPGROUP, self.boxes[n])
        tensor_map = storage.maps.map_of(region, self.tile, BOX_ROWS, self.columns, row_dim, store=True)
        coordinates = []
        for dim in reversed(range(rank)):
            at = storage.rewrite(expr(region.mins[dim]), versions=self.node.versions)
            shift = column if dim == rank - 1 else row if dim == row_dim else 0
            at = at if isinstance(shift, int) and shift == 0 else at + shift
            coordinates.append(tirx.Cast("int32", tirx.convert(at)))
        address = storage.address(self.tile, self._slot_row(n) * self.tile.layout.row_stride)
        name = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
        return evaluate(T.ptx[name](T.address_of(tensor_map), *coordinates, address))
