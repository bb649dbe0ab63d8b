"""The ``"tile"`` dialect of the TVMScript parser: what an assignment, a loop and an `if` mean in a kernel.

Stock handlers of the ``"tirx"`` dialect serve for everything that is not overridden here.
"""

from __future__ import annotations

import builtins
import contextlib

import tvm
from tvm import tirx
from tvm.ir import TensorRegion
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I  # noqa: N812
from tvm.script.parser._core import collect_signature_type_vars, dispatch, doc
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B
from tvm.tirx.script.parser import parser as stock

from ..errors import TileSyntaxError, TileTypeError
from . import context as ctx
from .alloc import VarHandle, is_variable
from .assign import TOKEN, bind_value, check_rebinding, describe, target_names
from .diagnostics import install
from .emit import block
from .kernel import Kernel, WarpGroup
from .loops import TileLoop, TileRange, tile_range
from .values import as_expression, check_uniform, has_effect, is_expression

__all__ = ["TOKEN"]

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
    for extra, label in (
        (node.args.vararg, "*args"),
        (node.args.kwarg, "**kwargs"),
        (node.args.kwonlyargs, "keyword-only parameters"),
    ):
        if extra:
            self.report_error(
                node, TileSyntaxError(f"a kernel cannot have {label}", advice="list the tensors and scalars one by one")
            )
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
            TileSyntaxError(
                f"kernel {node.name!r} has no `with T.Kernel(...)`",
                advice="the body of a kernel stands inside T.Kernel",
            ),
        )


def _parameter(self, arg, annotations, dtypes):
    if arg.annotation is None:
        self.report_error(
            arg,
            TileSyntaxError(
                f"parameter {arg.arg!r} has no annotation",
                advice=f'write {arg.arg}: T.Tensor((M, N), "float16"), or {arg.arg}: T.int32',
            ),
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
            TileTypeError(
                f"parameter {arg.arg!r} is annotated with {annotation!r}",
                advice='use T.Tensor((M, N), "float16") or a scalar such as T.int32',
            ),
        )
    annotation = stock._reuse_signature_match_var(self, arg.annotation, arg.arg, annotation)
    return B.arg(arg.arg, annotation)


class MacroReturn(BaseException):
    """Ends the parse of a macro's body with a value; not an error, so the parser's handlers must not see it."""

    def __init__(self, value) -> None:
        super().__init__()
        self.value = value


@dispatch.register(TOKEN, "Return")
def visit_return(self, node) -> None:
    """Only macros return values, and only where every path reaches the ``return``."""
    scopes = _function(self).macro_scopes
    if not scopes:
        self.report_error(
            node, TileSyntaxError("a kernel cannot return", advice="write the result to a tensor parameter")
        )
    if len(_function(self).scopes) > scopes[-1]:
        self.report_error(
            node,
            TileSyntaxError(
                "`return` inside a run-time branch or loop of a macro",
                advice="assign a T.alloc_var there and return it at the end",
            ),
        )
    raise MacroReturn(None if node.value is None else self.eval_expr(node.value))


def _refuse(kind: str, text: str, advice: str) -> None:
    @dispatch.register(TOKEN, kind)
    def handler(self, node) -> None:
        self.report_error(node, TileSyntaxError(text, advice=advice))


_refuse(
    "Break",
    "`break` is not possible in a kernel: all threads of a CTA run the same iterations",
    "compute the bounds first: for k in T.serial(lo, hi), or guard the body with `if`",
)
_refuse(
    "Continue",
    "`continue` is not possible in a kernel: all threads of a CTA run the same iterations",
    "guard the rest of the body with `if`",
)
_refuse(
    "Assert",
    "`assert` is ambiguous in a kernel",
    "use T.device_assert(condition, message) in the kernel, or T.assume(condition) on parameters",
)
_refuse("Nonlocal", "`nonlocal` is not possible in a kernel", "use T.alloc_var for a mutable scalar")


# ------------------------------------------------------------------------------------------------ loops, if, with


