"""``@T.prim_func`` and ``@T.macro``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable

from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import doc, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.doc import from_doc
from tvm.script.parser.core.error import ParserError
from tvm.script.parser.core.parser import Parser
from tvm.tirx import PrimFunc
from tvm.tirx.script.parser.entry import TIRInline

from ..errors import TileError, TileSyntaxError
from . import parser as _parser  # registers the dialect
from .diagnostics import install

__all__ = ["macro", "prim_func"]


def prim_func(func: Callable | None = None, *, private: bool = False, check_well_formed: bool = True) -> PrimFunc | Callable:
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
    """
    outer = inspect.stack()

    def decorate(function):
        if not inspect.isfunction(function):
            raise TileSyntaxError(f"@T.prim_func decorates a function, but got {type(function).__name__}")
        if utils.is_defined_in_class(outer, function):
            return function
        captured = utils.inspect_function_capture(function)
        utils.resolve_closure_vars(function, captured, outer)
        try:
            return _parse(function, captured, check_well_formed)
        except TileError as err:
            mistake, cause = err, err.__cause__
        # without the parser's hundred frames: the error itself says where
        raise mistake.with_traceback(None) from cause

    if func is not None:
        return decorate(func)
    decorate.dispatch_token = _parser.TOKEN
    return decorate


prim_func.dispatch_token = _parser.TOKEN


def _parse(function, captured: dict, check_well_formed: bool) -> PrimFunc:
    from ..ir.normalize import finish

    parser = Parser(Source(function), {function.__name__: function.__annotations__})
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
    """A macro of kernel statements; ``return expr`` as its last statement makes it an expression."""

    def parse_macro(self, parser):
        """Parse the body into the kernel at hand; the value of its ``return``, or None."""
        depth = getattr(parser, "tile_macro_depth", 0)
        parser.tile_macro_depth, parser.tile_macro_value = depth + 1, None
        try:
            super().parse_macro(parser)
            return parser.tile_macro_value
        finally:
            parser.tile_macro_depth = depth

    def __call__(self, *args, **kwargs):
        from .context import current

        context = current(f"the macro {self.func.__name__}")
        saved, context.function_frame = context.function_frame, 2
        try:
            return super().__call__(*args, **kwargs)
        finally:
            context.function_frame = saved


def macro(func: Callable | None = None):
    """A piece of kernel with parameters, parsed where it is called: ``@T.macro``.

    Names follow Python's lexical scoping. Arguments may be buffers, slices, expressions and Python values.

    Parameters
    ----------
    func : function
        The macro's body, in the tile language.
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
