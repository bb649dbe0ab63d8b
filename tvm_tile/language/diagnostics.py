"""From whatever a handler raised to a :class:`TileError` with the kernel's file, line and a caret."""

from __future__ import annotations

import builtins
import difflib
import inspect
import linecache
import operator
import os
import re
import traceback
import types

import tvm
from tvm.error import DiagnosticError
from tvm.script.parser._core import doc
from tvm.script.parser.core.error import ParserError
from tvm.script.parser.core.evaluator import ExprEvaluator, _eval_op
from tvm.script.parser.core.parser import ScriptMacro

from ..errors import InternalError, SourceLocation, TileError, TileShapeError, TileSyntaxError, TileTypeError
from .context import active
from .values import as_expression, is_expression

__all__ = ["install", "location_of", "user_cause"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TVM = os.path.dirname(os.path.abspath(tvm.__file__))

# Statements of Python that the stock parser has no visitor for; a kernel is not executed, so none of them can work.
_NO_VISITOR = {
    "Import": "import before the kernel, at the top of the file",
    "ImportFrom": "import before the kernel, at the top of the file",
    "Try": "a kernel has no exceptions; use T.device_assert for checks",
    "TryStar": "a kernel has no exceptions; use T.device_assert for checks",
    "Raise": "a kernel has no exceptions; use T.device_assert for checks",
    "Delete": "names end with their block",
    "Global": "pass values as parameters or closure variables",
    "ClassDef": "define it before the kernel",
    "AsyncFor": "use a plain for loop",
    "AsyncWith": "use a plain with",
    "AsyncFunctionDef": "use T.macro",
    "Match": "use if / elif",
}


def location_of(parser, node) -> SourceLocation | None:
    """Where an AST node stands in the user's file."""
    source = parser.diag.source
    if getattr(node, "lineno", None) is None or getattr(node, "col_offset", None) is None:
        return None
    line, column, end_line, end_column = source.location(node)
    text = linecache.getline(source.source_name, line)
    if not text:  # a source that is no file: the parser's own copy, which is dedented
        lines, at = source.source.splitlines(), line - source.start_line
        text = " " * source.start_column + lines[at] if 0 <= at < len(lines) else ""
    if end_line != line:
        end_column = len(text.rstrip()) + 1
    return SourceLocation(source.source_name, line, column, end_column, text.rstrip("\r\n") or None)


_COMPARE = {
    doc.Lt: operator.lt,
    doc.LtE: operator.le,
    doc.Gt: operator.gt,
    doc.GtE: operator.ge,
    doc.Eq: operator.eq,
    doc.NotEq: operator.ne,
}


class _Evaluator(ExprEvaluator):
    """Python's own rules for parse-time values in ``x if n else y``, ``n and x`` and ``n or x``; mixed dtypes compare.

    The stock comparison does not promote: it fails for bfloat16 beside a Python number and for float16 beside float32.
    """

    def _eval_compare(self, fields):
        values = [self._eval_expr(part) for part in (fields["left"], *fields["comparators"])]
        result = None
        for op, a, b in zip(fields["ops"], values, values[1:], strict=False):
            if type(op) in _COMPARE and (tvm.ir.is_prim_expr(a) or tvm.ir.is_prim_expr(b)):
                part = as_expression(_COMPARE[type(op)](as_expression(a), as_expression(b)))
            else:
                part = _eval_op(op, values=[a, b])
            result = part if result is None else _eval_op(doc.And(), values=[result, part])
        return result

    def _eval_if_exp(self, node):
        test = self._eval_expr(self._visit(node.test))
        if isinstance(test, tvm.ir.Expr) or hasattr(test, "expr_ty"):
            test = _truth(test)
            then, other = (self._eval_expr(self._visit(part)) for part in (node.body, node.orelse))
            return tvm.tirx.op.if_then_else(test, then, other)
        return self._eval_expr(self._visit(node.body if test else node.orelse))

    def _eval_bool_op(self, node):
        value = self._eval_expr(self._visit(node.values[0]))
        for part in node.values[1:]:
            if not isinstance(value, tvm.ir.Expr) and not hasattr(value, "expr_ty"):
                # decided now: the other side must not even be evaluated when Python would not
                if bool(value) is isinstance(node.op, doc.Or):
                    return value
                value = self._eval_expr(self._visit(part))
                continue
            value = _eval_op(node.op, values=[_truth(value), _truth(self._eval_expr(self._visit(part)))])
        return value

    def _eval_unary_op(self, fields):
        value = self._eval_expr(fields["operand"])
        if isinstance(fields["op"], doc.Not):
            value = _truth(value)
            return not value if isinstance(value, bool) else tvm.tirx.Not(value)
        return _eval_op(fields["op"], values=[value])


def _truth(value):
    """The truth of a value in a condition: not zero."""
    if not is_expression(value):
        return bool(value)
    value = as_expression(value)
    dtype = str(value.ty.dtype)
    return value if dtype == "bool" else as_expression(value != tvm.tirx.const(0, dtype))


def _in_kernel(parser) -> bool:
    """Whether the parser is inside a tile function; in a module it also parses Relax functions, in its own way."""
    context = active()
    return getattr(parser, "tile_standalone", False) or (context is not None and context.parser is parser)


def _eval_expr(parser, node, extra_vars=None):
    if not _in_kernel(parser):
        return parser.tile_stock_eval(node, extra_vars)
    values = parser.var_table.get()
    values.update(extra_vars or {})
    values[ScriptMacro.parser_object_name] = parser
    evaluator = _Evaluator(parser, values)
    result = evaluator._visit(node)
    value = evaluator._eval_expr(result)
    return parser.annotate_current_source_span(value)


def install(parser) -> None:
    """Make a parser raise :class:`TileError` instead of TVM's ``DiagnosticError``, which its excepthook would hide."""
    if getattr(parser, "tile_errors", False):
        return
    parser.tile_errors = True
    parser.tile_stock_report, parser.tile_stock_eval = parser.report_error, parser.eval_expr
    parser.report_error = types.MethodType(_report, parser)
    parser.eval_expr = types.MethodType(_eval_expr, parser)
    for kind, advice in _NO_VISITOR.items():
        setattr(parser, f"visit_{kind}", types.MethodType(_refuse(kind, advice), parser))


def _refuse(kind: str, advice: str):
    words = {"ImportFrom": "import", "ClassDef": "class", "Delete": "del", "TryStar": "try"}

    def visit(parser, node) -> None:
        raise TileSyntaxError(
            f"`{words.get(kind, kind.lower())}` is not possible in a kernel", location_of(parser, node), advice
        )

    return visit


def _report(parser, node, err) -> None:
    if isinstance(err, InternalError):
        raise err
    if isinstance(err, ParserError):
        node, err = err.node, err.args[0] if err.args else "syntax error"
    if isinstance(err, TileError):
        where = location_of(parser, node)
        macro, err.in_macro = getattr(err, "in_macro", None), None
        if macro is not None:
            err.message += f" (in the macro {macro}, called at {os.path.basename(where.file)}:{where.line})"
        raise err.at(where) if err.location is None and where is not None else err
    if not _in_kernel(parser):
        parser.tile_stock_report(node, err)
    if isinstance(err, DiagnosticError):
        raise TileSyntaxError(str(err), location_of(parser, node)) from err
    raise _translate(parser, err, location_of(parser, node)) from err if isinstance(err, BaseException) else None


def user_cause(error: TileError) -> BaseException | None:
    """The exception behind an error if the user's own code raised it, with the user's frames only; else None."""
    cause = error.__cause__
    if cause is None or cause.__traceback__ is None:
        return None
    frames = cause.__traceback__
    last = None
    while frames is not None:
        file = os.path.abspath(frames.tb_frame.f_code.co_filename)
        ours = file.startswith((_PACKAGE + os.sep, _TVM + os.sep)) or frames.tb_frame.f_code.co_filename.startswith(
            "<ast"
        )
        last = None if ours else (last or frames)
        frames = frames.tb_next
    return None if last is None or not _in_file(last) else cause.with_traceback(last)


def _in_file(tb) -> bool:
    # an expression of the kernel itself is evaluated in a frame without a file: no cause beside the kernel's own line
    return os.path.exists(tb.tb_frame.f_code.co_filename)


def _is_our_fault(err) -> bool:
    """An unexpected exception that was raised by a line of this package, not by what it called."""
    if not isinstance(err, AssertionError | KeyError | IndexError | AttributeError | NotImplementedError) or hasattr(
        err, "advice"
    ):
        return False
    last = traceback.extract_tb(err.__traceback__)[-1:]
    return bool(last) and os.path.abspath(last[0].filename).startswith(_PACKAGE + os.sep)


def _translate(parser, err, where: SourceLocation | None) -> TileError | InternalError:
    """A user's mistake behind an exception of Python or TVM."""
    text = str(err).strip()
    if isinstance(err, BaseException) and _is_our_fault(err):
        return InternalError(f"{type(err).__name__}: {text}", where)
    undefined = re.search(r"Undefined variable: (\w+)|name '(\w+)' is not defined", text)
    if undefined:
        return TileSyntaxError(*_undefined(parser, undefined.group(1) or undefined.group(2), where))
    if isinstance(err, AttributeError):
        return TileSyntaxError(text, where, getattr(err, "advice", None))
    if isinstance(err, RecursionError):
        return TileSyntaxError(
            "the macro calls itself too deeply", where, "end the recursion with `if` on a Python value"
        )
    if "Cannot use and / or / not operator to Expr" in text or "__bool__" in text or "__nonzero__" in text:
        return TileTypeError(
            "a run-time expression has no Python truth value here",
            where,
            "use T.max / T.min / T.if_then_else on expressions, and `if` only as a statement",
        )
    if text == "Function must be decorated":
        return TileSyntaxError(
            "a function inside a kernel", where, "decorate it with @T.macro, or define it before the kernel"
        )
    if "non-unit step" in text:
        advice = "take the whole range and pick elements in T.Parallel"
        return TileShapeError("a slice with a step other than 1", where, advice)
    if "multiple types of integer divisions" in text:
        return TileTypeError("`/` of two integers", where, "use // for integers, or T.cast one side to a float dtype")
    if isinstance(err, TypeError) and re.search(
        r"unexpected keyword argument|missing .*required|positional argument|multiple values", text
    ):
        prefix = _called_as(text, where)
        return TileSyntaxError(_callable_text(text, prefix), where, _keyword_advice(text, prefix))
    lines = [
        line for line in text.splitlines() if line.strip() and not line.startswith(("note:", "Traceback", "  File"))
    ]
    message = lines[-1].strip() if lines else ""
    message = re.sub(r"^(TypeError|ValueError|RuntimeError|KeyError|InternalError|TVMError):\s*", "", message)
    if isinstance(err, BaseException) and (not message or user_cause(_caused(err)) is not None):
        message = f"{type(err).__name__}: {message}".rstrip(": ")
    return (TileTypeError if isinstance(err, TypeError) else TileSyntaxError)(message, where)


def _caused(err) -> TileError:
    probe = TileError("")
    probe.__cause__ = err
    return probe


def _undefined(parser, name: str, where):
    context = active()
    if context is not None and name in context.bound:
        return (
            f"name {name!r} is not defined here: it was bound inside a loop, branch or `with` that has ended",
            where,
            f"make it a variable before: {name} = T.alloc_var(dtype, init=...)",
        )
    known = [n for n in parser.var_table.get() if not n.startswith("__")] + dir(builtins)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"name {name!r} is not defined", where, f"did you mean {near[0]!r}?" if near else "define it before"


def _called_as(text: str, where: SourceLocation | None) -> str:
    """The prefix (``"T."``, ``"R."``) under which the source calls the function that an error's text names."""
    name = re.match(r"(\w+?)_?(?:\.__init__)?\(\)", text)
    line = where.source_line() if where is not None else None
    call = re.search(rf"\b(?:(\w+)\.)?{name.group(1)}_?\s*\(", line) if name and line else None
    if call is None:
        return "T."
    return f"{call.group(1)}." if call.group(1) else ""


def _callable_text(text: str, prefix: str = "T.") -> str:
    text = re.sub(
        r"^(\w+)\.?__init__\(\)|^(\w+)\(\)", lambda m: f"{prefix}{(m.group(1) or m.group(2)).strip('_')}()", text
    )
    return text.replace("T.<lambda>()", "the lambda")


def _keyword_advice(text: str, prefix: str = "T.") -> str | None:
    from .. import language

    if prefix == "R.":
        return None
    match = re.match(r"(\w+?)_?(?:\.__init__)?\(\) (?:got an unexpected keyword argument '(\w+)')?", text)
    function = getattr(language, match.group(1), None) if match else None
    if function is None:
        return None
    try:
        names = [n for n in inspect.signature(function).parameters if n != "self"]
    except (TypeError, ValueError):
        return None
    near = difflib.get_close_matches(match.group(2), names, n=1) if match.group(2) else None
    return f"did you mean {near[0]!r}?" if near else f"possible arguments: {', '.join(names)}"
