"""The ``"tile"`` dialect of the TVMScript parser: what an assignment, a loop and an `if` mean in a kernel.

Stock handlers of the ``"tirx"`` dialect serve for everything that is not overridden here.
"""

from __future__ import annotations

import builtins
import contextlib

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, TensorRegion
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I  # noqa: N812
from tvm.script.parser._core import collect_signature_type_vars, dispatch, doc
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B
from tvm.tirx.script.parser import parser as stock

from ..errors import TileShapeError, TileSyntaxError, TileTypeError
from ..ir.visit import walk
from . import context as ctx
from .alloc import VarHandle, is_variable, store_variable
from .diagnostics import install
from .dtypes import constant
from .emit import block
from .loops import TileLoop, TileRange, tile_range
from .regions import as_region, dtype_of, scope_name, scope_of, shape_text

__all__ = ["TOKEN"]

TOKEN = "tile"

for (_token, _kind), _handler in list(dispatch.ParseVTable.items()):
    if _token == "tirx":
        dispatch.ParseVTable.setdefault((TOKEN, _kind), _handler)


def _function(parser) -> ctx.FunctionContext:
    return ctx.current("a kernel statement")


# ------------------------------------------------------------------------------------------------ functions


@dispatch.register(TOKEN, "FunctionDef")
def visit_function(self, node: doc.FunctionDef) -> None:
    """A kernel: parsed into a builder of its own, normalised and verified, then handed to the enclosing module."""
    install(self)
    if getattr(self, "tile_standalone", False):
        _parse_function(self, node)
        return
    # Inside @I.ir_module: the module's frame takes finished functions only.
    with IRBuilder() as builder:
        _parse_function(self, node)
    from ..ir.normalize import finish

    I.def_function(node.name, finish(builder.get()))


def _parse_function(self, node: doc.FunctionDef) -> None:
    supplied = self.function_annotations or {}
    annotations = supplied.get(node.name, {})
    private = stock.find_decorator_annotation(node, "private", default=False)
    context = ctx.FunctionContext(node.name, self)
    self.function_annotations = None
    for extra, label in ((node.args.vararg, "*args"), (node.args.kwarg, "**kwargs"), (node.args.kwonlyargs, "keyword-only parameters")):
        if extra:
            self.report_error(node, TileSyntaxError(f"a kernel cannot have {label}", advice="list the tensors and scalars one by one"))
    ctx.push(context)
    try:
        with self.var_table.with_frame(), stock._signature_match_var_scope(self):
            for name, var in collect_signature_type_vars(self, node).items():
                self.var_table.add(name, var, allow_shadowing=False)
            # `range` of TIR expressions; a user's own `range` wins
            if self.var_table.get().get("range", builtins.range) is builtins.range:
                self.var_table.add("range", tile_range)
            with B.prim_func(is_private=private, s_tir=True):
                B.func_name(node.name)
                dtypes = stock._signature_prim_var_dtypes(node)
                with self.with_dispatch_token(TOKEN):
                    for arg in node.args.args:
                        self.var_table.add(arg.arg, _parameter(self, arg, annotations, dtypes))
                    context.function_frame = len(self.var_table.frames)
                    self.visit_body(node.body)
    finally:
        ctx.pop()
        self.function_annotations = supplied
    if context.kernels == 0:
        self.report_error(
            node,
            TileSyntaxError(f"kernel {node.name!r} has no `with T.Kernel(...)`", advice="the body of a kernel stands inside T.Kernel"),
        )


def _parameter(self, arg, annotations, dtypes):
    if arg.annotation is None:
        self.report_error(
            arg,
            TileSyntaxError(f"parameter {arg.arg!r} has no annotation", advice=f'write {arg.arg}: T.Tensor((M, N), "float16"), or {arg.arg}: T.int32'),
        )
    try:
        annotation = stock._eval_signature_annotation(self, arg.annotation, dtypes)
    except Exception:
        annotation = annotations.get(arg.arg, None)
        if annotation is None or isinstance(annotation, str):
            raise
    if callable(annotation) and not isinstance(annotation, tvm.ir.Expr):
        annotation = annotation()
    if not isinstance(annotation, tvm.ir.Expr):
        self.report_error(
            arg.annotation,
            TileTypeError(f"parameter {arg.arg!r} is annotated with {annotation!r}", advice='use T.Tensor((M, N), "float16") or a scalar such as T.int32'),
        )
    annotation = stock._reuse_signature_match_var(self, arg.annotation, arg.arg, annotation)
    return B.arg(arg.arg, annotation)


