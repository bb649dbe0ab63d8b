"""``T.gemm`` on the CUDA cores: IEEE float32 and float64 products, where no tensor core computes exactly that.

Each thread owns the elements of C that its fragment layout gives it and walks K in order; operands are read from
shared memory (an operand in registers is put there first: a thread needs whole rows of it), and the compiler keeps what
neighbouring registers share.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var

from ...errors import InternalError
from ...ir.ops import GemmOp, Region
from .build import loop, seq, unrolled, when
from .elementwise import fragment_to_scratch
from .program import Access, MicroNode, OpNode
from .storage import SharedTile, Storage

__all__ = ["lower_fma"]


def lower_fma(storage: Storage, node: OpNode, reads: list[Access]) -> list[MicroNode]:
    """Steps of a product: operands in registers to shared memory, the product.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`GemmOp`; operands are shared tiles or fragments.
    reads : list of Access
        Shared tiles that it reads.
    """
    op: GemmOp = node.op
    steps, copies = [], {}
    for region in (op.a, op.b):
        if region.scope != "shared" and region.buffer not in copies:
            copies[region.buffer], step = fragment_to_scratch(storage, region.buffer)
            steps.append(step)
    reads = [*reads, *(Access(tile.buffer) for tile in copies.values())]
    return [*steps, MicroNode(reads, [], lambda: _product(storage, node, copies), f"gemm {op.name} (fma)")]


def _product(storage: Storage, node: OpNode, copies: dict[Var, SharedTile]):
    op: GemmOp = node.op
    held = storage.fragments[op.c.buffer]
    layout, registers = held.layout, held.layout.registers
    masked = op.mask is not None
    origin = [_static(m, op) for m in op.c.mins[-2:]]
    whole = origin == [0, 0] and tuple(layout.shape[-2:]) == (op.m, op.n)
    target = storage.new_local((registers,), held.dtype, "masked_sum") if masked else held.local

    def position(reg):
        row, col = layout.coords(storage.tx, reg)[-2:]
        return row - origin[0], col - origin[1]

    def inside(reg):
        if whole:
            return True
        row, col = position(reg)
        return tirx.And(tirx.And(row >= 0, row < op.m), tirx.And(col >= 0, col < op.n))

    def value(region: Region, row, col, rows: int, cols: int):
        tile = copies.get(region.buffer) or storage.tile_of(region.buffer)
        lead = len(region.mins) - 2
        # padding elements read inside the tile; their results are never looked at
        row = tirx.min(row, rows - 1) if not isinstance(row, int) else row
        col = tirx.min(col, cols - 1) if not isinstance(col, int) else col
        at = [*region.mins[:lead], region.mins[lead] + row, region.mins[lead + 1] + col]
        loaded = storage.view(tile)[storage.element(tile, at, node.versions.get(region.buffer))]
        return loaded if region.dtype == held.dtype else tirx.Cast(held.dtype, loaded)

    clamp = layout.is_padded or not whole

    def update(k):
        def one(reg):
            row, col = position(reg)
            if clamp:
                row, col = tirx.max(tirx.min(row, op.m - 1), 0), tirx.max(tirx.min(col, op.n - 1), 0)
            a = value(op.a, k, row, op.k, op.m) if op.trans_a else value(op.a, row, k, op.m, op.k)
            b = value(op.b, col, k, op.n, op.k) if op.trans_b else value(op.b, k, col, op.k, op.n)
            store = tirx.BufferStore(target, target[reg] + a * b, [reg])
            return when(inside(reg), store)

        return unrolled(registers, one, "r")

    zero = tirx.const(0, held.dtype)
    stmts = []
    if op.clear_accum or masked:
        stmts.append(
            unrolled(registers, lambda r: when(True if masked else inside(r), tirx.BufferStore(target, zero, [r])), "r")
        )
    stmts.append(loop(op.k, update, "k"))
    if masked:
        stmts.append(
            unrolled(registers, lambda r: when(inside(r), _merge(storage, node, held, target, position(r), r)), "r")
        )
    body = seq(stmts)
    return when(layout.active(storage.tx), body)


def _static(value, op) -> int:
    if isinstance(value, int | tirx.IntImm):
        return int(value)
    raise InternalError(f"a slice of fragment {op.c.buffer.name} that starts at a run-time index", op.location)


def _merge(storage: Storage, node: OpNode, held, total, position, reg):
    op: GemmOp = node.op
    mask: Region = op.mask
    if mask.scope == "shared":
        tile = storage.tile_of(mask.buffer)
        lead = len(mask.mins) - 2
        row, col = (tirx.max(tirx.min(x, limit - 1), 0) for x, limit in zip(position, (op.m, op.n), strict=True))
        at = [*mask.mins[:lead], mask.mins[lead] + row, mask.mins[lead + 1] + col]
        keep = storage.view(tile)[storage.element(tile, at, node.versions.get(mask.buffer))]
    else:
        keep = storage.fragments[mask.buffer].local[reg]
    keep = keep if mask.dtype == "bool" else keep != tirx.const(0, mask.dtype)
    old = tirx.const(0, held.dtype) if op.clear_accum else held.local[reg]
    other = old if op.mask_value is None else op.mask_value
    return tirx.BufferStore(held.local, tirx.Select(keep, old + total[reg], other), [reg])