def _visit_statements(self, statements, loop=None) -> None:
    """A loop's body; for a manual pipeline schedule each statement gets its number."""
    context = _function(self)
    if loop is None or not getattr(loop, "manual", False):
        self.visit_body(statements)
        return
    count, outer = 0, context.pipeline_statement
    try:
        for statement in statements:
            if _is_alias(self, statement):
                self.visit(statement)
                continue
            context.pipeline_statement = count
            self.visit(statement)
            count += 1
    finally:
        context.pipeline_statement = outer
    loop.check_statements(count)


def _is_alias(self, statement) -> bool:
    """Statements that make no tile operation: ``x = expr`` (unless x is a T.alloc_var), ``pass``, docstrings."""
    if isinstance(statement, doc.Pass):
        return True
    if isinstance(statement, doc.Expr) and isinstance(statement.value, doc.Constant):
        return True
    if not isinstance(statement, doc.Assign):
        return False
    known = self.var_table.get()
    return all(
        _only_names(t) and not any(is_variable(known.get(n)) for n in target_names(t)) for t in statement.targets
    )


def _only_names(target) -> bool:
    if isinstance(target, doc.Tuple | doc.List):
        return all(_only_names(t) for t in target.elts)
    return isinstance(target, doc.Name)


@dispatch.register(TOKEN, "For")
def visit_for(self, node: doc.For) -> None:
    """``for`` over T.Parallel, T.Pipelined, T.serial, range, or (unrolled at parse time) a Python list or tuple."""
    context = _function(self)
    if node.orelse:
        self.report_error(
            node,
            TileSyntaxError("`for ... else` is not possible in a kernel", advice="write the statements after the loop"),
        )
    loop = self.eval_expr(node.iter)
    if isinstance(loop, dict | set | zip | enumerate | map):
        loop = list(loop)
    if isinstance(loop, list | tuple):
        # Python data: unrolled while parsing, names behave as in straight-line code
        for value in loop:
            check_rebinding(self, node.target, node.target)
            self.eval_assign(target=node.target, source=value, bind_value=bind_value, allow_shadowing=True)
            self.visit_body(node.body)
        return
    if isinstance(loop, builtins.range):
        loop = TileRange(context, "range", B.serial, loop.start, loop.stop, loop.step)
    if not isinstance(loop, TileLoop):
        self.report_error(
            node.iter,
            TileSyntaxError(
                f"cannot iterate over {describe(loop)}",
                advice="use range, T.serial, T.unroll, T.vectorized, T.grid, T.Parallel, T.Pipelined or T.Persistent",
            ),
        )
    if context.kernel is None:
        self.report_error(node, TileSyntaxError("a loop outside of T.Kernel", advice="move it into the kernel"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(self.var_table.with_frame())
        check_rebinding(self, node.target, node.target)
        values = loop.open(stack)
        _check_target_count(self, node.target, values, "the loop")
        self.eval_assign(target=node.target, source=values, bind_value=_bind_loop)
        _visit_statements(self, node.body, loop)


def _bind_loop(self, node, name: str, value):
    if isinstance(value, tvm.ir.Var):
        IRBuilder.name(name, value)
    elif isinstance(value, list | tuple):
        for n, part in enumerate(value):
            _bind_loop(self, node, f"{name}_{n}", part)
    _function(self).bound.add(name)
    return value


def _check_target_count(self, target, values, what: str) -> None:
    names = len(target.elts) if isinstance(target, doc.Tuple | doc.List) else 1
    count = len(values) if isinstance(values, list | tuple | tvm.ir.Array) else 1
    if names != count:
        self.report_error(
            target,
            TileSyntaxError(
                f"{what} yields {count} variable{'s' if count > 1 else ''}, but the target has {names} "
                f"name{'s' if names > 1 else ''}",
                advice=f"name all of them: ({', '.join(['i', 'j', 'k', 'l', 'm', 'n'][:count])})"
                if count > 1
                else "use one name",
            ),
        )


@dispatch.register(TOKEN, "With")
def visit_with(self, node: doc.With) -> None:
    """``with T.Kernel(...) as (bx, by):`` and ``with T.ws(group):``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(self.var_table.with_frame())
        for item in node.items:
            frame = self.eval_expr(item.context_expr)
            if not isinstance(frame, Kernel | WarpGroup):
                self.report_error(
                    item.context_expr,
                    TileSyntaxError(
                        f"`with` on {describe(frame)}",
                        advice="a kernel has `with T.Kernel(...)` and `with T.ws(group)`",
                    ),
                )
            values = stack.enter_context(frame)
            if item.optional_vars is None:
                continue
            if isinstance(frame, WarpGroup):
                self.report_error(
                    item.optional_vars, TileSyntaxError("T.ws yields no value", advice="write `with T.ws(0):`")
                )
            _check_target_count(self, item.optional_vars, values, "T.Kernel")
            self.eval_assign(target=item.optional_vars, source=values, bind_value=_bind_loop)
        self.visit_body(node.body)


@dispatch.register(TOKEN, "If")
def visit_if(self, node: doc.If) -> None:
    """``if``: decided now for Python values, a branch of the kernel for expressions."""
    context = _function(self)
    predicate = as_expression(self.eval_expr(node.test))
    if is_buffer_var(predicate) or isinstance(predicate, TensorRegion):
        self.report_error(
            node.test, TileTypeError("the condition is a whole tile", advice="use T.any_of(tile) or T.all_of(tile)")
        )
    if not is_expression(predicate):
        # Python value. No lexical scope: bindings of the chosen branch stay visible.
        self.visit_body(node.body if predicate else node.orelse)
        return
    if context.kernel is None:
        self.report_error(
            node.test, TileSyntaxError("`if` on a run-time value outside of T.Kernel", advice="move it into the kernel")
        )
    check_uniform([predicate])
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
    if node.orelse:
        self.report_error(
            node,
            TileSyntaxError(
                "`while ... else` is not possible in a kernel", advice="write the statements after the loop"
            ),
        )
    if context.in_parallel:
        self.report_error(
            node,
            TileSyntaxError(
                "`while` inside T.Parallel: the iterations would end at different times",
                advice="use a for loop with a fixed bound and `if`",
            ),
        )
    with self.var_table.with_frame():
        condition = as_expression(self.eval_expr(node.test))
        if not is_expression(condition):
            self.report_error(
                node.test,
                TileSyntaxError(
                    f"`while` on the Python value {condition!r} never changes",
                    advice="use T.alloc_var for a value that the body changes",
                ),
            )
        check_uniform([condition])
        dtype = str(condition.ty.dtype)
        if dtype != "bool":
            condition = condition != tirx.const(0, dtype)
        with B.While(condition), context.scope("loop"):
            self.visit_body(node.body)


@dispatch.register(TOKEN, "Expr")
def visit_expr_statement(self, node: doc.Expr) -> None:
    """A call as a statement; an expression whose value is dropped is a mistake."""
    value = as_expression(self.eval_expr(node.value))
    if is_buffer_var(value) or isinstance(value, VarHandle):
        self.report_error(
            node,
            TileSyntaxError("the buffer made here has no name", advice="assign it: A_shared = T.alloc_shared(...)"),
        )
    if not is_expression(value):
        if isinstance(value, TileLoop | Kernel):
            self.report_error(
                node,
                TileSyntaxError("a loop or kernel without a body", advice="write `for ... in` or `with` before it"),
            )
        return
    if not isinstance(value, tvm.ir.Call) or not has_effect(value):
        self.report_error(
            node, TileSyntaxError("the value of this expression is not used", advice="assign it, or remove the line")
        )
    context = _function(self)
    if context.kernel is None:
        self.report_error(node, TileSyntaxError("a call outside of T.Kernel", advice="move it into the kernel"))
    if context.in_parallel:
        B.evaluate(value)
        return
    with block(context, "parallel"):
        B.evaluate(value)


@dispatch.register("tile.macro", "FunctionDef")
def visit_macro(self, node: doc.FunctionDef) -> None:
    """A macro defined inside a kernel sees the kernel's names as they are at the call."""
    from .entry import define_macro

    self.var_table.add(node.name, define_macro(self, node), allow_shadowing=False)
