"""Tensor memory accelerator: host-made tensor maps, loads and stores of whole tiles by one thread.

A map describes a global tensor and the box that one instruction moves; the hardware fills what lies outside of the
tensor with zeros and drops stores there, which is exactly the language's rule for ragged edges. A tile wider than its
swizzle span is moved in several boxes (:meth:`layout.SharedLayout.tma_boxes`). Source: CUDA Driver API,
``cuTensorMapEncodeTiled``; PTX ISA 8.8, ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import Bind

from ...errors import InternalError
from ...ir.ops import CopyOp, Region
from ...schedule.decisions import L2_POLICIES, read_l2, read_rows
from .build import evaluate, loop, seq, when
from .storage import SharedTile, Storage, dtype_bits

__all__ = ["TensorMaps", "clear_rows", "tile_bytes"]

#: What the cache brings for a load (``CUtensorMapL2promotion``): 256 bytes where a tile's row is narrower, which
#: fetches the next load's part; else 128. Measured on an H200: rows of 256 bytes, one row of A, 33.7 us with 128 and
#: 36.1 with 256; rows of 128 bytes, 128 rows of A, 39.5 and 38.4 us. Where rows do not start on sectors, 66 and 75 us.
_L2_PROMOTION_128B, _L2_PROMOTION_256B = 2, 3
_SECTOR = 32


def tile_bytes(tile: SharedTile, rows: int | None = None) -> int:
    """Bytes that the boxes of one tile, or of its first rows, deliver (out-of-bounds parts count too)."""
    return sum(r * columns for _, _, r, columns, _ in _boxes(tile, rows)) * dtype_bits(tile.dtype) // 8


def _boxes(tile: SharedTile, limit: int | None):
    """The boxes of a tile without the rows from ``limit`` on."""
    for row, column, rows, columns, element in tile.layout.tma_boxes():
        kept = rows if limit is None else min(rows, limit - row)
        if kept > 0:
            yield row, column, kept, columns, element


def clear_rows(storage: Storage, op: CopyOp, threads: int):
    """Zeros in the rows of all copies of a tile that its loads leave out; None where they bring all rows.

    Parameters
    ----------
    storage : Storage
        The kernel's storage, placed.
    op : CopyOp
        The load.
    threads : int
        Threads that take part.
    """
    rows, tile = read_rows(op.annotations), storage.tile_of(op.dst.buffer)
    if rows is None:
        return None
    layout = tile.layout
    vector = layout.chunk_elements
    each = (layout.rows - rows) * layout.row_stride // vector
    total = tile.versions * layout.blocks * each
    source = "__forceinline__ __device__ void tile_clear_16(void* at) { *(uint4*)at = make_uint4(0, 0, 0, 0); }"

    def one(step):
        number = step * threads + storage.tx
        block = tirx.floordiv(number, each)
        at = (
            tirx.floordiv(block, layout.blocks) * tile.version_elements
            + tirx.floormod(block, layout.blocks) * layout.block_stride
            + rows * layout.row_stride
            + tirx.floormod(number, each) * vector
        )
        pointer = tirx.address_of(tirx.BufferLoad(storage.view(tile), [at]))
        return when(number < total, evaluate(T.cuda.func_call("tile_clear_16", pointer, source_code=source)))

    return seq([loop(-(-total // threads), one, "step"), evaluate(T.ptx.fence.proxy.async_.shared__cta())])


@dataclass
class TensorMaps:
    """The tensor maps of one kernel: made on the host before the launch, one for each tensor and box shape."""

    storage: Storage
    made: dict[tuple, Var] = field(default_factory=dict)
    host: list = field(default_factory=list)
    filled: dict[Var, object] = field(default_factory=dict)

    def map_of(
        self, region: Region, tile: SharedTile, rows: int, columns: int, row_dim: int | None, store: bool
    ) -> Var:
        """The map for boxes of ``rows x columns`` of a tensor."""
        buffer = region.buffer
        key = (buffer.name, rows, columns, row_dim, tile.layout.tma_swizzle, store)
        if key in self.made:
            return self.made[key]
        rank = len(buffer.ty.shape)
        bits = dtype_bits(region.dtype)
        box = [1] * rank
        box[rank - 1] = columns
        if row_dim is not None:
            box[row_dim] = rows
        variable = T.handle("tensormap")
        name = self.storage.unique(f"{buffer.name}_map")
        variable = Var(name, variable.ty)
        shape = [tirx.Cast("int64", tirx.convert(e)) for e in buffer.ty.shape]
        strides = list(buffer.ty.strides) or _row_major(shape)
        byte_strides = [tirx.Cast("int64", tirx.convert(s)) * tirx.const(bits // 8, "int64") for s in strides]
        arguments = [variable, region.dtype, rank, tirx.buffer_data(buffer)]
        arguments += list(reversed(shape)) + list(reversed(byte_strides[:-1])) + list(reversed(box)) + [1] * rank
        arguments += [0, tile.layout.tma_swizzle, 0 if store else _promotion(byte_strides, tile), 0]
        self.host.append(Bind(variable, T.tvm_stack_alloca("tensormap", 1)))
        # the driver refuses maps of empty tensors; no box of one is ever loaded
        filled = [e > 0 for e in shape if not isinstance(e.value, tirx.IntImm)]
        self.filled[variable] = functools.reduce(tirx.And, filled) if filled else True
        encode = evaluate(T.call_packed("runtime.cuTensorMapEncodeTiled", *arguments))
        self.host.append(when(self.filled[variable], encode))
        self.made[key] = variable
        return variable

    def load(self, op: CopyOp, version, barrier):
        """Statements of one thread that fill a tile and report to ``barrier``."""
        policy = L2_POLICIES[read_l2(op.annotations) or "evict_normal"]
        return self._moves(op.src, op.dst, version, barrier, read_rows(op.annotations), policy)

    def fetch_to_l2(self, op: CopyOp):
        """Statements of one thread that bring what a load will need as far as L2."""
        return self._moves(op.src, op.dst, None, None, read_rows(op.annotations), to_l2=True)

    def store(self, op: CopyOp, version):
        """Statements of one thread that write a tile to its tensor (the group is not committed)."""
        return self._moves(op.dst, op.src, version, None)

    def _moves(
        self, outside: Region, inside: Region, version, barrier, limit: int | None = None, policy=None, to_l2=False
    ):
        storage = self.storage
        tile = storage.tile_of(inside.buffer)
        rank = len(outside.buffer.ty.shape)
        row_axis, column_axis = inside.axes
        row_dim = next((d for d in range(rank - 1) if row_axis is not None and outside.axes[d] == row_axis), None)
        if outside.axes[rank - 1] != column_axis and column_axis is not None:
            raise InternalError(f"a TMA copy whose columns are not the last dimension of {outside.buffer.name}")
        stmts = []
        for row, column, rows, columns, element in _boxes(tile, limit):
            tensor_map = self.map_of(outside, tile, rows, columns, row_dim, store=barrier is None and not to_l2)
            coordinates = []
            for dim in reversed(range(rank)):
                at = outside.mins[dim]
                shift = column if dim == rank - 1 else row if dim == row_dim else 0
                at = at + shift if shift else at
                coordinates.append(tirx.Cast("int32", tirx.convert(at)))
            at = tirx.const(element, "int32")
            if version is not None and tile.versions > 1:
                at = version.index * tile.version_elements + at
            address = storage.address(tile, at)
            if to_l2:
                name = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile"
                stmts.append(evaluate(T.ptx[name](T.address_of(tensor_map), *coordinates)))
            elif barrier is None:
                name = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group"
                stmts.append(evaluate(T.ptx[name](T.address_of(tensor_map), *coordinates, address)))
            else:
                name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
                hint = () if policy is None else (tirx.const(policy, "uint64"),)
                name += "" if policy is None else ".L2::cache_hint"
                stmts.append(evaluate(T.ptx[name](address, T.address_of(tensor_map), *coordinates, barrier, *hint)))
        return seq(stmts)

    def prefetch(self):
        """One thread brings the maps into the descriptor cache."""
        return [when(self.filled[v], evaluate(T.ptx.prefetch.tensormap(T.address_of(v)))) for v in self.made.values()]


def _promotion(byte_strides: list, tile: SharedTile) -> int:
    if tile.layout.columns * dtype_bits(tile.dtype) // 8 >= 256:
        return _L2_PROMOTION_128B
    analyzer = tvm.sym.Analyzer()
    sector, zero = (tirx.const(v, "int64") for v in (_SECTOR, 0))
    on_sectors = all(analyzer.can_prove(tirx.EQ(tirx.floormod(s, sector), zero)) for s in byte_strides[:-1])
    return _L2_PROMOTION_256B if on_sectors else _L2_PROMOTION_128B


def _row_major(shape: list) -> list:
    strides, stride = [], tirx.const(1, "int64")
    for extent in reversed(shape):
        strides.append(stride)
        stride = stride * extent
    return list(reversed(strides))
