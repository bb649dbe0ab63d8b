"""``lower_cpu``: one parallel loop over CTAs for each kernel of a function, with vectorised tile operations."""

from __future__ import annotations

import functools

import tvm
from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlockRealize
from tvm.tirx import ForKind, is_buffer_var

from ...errors import InternalError
from ...ir import AssertOp, CopyOp, CumsumOp, FillOp, GemmOp, ParallelOp, PrintOp, ReduceOp, SyncOp, read_op
from ...ir.ops import match_op
from ...ir.visit import mentions, walk
from . import amx, effects
from .builder import Builder, const_int, emit_opaque_zero, sequence, stores_narrow
from .context import KernelContext
from .expression import Evaluator
from .gemm import emit_gemm
from .panels import choose_panels, emit_panel_copy
from .passes import FLAT_ATTR
from .reduction import emit_reduce
from .statements import Elementwise, emit_elementwise, emit_statement, nest
from .storage import Storage, global_storage
from .target import CpuFeatures, features_of


def lower_cpu(func: tirx.PrimFunc, target: tvm.target.Target) -> tirx.PrimFunc:
    """Lower tile IR to plain TIR for an LLVM target.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.
    target : tvm.target.Target
        Its CPU name and attributes decide vector width and matrix unit.

    Returns
    -------
    PrimFunc
        Flat buffers, explicit vectors, one parallel loop over CTAs for each kernel.
    """
    return _Function(func, features_of(target)).run()


class _Function:
    def __init__(self, func: tirx.PrimFunc, features: CpuFeatures) -> None:
        self.func = func
        self.features = features
        self.b = Builder()
        self.storages: dict[Var, Storage] = {}
        self.effects = None
        self.uses_amx = False
        self.zero = None

    def run(self) -> tirx.PrimFunc:
        for param in self.func.params:
            if is_buffer_var(param):
                self.storages[param] = global_storage(self.b, param)
        if effects.has_global_atomics(self.func.body):
            self.effects = effects.Effects(effects.emit_mutex(self.b))
        else:
            self.effects = effects.Effects(None)
        self.zero = emit_opaque_zero(self.b) if stores_narrow(self.func.body) else None
        with self.b.scope() as body:
            self.top(self.func.body)
        if self.uses_amx:
            amx.emit_permission_request(self.b)
        for stmt in body:
            self.b.emit(stmt)
        lowered = tirx.PrimFunc(self.func.params, self.b.finish(), self.func.ret_type, span=self.func.span)
        for key, value in (self.func.attrs or {}).items():
            if str(key) not in ("s_tir", "tirx.noalias"):
                lowered = lowered.with_attr(str(key), value)
        return lowered.with_attr(FLAT_ATTR, 1)

    def top(self, stmt) -> None:
        """Statements around the kernels."""
        if isinstance(stmt, tirx.SeqStmt):
            for part in stmt.seq:
                self.top(part)
        elif isinstance(stmt, SBlockRealize):
            self.top(stmt.block.body)
        elif isinstance(stmt, tirx.For) and stmt.kind == ForKind.THREAD_BINDING:
            loops = []
            while isinstance(stmt, tirx.For) and stmt.kind == ForKind.THREAD_BINDING:
                loops.append(stmt)
                stmt = stmt.body
            if not isinstance(stmt, SBlockRealize) or "tile.kernel" not in stmt.block.annotations:
                raise InternalError("grid loops without a kernel block")
            self.kernel(loops, stmt)
        else:
            emit_statement(Evaluator(self.b, self.lookup, effects=self.effects, zero=self.zero), stmt)

    def lookup(self, buffer: Var) -> Storage:
        """Storage of a program buffer."""
        if buffer not in self.storages:
            raise InternalError(f"buffer {buffer.name} is used before it is allocated")
        return self.storages[buffer]

    def kernel(self, loops: list[tirx.For], realize: SBlockRealize) -> None:
        """One kernel: a parallel loop over its CTAs."""
        b = self.b
        ev = Evaluator(b, self.lookup, effects=self.effects, zero=self.zero)
        extents = [ev.scalar(loop.extent) for loop in loops]
        sizes = [const_int(e) for e in extents]
        count = functools.reduce(lambda x, y: x * y, sizes) if None not in sizes else None
        dtype = "int32" if count is not None and count < 2**31 else "int64"
        total = tirx.const(1, dtype)
        for extent in extents:
            total = total * tirx.Cast(dtype, extent)
        total = b.bind(total, "ctas")
        context = KernelContext(self.features, self.storages)
        code = _Kernel(b, context, ev)
        cta = Var("cta", dtype)
        with b.scope() as body:
            rest = cta
            for loop, extent in zip(reversed(loops), reversed(extents), strict=False):
                size = tirx.Cast(dtype, extent)
                index = tirx.floormod(rest, size) if loop is not loops[0] else rest
                kind = str(loop.loop_var.ty.dtype)
                ev.env[loop.loop_var] = b.bind(tirx.Cast(kind, index), loop.loop_var.name)
                if loop is not loops[0]:
                    rest = b.bind(tirx.floordiv(rest, size), "rest")
            for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=False):
                ev.env[axis.var] = b.bind(ev.scalar(value), axis.var.name)
            head = len(body)
            block = realize.block
            panels, viewed = choose_panels(self.features, block), _viewed_as_other_types(block)
            for buffer in block.alloc_buffers:
                context.allocate(buffer, *panels.get(buffer, (None, False)), bytewise=buffer in viewed)
            code.body(block.body)
            if context.uses_amx:
                self.uses_amx = True
                amx.emit_configure(context.prologue)
                amx.emit_release(b)
            body[head:head] = context.prologue.statements()
        loop = tirx.For(cta, tirx.const(0, dtype), total, ForKind.PARALLEL, sequence(body))
        if _is_uneven(realize.block):
            # CTAs of different length: dealt out like cards, so that no core is left with the long ones
            for pragma in ("pragma_parallel_stride_pattern", "pragma_parallel_launch_point"):
                loop = tirx.AttrStmt(tirx.const(0, "int32"), pragma, tirx.const(1, "int32"), loop)
        b.emit(loop)


