"""Part of a product's invariant A operand stays in registers, and its shared memory becomes a slot of a ring.

A wgmma with M = 64 reads 2 KB of A for each K step, as much as B has at N = 64: from shared memory such a product takes
all of its bandwidth. The columns that fit the registers pass through shared memory once, before the loop; the load and
the product become two each, for the two parts of K.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range, TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferStore, For, ForKind, IterVar, SeqStmt

from ..ir.normalize import rebuild_block, substituted_block
from ..ir.ops import CopyOp, GemmOp, match_op, read_op
from ..ir.visit import rewrite, substitute
from .analysis import GLOBAL, SHARED, KernelView, Scope, Site, dtype_bits
from .decisions import FRONT_REGISTERS

__all__ = ["OTHERS", "copy_of", "kept_columns", "split_load", "split_product"]

#: Registers a thread that a role needs beside tiles: with 28 for row vectors, addresses and counters ptxas 13.0 neither
#: spills nor serialises the products, with 24 it does both.
OTHERS = 28
#: Columns are kept in whole column blocks of the narrowest swizzle.
BLOCK_BYTES = 32


def kept_columns(kernel: KernelView, loop: Scope, product: Site, threads: int, taken: int) -> int:
    """Columns of a product's A operand that registers can hold, 0 where it is not invariant.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    loop : Scope
        The loop around the product.
    product : Site
        A :class:`GemmOp` on one warpgroup.
    threads : int
        Threads that hold the fragment.
    taken : int
        Registers of each that the front's other tiles take.
    """
    op: GemmOp = product.op
    if op.a.scope != SHARED or op.trans_a or not op.a.whole or op.mask is not None:
        return 0
    users = [s for s, _ in kernel.uses(op.a.buffer)]
    if len(users) != 2 or users[1] is not product or users[0].path or users[0].position > loop.position:
        return 0
    load = users[0].op
    if not isinstance(load, CopyOp) or load.src.scope != GLOBAL or not load.dst.whole or load.dst.axes != [0, 1]:
        return 0
    if not isinstance(load.body, BufferStore):
        return 0
    bits = dtype_bits(op.a.dtype)
    block = BLOCK_BYTES * 8 // bits
    room = max(0, FRONT_REGISTERS - OTHERS - taken)
    columns = room * threads * 32 // bits // op.m // block * block
    return min(columns, (op.k - 1) // block * block)


def split_product(stmt, fragment: Var, rest: Var, columns: int):
    """A product as two: A from the fragment up to ``columns`` of K, from the shared tile ``rest`` beyond."""
    return _in_two(stmt, 2, _read(stmt).a.buffer, fragment, rest, columns)


def split_load(stmt, first: Var, rest: Var, columns: int):
    """The load of a tile as two, of its first columns and of the others."""
    return _in_two(stmt, 1, _read(stmt).dst.buffer, first, rest, columns)


def _read(stmt):
    return read_op(match_op(stmt)[1])


def _in_two(stmt, axis: int, old: Var, first: Var, rest: Var, columns: int):
    """An operation as two, for two ranges of an axis, with a buffer ``old`` that the axis indexes cut in two."""
    loops, realize = match_op(stmt)
    block = realize.block
    whole = int(block.iter_vars[axis].dom.extent)
    name = str(block.name_hint)
    head = substituted_block(block, {old: first})

    var = block.iter_vars[axis].var
    reads = [_shifted_region(r, var, columns, old, rest) for r in block.reads]
    writes = [_shifted_region(r, var, columns, old, rest) for r in block.writes]
    if block.init is not None:
        reads = [*writes, *reads]  # what is added to is read too
    body = _shifted(block.body, var, columns, old, rest)
    tail = rebuild_block(block, name_hint=f"{name}_rest", body=body, init=None, reads=reads, writes=writes)
    parts = [(head, columns), (tail, whole - columns)]
    return SeqStmt([_on_range(loops, realize, made, axis, extent) for made, extent in parts])


def _shifted(node, var: Var, by: int, old: Var, new: Var):
    """``var`` moved on by some columns, but not where it indexes ``old``, which becomes ``new``."""

    def on_load(load, mutator):
        if load.source.same_as(old):
            return tirx.BufferLoad(new, list(load.indices))
        return mutator.default_mutate(load)

    def on_store(store, mutator):
        if store.buffer.same_as(old):
            return BufferStore(new, mutator.mutate(store.value), list(store.indices))
        return mutator.default_mutate(store)

    def on_var(v, mutator):
        return v + by if v.same_as(var) else v

    return rewrite(node, [(TensorLoad, on_load), (BufferStore, on_store), (Var, on_var)])


def _shifted_region(region, var: Var, by: int, old: Var, new: Var):
    if region.source.same_as(old):
        return tirx.stmt.BufferRegion(new, region.region)
    return substitute(region, {var: var + by})


def _loop(loop: For, var: Var, extent, body) -> For:
    return For(var, loop.min, extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step, loop.span)


def _on_range(loops: list[For], realize: SBlockRealize, block: SBlock, axis: int, extent: int):
    axes = list(block.iter_vars)
    axes[axis] = IterVar(Range(0, extent), axes[axis].var, axes[axis].iter_type)
    stmt = SBlockRealize(realize.iter_values, realize.predicate, rebuild_block(block, iter_vars=axes), realize.span)
    for n, loop in reversed(list(enumerate(loops))):
        size = tirx.const(extent, "int32") if n == axis else loop.extent
        stmt = _loop(loop, loop.loop_var, size, stmt)
    return _renamed(stmt)


def _renamed(stmt):
    """The statement with variables of its own: two products must not share theirs."""
    loops, realize = match_op(stmt)
    old = [*(loop.loop_var for loop in loops), *(axis.var for axis in realize.block.iter_vars[: len(loops)])]
    fresh = {v: Var(v.name, v.ty) for v in old}
    block = realize.block
    axes = [IterVar(axis.dom, fresh.get(axis.var, axis.var), axis.iter_type) for axis in block.iter_vars]
    block = substituted_block(block, fresh, iter_vars=axes)
    values = [substitute(v, fresh) for v in realize.iter_values]
    out = SBlockRealize(values, realize.predicate, block, realize.span)
    for loop in reversed(loops):
        out = _loop(loop, fresh[loop.loop_var], loop.extent, out)
    return out


def copy_of(source: Var, target: Var, shape: tuple[int, ...], name: str, notes: dict):
    """``T.copy`` of the first elements of a buffer into another one.

    Parameters
    ----------
    source, target : Var
        The buffers.
    shape : tuple of int
        What is copied, from the start of both.
    name : str
        Of the block.
    notes : dict
        Further annotations.
    """
    loops = [Var(f"ax{n}", "int32") for n in range(len(shape))]
    axes = [IterVar(Range(0, e), Var(f"v{n}", "int32"), IterVar.DataPar) for n, e in enumerate(shape)]
    at = [axis.var for axis in axes]
    regions = [tirx.stmt.BufferRegion(b, [Range.from_min_extent(v, 1) for v in at]) for b in (source, target)]
    body = BufferStore(target, tirx.BufferLoad(source, at), at)
    notes = {"tile.op": "copy", "tile.axes": len(shape), **notes}
    block = SBlock(axes, regions[:1], regions[1:], name, body, annotations=notes)
    stmt = SBlockRealize(loops, tirx.const(True, "bool"), block)
    for var, extent in reversed(list(zip(loops, shape, strict=True))):
        stmt = For(var, tirx.const(0), tirx.const(extent), ForKind.SERIAL, stmt)
    return stmt