@dispatch.register(TOKEN, "Return")
def visit_return(self, node) -> None:
    """Only macros return values."""
    if not getattr(self, "tile_macro_depth", 0):
        self.report_error(node, TileSyntaxError("a kernel cannot return", advice="write the result to a tensor parameter"))
    self.tile_macro_value = None if node.value is None else self.eval_expr(node.value)


def _refuse(kind: str, text: str, advice: str) -> None:
    @dispatch.register(TOKEN, kind)
    def handler(self, node) -> None:
        self.report_error(node, TileSyntaxError(text, advice=advice))


_refuse("Break", "`break` is not possible in a kernel: all threads of a CTA run the same iterations",
        "compute the bounds first: for k in T.serial(lo, hi), or guard the body with `if`")
_refuse("Continue", "`continue` is not possible in a kernel: all threads of a CTA run the same iterations",
        "guard the rest of the body with `if`")
_refuse("Assert", "`assert` is ambiguous in a kernel", "use T.device_assert(condition, message) in the kernel, or T.assume(condition) on parameters")
_refuse("Nonlocal", "`nonlocal` is not possible in a kernel", "use T.alloc_var for a mutable scalar")


# ------------------------------------------------------------------------------------------------ loops, if, with


def _visit_statements(self, statements, loop=None) -> None:
    """A loop's body; for a manual pipeline schedule each statement gets its number."""
    context = _function(self)
    if loop is None or not getattr(loop, "manual", False):
        self.visit_body(statements)
        return
    count = 0
    try:
        for statement in statements:
            if _is_alias(statement):
                self.visit(statement)
                continue
            context.pipeline_statement = count
            self.visit(statement)
            count += 1
    finally:
        context.pipeline_statement = None
    loop.check_statements(count)


def _is_alias(statement) -> bool:
    """Statements that emit no tile operation: ``x = expr`` and docstrings."""
    if isinstance(statement, doc.Pass):
        return True
    if isinstance(statement, doc.Expr) and isinstance(statement.value, doc.Constant):
        return True
    return isinstance(statement, doc.Assign) and all(isinstance(t, doc.Name | doc.Tuple) for t in statement.targets)


@dispatch.register(TOKEN, "For")
def visit_for(self, node: doc.For) -> None:
    """``for`` over T.Parallel, T.Pipelined, T.serial, range, ..., or (unrolled at parse time) a Python list or tuple."""
    context = _function(self)
    if node.orelse:
        self.report_error(node, TileSyntaxError("`for ... else` is not possible in a kernel"))
    frame = self.eval_expr(node.iter)
    if isinstance(frame, list | tuple):
        # Python data: unrolled while parsing, names behave as in straight-line code
        for value in frame:
            self.eval_assign(target=node.target, source=value, bind_value=_bind, allow_shadowing=True)
            self.visit_body(node.body)
        return
    if isinstance(frame, builtins.range):
        frame = TileRange(frame.start, frame.stop, frame.step)
    if isinstance(frame, TileRange):
        frame = frame.frame()
    with contextlib.ExitStack() as stack:
        stack.enter_context(self.var_table.with_frame())
        if isinstance(frame, TileLoop):
            if isinstance(frame.__dict__.get("start"), tvm.ir.Expr) or isinstance(frame.__dict__.get("stop"), tvm.ir.Expr):
                _check_uniform(self, node.iter, [getattr(frame, "start", 0), getattr(frame, "stop", 0)])
            values = frame.open(stack)
        elif isinstance(frame, B.frame.ForFrame):
            values = stack.enter_context(frame)
            stack.enter_context(context.scope("loop"))
        else:
            self.report_error(
                node.iter,
                TileSyntaxError(
                    f"cannot iterate over {_describe(frame)}",
                    advice="use range, T.serial, T.unroll, T.Parallel, T.Pipelined or T.Persistent",
                ),
            )
        if context.kernel is None and not isinstance(frame, TileLoop):
            self.report_error(node, TileSyntaxError("a loop outside of T.Kernel", advice="move it into the kernel"))
        _check_target_count(self, node.target, values)
        self.eval_assign(target=node.target, source=values, bind_value=stock.bind_for_value)
        _visit_statements(self, node.body, frame if isinstance(frame, TileLoop) else None)


