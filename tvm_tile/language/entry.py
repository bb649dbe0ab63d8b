"""``@T.prim_func`` and ``@T.macro``."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import doc, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.doc import from_doc
from tvm.script.parser.core.error import ParserError
from tvm.script.parser.core.parser import Parser, VarTable
from tvm.tirx import PrimFunc
from tvm.tirx.script.parser.entry import TIRInline

from ..errors import TileError, TileSyntaxError
from . import parser as _parser  # registers the dialect
from .context import current
from .diagnostics import install, user_cause
from .loops import tile_range
from .values import macro_argument

__all__ = ["macro", "prim_func"]


def prim_func(
    func: Callable | None = None, *, private: bool = False, check_well_formed: bool = True
) -> PrimFunc | Callable:
    """Parse a Python function as a tile kernel.

    It works at module level, in factories with Python parameters, and inside ``@I.ir_module`` beside Relax functions.

    Parameters
    ----------
    func : function
        The kernel; its parameters are annotated with ``T.Tensor`` or scalar types.
    private : bool
        Whether the function gets no global symbol in a module.
    check_well_formed : bool
        Run TVM's well-formedness check on the result as well.

    Returns
    -------
    tvm.tirx.PrimFunc
        Tile IR; inside ``@I.ir_module`` the function itself, which the module's parser takes up.

    Raises
    ------
    TileError
        For a mistake in the kernel, with file, line and caret.

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             B[bx * 64 + i] = A[bx * 64 + i] * 2
    >>> a, b = np.ones(100, "float32"), np.empty(100, "float32")
    >>> tvm_tile.compile(kernel, "llvm", lowering="reference")(a, b)
    >>> float(b.sum())
    200.0
    """
    outer = _frames(sys._getframe(1))

    def decorate(function):
        if not inspect.isfunction(function):
            raise TileSyntaxError(f"@T.prim_func decorates a function, but got {type(function).__name__}")
        if _in_module_class(outer, function):
            return function
        captured = utils.inspect_function_capture(function)
        utils.resolve_closure_vars(function, captured, [None, *outer])
        try:
            return _parse(function, captured, check_well_formed)
        except TileError as err:
            # without the parser's hundred frames: the error itself says where
            mistake, cause = err.with_traceback(None), user_cause(err)
        mistake.__context__ = None
        raise mistake from cause

    if func is not None:
        return decorate(func)
    decorate.dispatch_token = _parser.TOKEN
    return decorate


prim_func.dispatch_token = _parser.TOKEN


@dataclass
class _Frame:
    """The part of ``inspect.FrameInfo`` that is needed: reading source lines for whole stacks takes 80 ms."""

    frame: types.FrameType


def _frames(frame) -> list[_Frame]:
    out = []
    while frame is not None:
        out.append(_Frame(frame))
        frame = frame.f_back
    return out


def _in_module_class(frames: list[_Frame], function) -> bool:
    """Whether the function is defined in the body of a class decorated with ``@I.ir_module``, which parses it later."""
    frame = frames[0].frame
    if "__qualname__" not in frame.f_locals or frame.f_code.co_name not in function.__qualname__:
        return False
    lines, _ = linecache.getlines(frame.f_code.co_filename, frame.f_globals), None
    # the class body starts at its first decorator (3.9 and later); look at the decorators only
    for number in range(frame.f_code.co_firstlineno, len(lines) + 1):
        line = lines[number - 1].strip()
        if line.startswith("class "):
            return False
        if line.startswith("@") and ("ir_module" in line or "rewriter" in line):
            return True
    return False


def _parse(function, captured: dict, check_well_formed: bool) -> PrimFunc:
    from ..ir.normalize import finish

    try:
        source = Source(function)
    except (OSError, TypeError) as err:
        raise TileSyntaxError(
            f"the source of {function.__name__} cannot be read: {err}",
            advice="define the kernel in a file or notebook cell; for exec, put the text into linecache",
        ) from err
    parser = Parser(source, {function.__name__: function.__annotations__})
    parser.tile_standalone = True
    install(parser)
    with IRBuilder() as builder:
        try:
            parser.parse(extra_vars=captured)
        except ParserError as err:
            parser.report_error(err.node, err.args[0])
    result = finish(builder.get(), check_well_formed=check_well_formed)
    result.__name__ = function.__name__
    return result


class TileMacro(TIRInline):
    """A macro of kernel statements; ``return expr`` gives the call a value."""

    def __call__(self, *args, **kwargs):
        """Parse the body into the kernel at hand; the value of its ``return``, or None."""
        context = current(f"the macro {self.func.__name__}")
        signature = inspect.signature(self.func)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as err:
            raise TileSyntaxError(
                f"the macro {self.func.__name__}: {err}", advice=f"it is {self.func.__name__}{signature}"
            ) from None
        bound.apply_defaults()
        values = {name: macro_argument(value, name) for name, value in bound.arguments.items()}
        parser, table, frame = context.parser, context.parser.var_table, context.function_frame
        if self.defining_var_table is not None:
            outer = self.defining_var_table.get_at_depth(self.definition_depth)
        else:
            # as they are at the call: a macro may call itself, or one that is defined below it
            outer = {"range": tile_range, **utils.inspect_function_capture(self.func)}
        context.macro_scopes.append(len(context.scopes))
        try:
            with parser.with_diag_source(self.source):
                parser.var_table, context.function_frame = VarTable(), 2
                with parser.var_table.with_frame():
                    for name, value in outer.items():
                        parser.var_table.add(name, value)
                    with parser.var_table.with_frame():
                        for name, value in values.items():
                            parser.var_table.add(name, value)
                        parser.visit_body(self.get_macro_def().body)
            return None
        except _parser.MacroReturn as returned:
            return returned.value
        except TileError as err:
            if err.location is not None:
                err.in_macro = self.func.__name__  # the call's place is known one level up
            raise
        finally:
            parser.var_table, context.function_frame = table, frame
            context.macro_scopes.pop()


def macro(func: Callable | None = None):
    """A piece of kernel with parameters, parsed where it is called: ``@T.macro``.

    Names follow Python's lexical scoping. Arguments may be buffers, slices, expressions and Python values.

    Parameters
    ----------
    func : function
        The macro's body, in the tile language.

    Examples
    --------
    >>> @T.macro
    ... def scaled(tile, factor):
    ...     for i in T.Parallel(64):
    ...         tile[i] = tile[i] * factor
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         tile = T.alloc_fragment((64,), "float32")
    ...         T.copy(A[bx * 64], tile)
    ...         scaled(tile, 2.0)
    ...         T.copy(tile, B[bx * 64])
    """
    from tvm.script.parser._core import scan_macro

    def decorate(function):
        source, closure = scan_macro(function, utils.inspect_function_capture(function))
        made = TileMacro(source, closure, function)

        def wrapper(*args, **kwargs):
            return made(*args, **kwargs)

        wrapper.__doc__, wrapper.__name__ = function.__doc__, function.__name__
        return wrapper

    if func is None:
        decorate.dispatch_token = "tile.macro"
        return decorate
    return decorate(func)


macro.dispatch_token = "tile.macro"


def define_macro(parser, node: doc.FunctionDef):
    """The macro behind a ``def`` inside a kernel.

    Parameters
    ----------
    parser : Parser
        The parser at the definition; names are looked up in its scopes at each call.
    node : doc.FunctionDef
        The definition.
    """
    shift_line, shift_column = parser.diag.source.start_line - 1, parser.diag.source.start_column
    function_ast = from_doc(node)
    function_ast.decorator_list = []
    module = ast.Module(body=[function_ast], type_ignores=[])
    ast.fix_missing_locations(module)
    ast.increment_lineno(module, shift_line)
    namespace = dict(parser.var_table.get())
    exec(compile(module, filename=parser.diag.source.source_name, mode="exec"), namespace)
    function = namespace[function_ast.name]
    source = _NestedSource(parser.diag.source, node, shift_column)
    made = TileMacro(
        source, {}, function, definition_depth=len(parser.var_table.frames), defining_var_table=parser.var_table
    )

    def wrapper(*args, **kwargs):
        return made(*args, **kwargs)

    wrapper.__name__ = function.__name__
    return wrapper


class _NestedSource:
    """The source of a ``def`` inside a kernel: positions are the enclosing source's."""

    def __init__(self, outer: Source, node, column: int) -> None:
        self.source_name, self.full_source, self.source = outer.source_name, outer.full_source, outer.source
        self.start_line, self.start_column = outer.start_line, column
        self.node = node
        self.location, self.to_span = outer.location, outer.to_span

    def as_ast(self):
        """The module with this definition alone."""
        return doc.Module([self.node])
