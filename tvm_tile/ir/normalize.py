"""From what the parser built to normal form: guarded accesses, blocks that name the outer loops they use, source spans.

TVM's block rules forbid a block with iteration variables to mention an outer loop directly; the loop is bound as one
more spatial axis instead. The tile's own axes always come first, as many as ``tile.axes`` says.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Range, TensorLoad, TensorRegion, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import For, IterVar, is_buffer_var

from ..errors import InternalError
from .visit import rewrite, substitute, walk

__all__ = ["finish", "rebuild_block", "substituted_block"]

#: TVM's simplifier needs several rounds for some quotients; it does not cycle on any that was seen.
_SIMPLIFY_ROUNDS = 8


def finish(func: tirx.PrimFunc, *, check_well_formed: bool = True) -> tirx.PrimFunc:
    """Normal form of a freshly parsed kernel, verified.

    Parameters
    ----------
    func : PrimFunc
        What the parser built.
    check_well_formed : bool
        Also run TVM's own check.

    Raises
    ------
    TileError
        For what the language forbids and the parser could not see.
    """
    from .bounds import guard_accesses
    from .verify import verify

    func = guard_accesses(_settle_extents(_drop_unused_values(func)))
    func = _set_kernel_regions(_hoist_buffers(_bind_outer_loops(func)))
    verify(func)
    if check_well_formed:
        try:
            s_tir.analysis.verify_well_formed(tvm.IRModule({"main": func}))
        except Exception as err:
            raise InternalError(f"the parsed kernel is not well-formed TensorIR: {err}") from err
    return func


def rebuild_block(block: SBlock, **changes) -> SBlock:
    """The block with some of its fields changed."""
    fields = {
        name: getattr(block, name)
        for name in (
            "iter_vars",
            "reads",
            "writes",
            "name_hint",
            "body",
            "init",
            "alloc_buffers",
            "match_buffers",
            "annotations",
            "span",
        )
    }
    fields.update(changes)
    return SBlock(**fields)


def substituted_block(block: SBlock, mapping: dict, **changes) -> SBlock:
    """The block with variables replaced in its regions, body and initial value, and some of its fields changed."""
    return rebuild_block(
        block,
        reads=[substitute(r, mapping) for r in block.reads],
        writes=[substitute(w, mapping) for w in block.writes],
        body=substitute(block.body, mapping),
        init=None if block.init is None else substitute(block.init, mapping),
        **changes,
    )


def _settle_extents(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Loop extents in the form that printing (as ``start, stop``) and parsing them gives again."""

    def on_for(loop, mutator):
        loop = mutator.default_mutate(loop)
        if isinstance(loop.extent, tirx.IntImm):
            return loop
        extent, analyzer = loop.extent, tvm.sym.Analyzer()
        for _ in range(_SIMPLIFY_ROUNDS):
            again = analyzer.simplify(loop.min + extent - loop.min)
            if tvm_ffi.structural_equal(again, extent):
                break
            extent = again
        return For(
            loop.loop_var,
            loop.min,
            extent,
            loop.kind,
            loop.body,
            loop.thread_binding,
            loop.annotations,
            loop.step,
            loop.span,
        )

    return rewrite(func, [(For, on_for)])