def _check_target_count(self, target, values) -> None:
    names = len(target.elts) if isinstance(target, doc.Tuple | doc.List) else 1
    count = len(values) if isinstance(values, list | tuple | tvm.ir.Array) else 1
    if names != count and not (names == 1 and isinstance(target, doc.Name) and count > 1 and False):
        self.report_error(
            target,
            TileSyntaxError(f"the loop yields {count} variable{'s' if count > 1 else ''}, but the target has {names} name{'s' if names > 1 else ''}"),
        )


@dispatch.register(TOKEN, "If")
def visit_if(self, node: doc.If) -> None:
    """``if``: decided now for Python values, a branch of the kernel for expressions."""
    context = _function(self)
    predicate = self.eval_expr(node.test)
    if is_buffer_var(predicate) or isinstance(predicate, TensorRegion):
        self.report_error(node.test, TileTypeError("the condition is a whole tile", advice="use T.any_of(tile) or T.all_of(tile)"))
    if not (tvm.ir.is_prim_expr(predicate) or hasattr(predicate, "expr_ty")):
        # Python value. No lexical scope: bindings of the chosen branch stay visible.
        self.visit_body(node.body if predicate else node.orelse)
        return
    if not tvm.ir.is_prim_expr(predicate):
        predicate = tirx.convert(predicate)
    if context.kernel is None:
        self.report_error(node.test, TileSyntaxError("`if` on a run-time value outside of T.Kernel", advice="move it into the kernel"))
    _check_uniform(self, node.test, [predicate])
    dtype = str(predicate.ty.dtype)
    if dtype != "bool":
        predicate = predicate != tirx.const(0, dtype)
    with B.If(predicate):
        with B.Then(), self.var_table.with_frame(), context.scope("if"):
            self.visit_body(node.body)
        if node.orelse:
            with B.Else(), self.var_table.with_frame(), context.scope("if"):
                self.visit_body(node.orelse)


@dispatch.register(TOKEN, "While")
def visit_while(self, node: doc.While) -> None:
    """``while`` on a uniform condition."""
    context = _function(self)
    if context.kernel is None:
        self.report_error(node, TileSyntaxError("a loop outside of T.Kernel", advice="move it into the kernel"))
    with self.var_table.with_frame():
        condition = self.eval_expr(node.test)
        if not tvm.ir.is_prim_expr(condition) and not hasattr(condition, "expr_ty"):
            self.report_error(node.test, TileSyntaxError(f"`while` on the Python value {condition!r} never changes", advice="use T.alloc_var for a value that the body changes"))
        _check_uniform(self, node.test, [condition])
        with B.While(condition), context.scope("loop"):
            self.visit_body(node.body)


# ------------------------------------------------------------------------------------------------ assignments


@dispatch.register(TOKEN, "Assign")
def visit_assign(self, node: doc.Assign) -> None:
    """``x = expr`` names a value, ``A[i, j] = expr`` stores, ``v = expr`` writes a T.alloc_var variable."""
    value = self.eval_expr(node.value)
    for target in node.targets:
        _assign(self, node, target, value)


def _assign(self, node, target, value) -> None:
    if isinstance(target, doc.Subscript):
        _store(self, node, target, value)
        return
    if isinstance(target, doc.Attribute):
        self.report_error(target, TileSyntaxError("attributes cannot be assigned in a kernel"))
    if isinstance(target, doc.Name):
        old = self.var_table.get().get(target.id)
        if is_variable(old) and not isinstance(value, VarHandle):
            if _function(self).in_parallel:
                self.report_error(node, TileSyntaxError(
                    f"{target.id!r} is one value for the whole CTA; the iterations of T.Parallel would race for it",
                    advice="reduce a tile (T.reduce_sum, T.any_of) and assign the result outside of T.Parallel"))
            _check_uniform(self, node.value, [value])
            store_variable(old.source, value, f"assignment to {target.id!r}")
            return
    _check_rebinding(self, node, target)
    self.eval_assign(target=target, source=value, bind_value=_bind, allow_shadowing=True)


