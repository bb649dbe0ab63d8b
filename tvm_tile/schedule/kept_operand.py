"""Part of a product's invariant A operand stays in registers: shared memory is read for B alone there.

A wgmma with M = 64 reads 2 KB of A for each K step, as much as B has at N = 64: from shared memory such a product takes
all of its bandwidth. The columns that fit the registers are copied into a fragment before the loop, and the product
becomes two, one for each part of K.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import BufferStore, For, ForKind, IterVar, SeqStmt

from ..ir.normalize import rebuild_block
from ..ir.ops import GemmOp, match_op, read_op
from ..ir.visit import substitute
from .analysis import SHARED, KernelView, Scope, Site, dtype_bits

__all__ = ["copy_of", "kept_columns", "split_product"]

#: Registers a thread of the front that the fragment may take beside the scores and what works on them.
BUDGET = 96
#: Columns are kept in whole column blocks of a 128-byte swizzle.
BLOCK_BYTES = 128


def kept_columns(kernel: KernelView, loop: Scope, product: Site, threads: int) -> int:
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
    """
    op: GemmOp = product.op
    if op.a.scope != SHARED or op.trans_a or not op.a.whole or op.mask is not None:
        return 0
    writers = [s for s, a in kernel.uses(op.a.buffer) if a.write]
    if any(loop in s.path or s.path or s.position > loop.position for s in writers) or len(writers) != 1:
        return 0
    bits = dtype_bits(op.a.dtype)
    block = BLOCK_BYTES * 8 // bits
    columns = BUDGET * threads * 32 // bits // op.m // block * block
    return min(columns, (op.k - 1) // block * block)


def split_product(stmt, fragment: Var, columns: int):
    """A product as two: A from the fragment up to ``columns`` of K, from shared memory beyond.

    Parameters
    ----------
    stmt : Stmt
        Loops and block of the product.
    fragment : Var
        Holds the first columns of A.
    columns : int
        How many.
    """
    loops, realize = match_op(stmt)
    k = realize.block.iter_vars[2]
    mapping = {_a_buffer(realize): fragment}
    first = _on_range(loops, realize, columns, {}, realize.block.init, str(realize.block.name_hint), mapping)
    rest = int(k.dom.extent) - columns
    name = f"{realize.block.name_hint}_rest"
    return SeqStmt([first, _on_range(loops, realize, rest, {k.var: k.var + columns}, None, name, {})])


def _a_buffer(realize: SBlockRealize) -> Var:
    return read_op(realize).a.buffer


def _loop(loop: For, var: Var, extent, body) -> For:
    return For(var, loop.min, extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step, loop.span)


def _on_range(loops: list[For], realize: SBlockRealize, extent: int, shift: dict, init, name: str, buffers: dict):
    block = realize.block
    axes = list(block.iter_vars)
    axes[2] = IterVar(Range(0, extent), axes[2].var, axes[2].iter_type)
    moved = {**shift, **buffers}
    body = rebuild_block(
        block,
        iter_vars=axes,
        name_hint=name,
        init=init,
        body=substitute(block.body, moved),
        reads=[substitute(r, moved) for r in block.reads],
    )
    if init is None and block.init is not None:
        # what is added to is read too
        body = rebuild_block(body, reads=[*body.writes, *body.reads])
    stmt = SBlockRealize(realize.iter_values, realize.predicate, body, realize.span)
    for n, loop in reversed(list(enumerate(loops))):
        size = tirx.const(extent, "int32") if n == 2 else loop.extent
        stmt = For(
            loop.loop_var, loop.min, size, loop.kind, stmt, loop.thread_binding, loop.annotations, loop.step, loop.span
        )
    return _renamed(stmt)


def _renamed(stmt):
    """The statement with variables of its own: two products must not share theirs."""
    loops, realize = match_op(stmt)
    old = [*(loop.loop_var for loop in loops), *(axis.var for axis in realize.block.iter_vars[: len(loops)])]
    fresh = {v: Var(v.name, v.ty) for v in old}
    block = realize.block
    axes = [IterVar(axis.dom, fresh.get(axis.var, axis.var), axis.iter_type) for axis in block.iter_vars]
    block = rebuild_block(
        block,
        iter_vars=axes,
        reads=[substitute(r, fresh) for r in block.reads],
        writes=[substitute(w, fresh) for w in block.writes],
        body=substitute(block.body, fresh),
        init=None if block.init is None else substitute(block.init, fresh),
    )
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