def _viewed_as_other_types(block) -> set[Var]:
    """Buffers whose memory ``T.view`` also shows as another element type."""
    bases: dict[Var, Var] = {}
    result: set[Var] = set()

    def look(stmt: tirx.DeclBuffer) -> None:
        found: list = []
        walk(stmt.data, (Var, found.append))
        for base in found:
            bases[stmt.buffer] = bases.get(base, base)
            if str(base.ty.dtype) != str(stmt.buffer.ty.dtype):
                result.add(bases[stmt.buffer])

    walk(block.body, (tirx.DeclBuffer, look))
    return result


def _is_uneven(block) -> bool:
    """Whether the length of a loop depends on the CTA's coordinates."""
    axes = [axis.var for axis in block.iter_vars]
    found: list = []
    walk(
        block.body,
        (
            tirx.For,
            lambda f: found.append(f) if any(mentions(f.extent, a) or mentions(f.min, a) for a in axes) else None,
        ),
    )
    return bool(found)


class _Kernel:
    """Writes the code of one CTA."""

    def __init__(self, b: Builder, context: KernelContext, ev: Evaluator) -> None:
        self.b, self.context, self.ev = b, context, ev
        self.unit = context.features.vector

    def body(self, stmt) -> None:
        """Statements between tile operations."""
        b, ev = self.b, self.ev
        if isinstance(stmt, tirx.SeqStmt):
            saved = dict(ev.values)
            for part in stmt.seq:
                self.body(part)
            ev.values = saved
        elif isinstance(stmt, tirx.For):
            matched = match_op(stmt)
            if matched is not None:
                self.operation(read_op(matched[1]))
                return
            start, extent = ev.scalar(stmt.min), ev.scalar(stmt.extent)
            step = 1 if stmt.step is None else ev.scalar(stmt.step)
            if const_int(step) != 1:
                extent = tirx.floordiv(extent + step - 1, step)
            with b.loop(extent, stmt.loop_var.name, dtype=str(stmt.loop_var.ty.dtype)) as i:
                ev.env[stmt.loop_var] = b.bind(start + i * step, stmt.loop_var.name)
                self.body(stmt.body)
                del ev.env[stmt.loop_var]
        elif isinstance(stmt, SBlockRealize):
            if "tile.op" in stmt.block.annotations:
                self.operation(read_op(stmt))
                return
            for axis, value in zip(stmt.block.iter_vars, stmt.iter_values, strict=False):
                ev.env[axis.var] = ev.scalar(value)
            for buffer in stmt.block.alloc_buffers:
                self.context.allocate(buffer)
            self.body(stmt.block.body)
        elif isinstance(stmt, tirx.IfThenElse):
            otherwise = (lambda: self.body(stmt.else_case)) if stmt.else_case is not None else (lambda: None)
            b.if_else(ev.scalar(stmt.condition), lambda: self.body(stmt.then_case), otherwise)
        elif isinstance(stmt, tirx.While):
            self.repeat(stmt)
        elif isinstance(stmt, tirx.DeclBuffer):
            self.alias(stmt)
        else:
            emit_statement(ev, stmt)

    def repeat(self, stmt: tirx.While) -> None:
        """``while``: the condition is computed by statements, before the loop and at the end of its body."""
        b = self.b
        going = b.register("int32", 1, "going")

        def check() -> None:
            truth = tirx.Select(self.ev.scalar(stmt.condition), tirx.const(1, "int32"), tirx.const(0, "int32"))
            b.store(going, truth, 0)

        check()
        with b.scope() as body:
            self.body(stmt.body)
            check()
        b.emit(tirx.While(tirx.NE(tirx.BufferLoad(going, [0]), tirx.const(0, "int32")), sequence(body)))

    def alias(self, stmt: tirx.DeclBuffer) -> None:
        """``T.reshape`` and ``T.view``: another shape over the same memory."""
        found: list = []
        walk(stmt.data, (Var, lambda v: found.append(v) if v in self.context.storages else None))
        if len(found) != 1:
            raise InternalError(f"{stmt.buffer.name} does not alias a buffer of the kernel")
        self.context.alias(stmt.buffer, self.context.storages[found[0]])

    def operation(self, op) -> None:
        """One tile operation."""
        ev = self.ev
        axes = [(a.var, a.extent) for a in op.axes]
        if isinstance(op, CopyOp) and ev.storages(op.dst.buffer).panel is not None:
            emit_panel_copy(ev, self.context, op)
        elif isinstance(op, CopyOp | FillOp | ParallelOp):
            locked = effects.has_global_atomics(op.body)
            if locked:
                ev.effects.lock(self.b)
            emit_elementwise(ev, self.unit, Elementwise(axes, op.body))
            if locked:
                ev.effects.unlock(self.b)
        elif isinstance(op, GemmOp):
            emit_gemm(ev, self.context, op)
        elif isinstance(op, ReduceOp):
            emit_reduce(ev, self.unit, op)
        elif isinstance(op, CumsumOp):
            emit_statement(ev, op.body)
        elif isinstance(op, PrintOp | AssertOp):
            nest(ev, axes, lambda: emit_statement(ev, op.body))
        elif not isinstance(op, SyncOp):
            raise InternalError(f"the CPU lowering does not know {type(op).__name__}")