def _bind(self, node, name: str, value):
    """What a name stands for: an expression itself where it reads no memory, else its value at this point."""
    if isinstance(value, VarHandle):
        IRBuilder.name(name, value.buffer)
        if value.init is not None:
            _check_uniform(self, node, [value.init])
            store_variable(value.buffer, value.init, f"T.alloc_var init of {name!r}")
        return value.load
    if is_buffer_var(value):
        if not self.var_table.exist(value):
            IRBuilder.name(name, value)
            kernel = _function(self).kernel
            if kernel is not None:
                kernel.buffers[name] = value
        return value
    if isinstance(value, TensorRegion) or value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_bind(self, node, f"{name}_{i}", v) for i, v in enumerate(value))
    if not tvm.ir.is_prim_expr(value) and hasattr(value, "expr_ty"):
        value = tirx.convert(value)
    if tvm.ir.is_prim_expr(value):
        if not _function(self).in_parallel:
            _check_uniform(self, node, [value])
        if not _reads_memory(value):
            return value
        var = B.Bind(value)
        IRBuilder.name(name, var)
        return var
    return value


def _check_rebinding(self, node, target) -> None:
    """A name bound outside a loop or branch cannot be rebound inside: the change would be lost."""
    context = _function(self)
    frames = self.var_table.frames
    for name in self._duplicate_lhs_check(target) or ():
        for depth in range(context.function_frame - 1, len(frames) - 1):
            if depth >= 0 and name in frames[depth].vars:
                self.report_error(
                    node,
                    TileSyntaxError(
                        f"{name!r} names a value bound outside of this loop or branch and cannot be rebound inside",
                        advice=f"make it a variable: {name} = T.alloc_var(dtype, init=...), then assign it; sum a tile with T.reduce_sum",
                    ),
                )


