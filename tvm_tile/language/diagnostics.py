"""From whatever a handler raised to a :class:`TileError` with the kernel's file, line and a caret."""

from __future__ import annotations

import builtins
import difflib
import re
import types

from tvm.error import DiagnosticError

from ..errors import InternalError, SourceLocation, TileError, TileSyntaxError, TileTypeError

__all__ = ["install", "location_of"]


def location_of(parser, node) -> SourceLocation | None:
    """Where an AST node stands in the user's file."""
    source = parser.diag.source
    if getattr(node, "lineno", None) is None or getattr(node, "col_offset", None) is None:
        return None
    line, column, end_line, end_column = source.location(node)
    lines = source.full_source.splitlines() if source.source_name.startswith("<") else None
    text = lines[line - 1] if lines and 0 < line <= len(lines) else None
    return SourceLocation(source.source_name, line, column, end_column if end_line == line else None, text)


def install(parser) -> None:
    """Make a parser raise :class:`TileError` instead of TVM's ``DiagnosticError``, which its excepthook would hide."""
    if getattr(parser, "tile_errors", False):
        return
    parser.tile_errors = True
    parser.report_error = types.MethodType(_report, parser)


def _report(parser, node, err) -> None:
    if isinstance(err, InternalError):
        raise err
    if isinstance(err, TileError):
        where = location_of(parser, node)
        raise err.at(where) if err.location is None and where is not None else err
    if isinstance(err, DiagnosticError):
        raise TileSyntaxError(str(err), location_of(parser, node)) from err
    cause = err if isinstance(err, BaseException) else None
    raise _translate(parser, err).at(location_of(parser, node)) from cause


def _translate(parser, err) -> TileError:
    """A user's mistake behind an exception of Python or TVM."""
    text = str(err).strip()
    undefined = re.search(r"Undefined variable: (\w+)|name '(\w+)' is not defined", text)
    if undefined:
        name = undefined.group(1) or undefined.group(2)
        known = [n for n in parser.var_table.get() if not n.startswith("__")] + dir(builtins)
        near = difflib.get_close_matches(name, known, n=1)
        return TileSyntaxError(f"name {name!r} is not defined", advice=f"did you mean {near[0]!r}?" if near else None)
    if isinstance(err, AttributeError):
        return TileSyntaxError(text, advice=getattr(err, "advice", None))
    if "Cannot use and / or / not operator to Expr" in text or "__bool__" in text or "__nonzero__" in text:
        return TileTypeError(
            "a run-time expression has no Python truth value here",
            advice="use T.max / T.min / T.if_then_else on expressions, and `if` only as a statement",
        )
    if isinstance(err, TypeError) and re.search(r"unexpected keyword argument|missing \d+ required|positional argument", text):
        near = _keyword_advice(text)
        return TileSyntaxError(_callable_text(text), advice=near)
    if isinstance(err, IndexError) or "index" in text.lower() and "dimension" in text.lower():
        return TileTypeError(text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("note:", "Traceback", "  File"))]
    message = lines[-1].strip() if lines else type(err).__name__
    message = re.sub(r"^(TypeError|ValueError|RuntimeError|KeyError|InternalError|TVMError):\s*", "", message)
    return TileTypeError(message) if isinstance(err, TypeError) else TileSyntaxError(message)


def _callable_text(text: str) -> str:
    return re.sub(r"^(\w+)\.?__init__\(\)|^(\w+)\(\)", lambda m: f"T.{(m.group(1) or m.group(2)).strip('_')}()", text)


def _keyword_advice(text: str) -> str | None:
    from .. import language

    match = re.match(r"(\w+?)_?(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'", text)
    function = getattr(language, match.group(1), None) if match else None
    if function is None:
        return None
    import inspect

    try:
        names = [n for n in inspect.signature(function).parameters if n != "self"]
    except (TypeError, ValueError):
        return None
    near = difflib.get_close_matches(match.group(2), names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"possible arguments: {', '.join(names)}"