def _drop_unused_values(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Remove snapshots nobody reads: a macro's parameters are taken at the call whether the body uses them or not."""
    while True:
        uses: dict[Var, int] = {}
        bound: list = []

        def count(var, uses=uses):
            uses[var] = uses.get(var, 0) + 1

        walk(func.body, (Var, count), (tirx.Bind, bound.append))
        # the definition itself is one occurrence
        unused = {b.var for b in bound if uses.get(b.var, 0) <= 1 and not _has_effect(b.value)}
        if not unused:
            return func
        func = rewrite(func, [(tirx.Bind, lambda b, m, unused=unused: tirx.Evaluate(0) if b.var in unused else b)])
        func = rewrite(func, [(tirx.SeqStmt, lambda s, m: _without_nops(s, m))])


def _has_effect(value) -> bool:
    calls: list = []
    walk(value, (tvm.ir.Call, lambda c: calls.append(c) if "call_" in getattr(c.op, "name", "") else None))
    return bool(calls)


def _without_nops(seq, mutator):
    parts = [mutator.mutate(part) for part in seq.seq]
    kept = [p for p in parts if not (isinstance(p, tirx.Evaluate) and isinstance(p.value, tirx.IntImm))]
    return tirx.SeqStmt(kept or parts[:1]) if len(kept or parts[:1]) > 1 else (kept or parts)[0]


def _hoist_buffers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """All on-chip buffers belong to the kernel block, wherever they were allocated."""
    found: list = []

    def on_block(block, mutator):
        kernel = "tile.kernel" in block.annotations
        if kernel:
            found.clear()
        inner = mutator.default_mutate(block)
        if kernel:
            return rebuild_block(inner, alloc_buffers=[*inner.alloc_buffers, *found])
        if not inner.alloc_buffers:
            return inner
        found.extend(inner.alloc_buffers)
        used = [_whole(b) for b in inner.alloc_buffers]
        return rebuild_block(inner, alloc_buffers=[], reads=[*inner.reads, *used], writes=[*inner.writes, *used])

    return rewrite(func, [(SBlock, on_block)])


def _bind_outer_loops(func: tirx.PrimFunc) -> tirx.PrimFunc:
    loops: dict[Var, For] = {}  # loops between here and the enclosing block
    spans: list = []

    def on_for(loop, mutator):
        loops[loop.loop_var] = loop
        spans.append(loop.span or (spans[-1] if spans else None))
        try:
            return mutator.default_mutate(loop)
        finally:
            loops.pop(loop.loop_var)
            spans.pop()

    def on_realize(realize, mutator):
        nonlocal loops
        outer, block = loops, realize.block
        span = block.span or (spans[-1] if spans else None)
        if not block.iter_vars or "tile.kernel" in block.annotations:
            # Opaque blocks may mention outer loops; the kernel block opens a scope of its own.
            if "tile.kernel" in block.annotations:
                loops = {}
            try:
                inner = mutator.mutate(block)
            finally:
                loops = outer
            return SBlockRealize(realize.iter_values, realize.predicate, rebuild_block(inner, span=span))
        used: list[Var] = []

        def see(var):
            if var in outer and all(not var.same_as(u) for u in used):
                used.append(var)

        walk(block, (Var, see))
        loops = {}
        try:
            inner = mutator.mutate(block)
        finally:
            loops = outer
        mapping, axes, values = {}, list(inner.iter_vars), list(realize.iter_values)
        for var in used:
            axis = Var("v_" + var.name, var.ty.dtype)
            loop = outer[var]
            mapping[var] = axis
            axes.append(IterVar(Range.from_min_extent(loop.min, loop.extent), axis, IterVar.DataPar))
            values.append(var)
        inner = substituted_block(inner, mapping, iter_vars=axes, span=span)
        return SBlockRealize(values, realize.predicate, inner)

    return rewrite(func, [(For, on_for), (SBlockRealize, on_realize)])


def _whole(buffer: Var) -> TensorRegion:
    return tirx.stmt.BufferRegion(buffer, [Range.from_min_extent(0, e) for e in buffer.ty.shape])


def _set_kernel_regions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Blocks around operations read and write whole buffers.

    Regions that mention values bound inside such a block would not parse back. The kernel block names the global
    tensors, a ``T.ws`` block also the on-chip buffers.
    """

    def on_block(block, mutator):
        if "tile.kernel" not in block.annotations and "tile.ws" not in block.annotations:
            return mutator.default_mutate(block)
        reads, writes = [], []
        kernel = "tile.kernel" in block.annotations

        def add(found, buffer):
            if not is_buffer_var(buffer) or kernel and str(buffer.ty.storage_scope) != "global":
                return
            if all(not buffer.same_as(b) for b in found):
                found.append(buffer)

        def on_call(call):
            # address_of an element: an atomic reads and writes it
            if getattr(call.op, "name", "") == "tirx.address_of" and isinstance(call.args[0], TensorLoad):
                add(writes, call.args[0].source)

        walk(
            block.body,
            (TensorLoad, lambda load: add(reads, load.source)),
            (tirx.BufferStore, lambda store: add(writes, store.buffer)),
            (tvm.ir.Call, on_call),
        )
        inner = mutator.default_mutate(block)
        return rebuild_block(inner, reads=[_whole(b) for b in reads], writes=[_whole(b) for b in writes])

    return rewrite(func, [(SBlock, on_block)])
