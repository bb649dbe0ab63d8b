"""Copies by ldmatrix and stmatrix: 8x8 matrices of 16-byte rows between a shared tile and a fragment.

Lane ``8 i + r`` addresses row ``r`` of matrix ``i``, which becomes (or is) 32-bit register ``i`` of the group. What a
row is follows from the fragment: the elements of a row lie on the four lanes of a quad (plain form), or column ``g``
of a row lies on quad ``g`` (``.trans``, 16-bit elements). Source: PTX ISA 8.8, ``ldmatrix``, ``stmatrix``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from ...errors import InternalError
from ...ir.ops import CopyOp, Region
from ...layout import Fragment
from .build import const, evaluate, seq, unrolled, when
from .convert import convert_pair
from .program import OpNode
from .space import expr, is_zero
from .storage import Storage, dtype_bits

__all__ = ["load_matrices", "store_matrices"]

_LANES = 32


@dataclass
class _Plan:
    layout: Fragment
    pack: int  # elements of a 32-bit register
    words: int  # registers a thread
    count: int  # matrices an instruction
    trans: bool


def load_matrices(storage: Storage, node: OpNode):
    """Shared tile to fragment.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`CopyOp` whose sides have the same dtype.
    """
    op: CopyOp = node.op
    if op.src.dtype != op.dst.dtype:
        raise InternalError(f"ldmatrix does not convert {op.src.dtype} to {op.dst.dtype}", op.location)
    held = storage.fragments[op.dst.buffer]
    plan = _plan(op, op.dst, op.src, held.layout, dtype_bits(op.src.dtype))
    if held.words is None:
        raise InternalError(f"ldmatrix of {op.src.dtype} elements", op.location)
    suffix = ".trans" if plan.trans else ""
    ptx = f"ldmatrix.sync.aligned.m8n8.x{plan.count}{suffix}.shared.b16"

    def one(group):
        first = group * plan.count
        words = [held.words[first + e] for e in range(plan.count)]
        return evaluate(T.ptx[ptx](*words, _address(storage, node, plan, op.dst, op.src, first)))

    return when(held.layout.active(storage.tx), unrolled(plan.words // plan.count, one, "group"))


def store_matrices(storage: Storage, node: OpNode, hw):
    """Fragment to shared tile; float32 elements are narrowed on the way.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`CopyOp` to a tile of 16-bit elements.
    hw : GPU
        The target machine.
    """
    op: CopyOp = node.op
    if not hw.supports("stmatrix"):
        raise InternalError(f"{hw.name} has no stmatrix", op.location)
    held = storage.fragments[op.src.buffer]
    plan = _plan(op, op.src, op.dst, held.layout, dtype_bits(op.dst.dtype))
    if held.layout.is_padded:
        raise InternalError(f"stmatrix cannot leave out the padding of {held.layout}", op.location)
    suffix = ".trans" if plan.trans else ""
    ptx = f"stmatrix.sync.aligned.m8n8.x{plan.count}{suffix}.shared.b16"
    packed = None
    if op.src.dtype != op.dst.dtype:
        packed = storage.new_local((plan.count,), "uint32", f"{op.src.buffer.name}_packed")

    def one(group):
        first = group * plan.count
        address = _address(storage, node, plan, op.src, op.dst, first)
        if packed is None:
            return evaluate(T.ptx[ptx](address, *[held.words[first + e] for e in range(plan.count)]))
        stmts = []
        for e in range(plan.count):
            low, high = (held.local[(first + e) * plan.pack + k] for k in range(2))
            stmts.append(convert_pair(op.src.dtype, op.dst.dtype, tirx.address_of(packed[e]), low, high, hw))
        stmts.append(evaluate(T.ptx[ptx](address, *[packed[e] for e in range(plan.count)])))
        return seq(stmts)

    body = unrolled(plan.words // plan.count, one, "group")
    # every warp of a replica would write the same values: one is enough, and whole warps are left out
    primary = held.layout.is_primary(storage.tx)
    if primary is not True and any(r.stride < _LANES for r in held.layout.replicate):
        raise InternalError(f"stmatrix of a fragment replicated inside a warp: {held.layout}", op.location)
    return when(primary, body)


def _plan(op: CopyOp, fragment: Region, tile: Region, layout: Fragment, bits: int) -> _Plan:
    pack = 32 // bits
    if not fragment.whole or layout.used_threads % _LANES or layout.registers % pack:
        raise InternalError(f"no matrix move between {tile.buffer.name} and {layout}", op.location)
    dim = _contiguous_dim(fragment, tile)
    words = layout.registers // pack
    for trans in (False, True) if bits == 16 else (False,):
        if dim is not None and _matches(layout, dim, pack, words, trans):
            break
    else:
        raise InternalError(f"{layout} is not made of 8x8 matrices of {tile.buffer.name}'s rows", op.location)
    count = next(c for c in (4, 2, 1) if words % c == 0)
    return _Plan(layout, pack, words, count, trans)


def _contiguous_dim(fragment: Region, tile: Region) -> int | None:
    """The fragment's dimension that runs along the tile's rows."""
    axis = tile.axes[-1]
    return None if axis is None or axis not in fragment.axes else fragment.axes.index(axis)


def _matches(layout: Fragment, dim: int, pack: int, words: int, trans: bool) -> bool:
    """Whether the lanes of a warp hold the elements that the instruction gives them, for every word."""
    chunk = 8 if trans else 4 * pack
    for word in range(words):
        for lane in range(_LANES):
            quad, member = divmod(lane, 4)
            for e in range(pack):
                here = layout.coords(lane, word * pack + e)
                start = list(layout.coords(member, word * pack + e) if trans else layout.coords(4 * quad, word * pack))
                if start[dim] % chunk:
                    return False
                start[dim] += quad if trans else member * pack + e
                if list(here) != start:
                    return False
    return True


def _address(storage: Storage, node: OpNode, plan: _Plan, fragment: Region, tile: Region, first):
    """Shared address of the row that this lane hands to the instruction for words ``first`` onwards."""
    lane = tirx.floormod(storage.tx, const(_LANES))
    warp = storage.tx - lane
    matrix = tirx.floormod(tirx.floordiv(lane, const(8)), const(plan.count)) if plan.count > 1 else const(0)
    row = tirx.floormod(lane, const(8))
    word = first + matrix
    if plan.trans:
        thread, reg = warp + tirx.floordiv(row, const(2)), word * plan.pack + tirx.floormod(row, const(2))
    else:
        thread, reg = warp + row * 4, word * plan.pack
    coords = [expr(c) for c in plan.layout.coords(thread, reg)]
    for dim, extent in plan.layout.bounds():  # rows of padding read inside the tile
        coords[dim] = tirx.min(coords[dim], const(extent - 1))
    values = {axis: coords[dim] for dim, axis in enumerate(fragment.axes) if axis is not None}
    at = []
    for low, axis in zip(tile.mins, tile.axes, strict=True):
        low = storage.rewrite(expr(low), versions=node.versions)
        at.append(low if axis is None else values[axis] if is_zero(low) else low + values[axis])
    shared = storage.tile_of(tile.buffer)
    return storage.address(shared, storage.element(shared, at, node.versions.get(tile.buffer)))
