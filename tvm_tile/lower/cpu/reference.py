"""``lower_reference``: the serial meaning of tile IR, with no optimisation at all - the oracle of every other path.

Grid loops become serial loops, blocks are inlined, buffers stay as they are; scalar code only.  Nothing is shared
with the optimised lowering beyond the treatment of prints and assertions.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import For, ForKind, is_buffer_var

from ...ir.visit import rewrite, substitute
from .builder import Builder, const_int, emit_opaque_zero, sequence, stores_narrow
from .effects import emit_print
from .expression import not_equal, op_name
from .small_floats import legalise


def lower_reference(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Inline every block and run everything serially.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.

    Returns
    -------
    PrimFunc
        Plain TIR for the CPU.
    """
    b = Builder()
    zero = emit_opaque_zero(b) if stores_narrow(func.body) else None
    b.emit(_Inline(zero).statement(func.body))
    body = legalise(list(func.params), _Wide(func).rewrite(b.finish()))
    lowered = tirx.PrimFunc(func.params, body, func.ret_type, span=func.span)
    for key, value in (func.attrs or {}).items():
        if str(key) not in ("s_tir", "tirx.noalias"):
            lowered = lowered.with_attr(str(key), value)
    return lowered


class _Inline:
    """Removes blocks: axes become their values, allocations become statements."""

    def __init__(self, zero: Expr | None) -> None:
        self.buffers: dict[Var, Var] = {}
        self.zero = zero

    def statement(self, stmt):
        return rewrite(
            stmt,
            [
                (For, self.on_for),
                (SBlockRealize, self.on_realize),
                (Var, self.on_var),
                (tirx.Evaluate, self.on_evaluate),
                (tirx.Bind, self.on_bind),
                (tirx.BufferStore, self.on_store),
                (TensorLoad, self.on_load),
                (tirx.NE, self.on_not_equal),
                (Call, self.on_call),
            ],
        )

    def on_not_equal(self, expr, m):
        return not_equal(m.mutate(expr.a), m.mutate(expr.b))

    def on_call(self, call, m):
        """Functions that TVM has no lowering for in every type."""
        if op_name(call) != "erf":
            return m.default_mutate(call)
        dtype = str(call.ty.dtype)
        if dtype == "float64":
            return tirx.call_pure_extern(dtype, "erf", m.mutate(call.args[0]))
        return tirx.Cast(dtype, tirx.call_pure_extern("float32", "erff", tirx.Cast("float32", m.mutate(call.args[0]))))

    def on_for(self, loop, m):
        start = m.mutate(loop.min)
        if self.zero is not None:
            start = start + tirx.Cast(str(loop.loop_var.ty.dtype), self.zero)
        return For(
            loop.loop_var,
            start,
            m.mutate(loop.extent),
            ForKind.SERIAL,
            m.mutate(loop.body),
            None,
            {},
            None if loop.step is None else m.mutate(loop.step),
        )

    def on_realize(self, realize, m):
        block: SBlock = realize.block
        allocations = []
        for buffer in block.alloc_buffers:
            self.buffers[buffer] = tirx.decl_buffer(buffer.ty.shape, str(buffer.ty.dtype), buffer.name, scope="global")
            allocations.append(tirx.AllocBuffer(self.buffers[buffer]))
        mapping = {axis.var: value for axis, value in zip(block.iter_vars, realize.iter_values, strict=False)}
        body = block.body
        if block.init is not None:
            body = tirx.SeqStmt([self._first(block), body])
        body = substitute(body, mapping)
        return sequence([*allocations, m.mutate(body)])

    def _first(self, block: SBlock):
        """A reduction starts where all its axes are at their beginning."""
        condition = None
        for axis in block.iter_vars:
            if axis.iter_type == tirx.IterVar.CommReduce:
                here = tirx.EQ(axis.var, tirx.const(0, str(axis.var.ty.dtype)))
                condition = here if condition is None else tirx.And(condition, here)
        return block.init if condition is None else tirx.IfThenElse(condition, block.init, None)

    def on_var(self, var, m):
        return self.buffers.get(var, var)

    def on_store(self, store, m):
        return tirx.BufferStore(
            self.buffers.get(store.buffer, store.buffer), m.mutate(store.value), [m.mutate(i) for i in store.indices]
        )

    def on_load(self, expr, m):
        return tirx.BufferLoad(self.buffers.get(expr.source, expr.source), [m.mutate(i) for i in expr.indices])

    def on_evaluate(self, stmt, m):
        return self._effect(stmt.value, None, m) or m.default_mutate(stmt)

    def on_bind(self, stmt, m):
        return self._effect(stmt.value, stmt.var, m) or m.default_mutate(stmt)

    def _effect(self, call, result: Var | None, m):
        """The statements of an extern of the language; None for anything else."""
        if not isinstance(call, Call) or op_name(call) != "call_extern":
            return None
        name = str(call.args[0].value)
        b = Builder()
        if name == "tile_sync":
            return tirx.Evaluate(tirx.const(0, "int32"))
        if name == "tile_assert":
            parts = [StringImm(f"T.device_assert: {call.args[2].value or call.args[1]}")]
            return tirx.AssertStmt(m.mutate(call.args[1]), StringImm("RuntimeError"), parts)
        if name == "tile_print":
            emit_print(b, str(call.args[1].value), [m.mutate(a) for a in call.args[2:]])
            return b.finish()
        if not name.startswith("tile_atomic_"):
            return None
        element = m.mutate(call.args[1].args[0])
        dtype = str(element.source.ty.dtype)
        old = result if result is not None else Var("old", dtype)
        b.emit(tirx.Bind(old, element))
        new = {"add": tirx.Add, "max": tirx.Max, "min": tirx.Min}[name.removeprefix("tile_atomic_")]
        b.emit(tirx.BufferStore(element.source, new(old, m.mutate(call.args[2])), element.indices))
        return b.finish()


class _Wide:
    """64-bit indices for tensors that may have more than 2^31 elements."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.large = {p for p in func.params if is_buffer_var(p) and _may_be_large(p)}

    def rewrite(self, body):
        """Cast the indices of accesses to large tensors."""
        if not self.large:
            return body
        return rewrite(body, [(tirx.BufferStore, self.on_store), (TensorLoad, self.on_load)])

    def on_store(self, store, m):
        indices = [m.mutate(i) for i in store.indices]
        return tirx.BufferStore(store.buffer, m.mutate(store.value), self._cast(store.buffer, indices))

    def on_load(self, expr, m):
        return tirx.BufferLoad(expr.source, self._cast(expr.source, [m.mutate(i) for i in expr.indices]))

    def _cast(self, buffer, indices):
        return (
            [tirx.Cast("int64", i) if str(i.ty.dtype) != "int64" else i for i in indices]
            if buffer in self.large
            else indices
        )


def _may_be_large(buffer: Var) -> bool:
    count = 1
    for extent in [*buffer.ty.shape]:
        if const_int(extent) is None:
            return True
        count *= const_int(extent)
    strides = [const_int(s) for s in buffer.ty.strides]
    if any(s is None for s in strides):
        return True
    reach = sum((const_int(e) - 1) * s for e, s in zip(buffer.ty.shape, strides, strict=False)) if strides else count
    return max(count, reach) >= 2**31