@dispatch.register(TOKEN, "AugAssign")
def visit_aug_assign(self, node: doc.AugAssign) -> None:
    """``x op= expr`` as ``x = x op expr``."""
    load = _as_load(node.target)
    position = {k: getattr(node, k, None) for k in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    value = self.eval_expr(doc.BinOp(load, node.op, node.value, **position))
    if isinstance(node.target, doc.Subscript):
        _store(self, node, node.target, value)
    else:
        _assign(self, doc.Assign([node.target], node.value, **position), node.target, value)


def _as_load(target):
    if isinstance(target, doc.Name):
        return doc.Name(target.id, doc.Load(), target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
    if isinstance(target, doc.Subscript):
        return doc.Subscript(target.value, target.slice, doc.Load(), target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
    return target


@dispatch.register(TOKEN, "AnnAssign")
def visit_ann_assign(self, node: doc.AnnAssign) -> None:
    """``x: T.int32 = expr`` declares a T.alloc_var variable; ``x: T.let = expr`` names a value."""
    annotation = self.eval_expr(node.annotation)
    value = None if node.value is None else self.eval_expr(node.value)
    if annotation is B.let or isinstance(annotation, getattr(B, "LetAnnotation", ())):
        _assign(self, node, node.target, value)
        return
    from .alloc import alloc_var

    handle = alloc_var(annotation, value)
    self.eval_assign(target=node.target, source=handle, bind_value=_bind, allow_shadowing=True)


def _indices(self, node) -> list:
    if isinstance(node, doc.Tuple):
        out = []
        for element in node.elts:
            if isinstance(element, doc.Starred):
                out.extend(self.eval_expr(element.value))
            else:
                out.append(self.eval_expr(element))
        return out
    value = self.eval_expr(node)
    return list(value) if isinstance(value, list | tuple) else [value]


def _store(self, node, target: doc.Subscript, value) -> None:
    """``A[i, j] = value``: an element of a buffer."""
    context = _function(self)
    buffer = self.eval_expr(target.value)
    if isinstance(buffer, dict | list):
        self.report_error(target, TileSyntaxError("Python containers cannot be changed in a kernel"))
    if not is_buffer_var(buffer):
        self.report_error(target, TileTypeError(f"{_describe(buffer)} cannot be assigned by index"))
    if context.kernel is None:
        self.report_error(target, TileSyntaxError("a store outside of T.Kernel", advice="move it into the kernel"))
    indices = _indices(self, target.slice)
    rank = len(buffer.ty.shape)
    if any(isinstance(i, slice) for i in indices):
        self.report_error(
            target,
            TileSyntaxError(f"{buffer.name}[...] = value with a slice", advice="use T.copy for tiles, T.fill for a constant, T.Parallel for formulas"),
        )
    if len(indices) != rank:
        self.report_error(
            target,
            TileShapeError(
                f"{buffer.name} has {rank} dimensions {shape_text(buffer.ty.shape)}, but it is indexed with {len(indices)}",
                advice=f"write {buffer.name}[{', '.join('ijklmn'[:rank])}]",
            ),
        )
    scope = scope_of(buffer)
    if is_buffer_var(value) or isinstance(value, TensorRegion):
        region = as_region(value, "assignment", "the value")
        self.report_error(
            node.value,
            TileShapeError(f"the value is a tile {region} of shape {shape_text(region.extents)}, not one element",
                           advice="index it with all its dimensions, or use T.copy for the whole tile"),
        )
    number = constant(value, dtype_of(buffer), f"store to {buffer.name}")
    if context.in_parallel:
        B.buffer_store(buffer, number, indices)
        return
    if scope == "fragment":
        self.report_error(
            target,
            TileTypeError(
                f"{buffer.name} is a fragment: its elements are spread over the threads, so a single one cannot be stored here",
                advice=f"write `for i in T.Parallel(...): {buffer.name}[i] = ...`, or T.fill({buffer.name}, value)",
            ),
        )
    _check_uniform(self, node, [number, *indices])
    if scope in ("local", "variable"):
        B.buffer_store(buffer, number, indices)
        return
    with block(context, "parallel"):
        B.buffer_store(buffer, number, indices)


# ------------------------------------------------------------------------------------------------ expressions


def _describe(value) -> str:
    if is_buffer_var(value):
        return f"the buffer {value.name}"
    if tvm.ir.is_prim_expr(value):
        return f"the expression {value}"
    return f"{type(value).__name__} {value!r}" if not isinstance(value, type) else value.__name__


def _reads_memory(value) -> bool:
    """Whether an expression's value depends on when it is evaluated: memory reads and calls with effects."""
    found = []
    walk(value, (TensorLoad, lambda load: found.append(load)), (tvm.ir.Call, lambda c: found.append(c) if _has_effect(c) else None))
    return bool(found)


def _has_effect(call) -> bool:
    return getattr(call.op, "name", "") in ("tirx.call_extern", "tirx.call_packed", "tirx.call_llvm_intrin", "tirx.call_pure_extern") or (
        getattr(call.op, "name", "").startswith("tirx.ptx")
    )


def _check_uniform(self, node, values) -> None:
    """Outside of T.Parallel an expression has one value for the CTA: it cannot read a fragment's elements."""
    if _function(self).in_parallel:
        return
    for value in values:
        if not isinstance(value, tvm.ir.Expr):
            continue
        loads: list[TensorLoad] = []
        walk(value, (TensorLoad, loads.append))
        for load in loads:
            if is_buffer_var(load.source) and scope_of(load.source) == "fragment":
                name = load.source.name
                self.report_error(
                    node,
                    TileTypeError(
                        f"{name} is {scope_name(load.source)}: its elements are spread over the threads, "
                        f"so {load} cannot be read as one value outside of T.Parallel",
                        advice=f"sum it with T.reduce_sum({name}, out), compute in `for ... in T.Parallel(...)`, or T.copy it to shared memory",
                    ),
                )


@dispatch.register(TOKEN, "Expr")
def visit_expr_statement(self, node: doc.Expr) -> None:
    """A call as a statement; an expression whose value is dropped is a mistake."""
    value = self.eval_expr(node.value)
    if tvm.ir.is_prim_expr(value) and not isinstance(value, tvm.ir.Call):
        self.report_error(node, TileSyntaxError("the value of this expression is not used", advice="assign it, or remove the line"))
    if is_buffer_var(value) or isinstance(value, VarHandle):
        self.report_error(node, TileSyntaxError("the buffer made here has no name", advice="assign it: A_shared = T.alloc_shared(...)"))
    if isinstance(value, tvm.ir.Call) and tvm.ir.is_prim_expr(value) and _has_effect(value) and not _function(self).in_parallel:
        with block(_function(self), "parallel"):
            B.evaluate(value)
        return
    if value is None or isinstance(value, str):
        return
    stock.visit_expr_stmt(self, doc.Expr(node.value, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset))




@dispatch.register("tile.macro", "FunctionDef")
def visit_macro(self, node: doc.FunctionDef) -> None:
    """A macro defined inside a kernel sees the kernel's names as they are at the call."""
    from .entry import define_macro

    self.var_table.add(node.name, define_macro(self, node), allow_shadowing=False)
