"""Assignments of the ``"tile"`` dialect: names of values, stores to buffers, writes of T.alloc_var variables."""

from __future__ import annotations

from tvm.ir import TensorRegion
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import dispatch, doc
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B

from ..errors import TileShapeError, TileSyntaxError, TileTypeError
from . import context as ctx
from .alloc import VarHandle, alloc_var, is_variable, store_variable
from .dtypes import constant
from .emit import block
from .regions import as_region, dtype_of, scope_of, shape_text
from .values import as_expression, check_uniform, frozen, is_expression, is_slice, snapshot

__all__ = ["TOKEN", "bind_value", "check_rebinding", "describe", "target_names"]

TOKEN = "tile"


def _function() -> ctx.FunctionContext:
    return ctx.current("an assignment of the tile language")


@dispatch.register(TOKEN, "Assign")
def visit_assign(self, node: doc.Assign) -> None:
    """``x = expr`` names a value, ``A[i, j] = expr`` stores, ``v = expr`` writes a T.alloc_var variable."""
    value = self.eval_expr(node.value)
    if len(node.targets) > 1:
        # evaluated once, whatever the first stores change
        value = _taken(value)
    for target in node.targets:
        _assign(self, node, target, value)


def _taken(value, name: str = "value"):
    if isinstance(value, list | tuple):
        return type(value)(_taken(v, name) for v in value)
    return snapshot(value, name) if is_expression(value) else value


def _assign(self, node, target, value) -> None:
    if isinstance(target, doc.Tuple | doc.List):
        _unpack(self, node, target, value)
    elif isinstance(target, doc.Subscript):
        _store(self, node, target, value)
    elif isinstance(target, doc.Attribute):
        self.report_error(
            target, TileSyntaxError("attributes cannot be assigned in a kernel", advice="use a plain name")
        )
    elif (
        isinstance(target, doc.Name)
        and is_variable(self.var_table.get().get(target.id))
        and not isinstance(value, VarHandle)
    ):
        _write_variable(self, node, target, value)
    else:
        check_rebinding(self, node, target)
        self.eval_assign(target=target, source=value, bind_value=bind_value, allow_shadowing=True)


def _unpack(self, node, target, value) -> None:
    """``a, b = x, y``: the values are taken before anything is assigned (``A[0], A[1] = A[1], A[0]`` swaps)."""
    if any(isinstance(t, doc.Starred) for t in target.elts):
        self.report_error(
            target, TileSyntaxError("starred targets are not possible in a kernel", advice="name each value")
        )
    if not isinstance(value, list | tuple):
        self.report_error(node, TileSyntaxError(f"{describe(value)} cannot be unpacked into {len(target.elts)} names"))
    if len(value) != len(target.elts):
        self.report_error(
            node,
            TileSyntaxError(
                f"{len(value)} values for {len(target.elts)} names", advice="both sides of `=` need the same number"
            ),
        )
    for part, one in zip(target.elts, _taken(value), strict=False):
        _assign(self, node, part, one)


def _write_variable(self, node, target, value) -> None:
    context = _function()
    if context.in_parallel:
        self.report_error(
            node,
            TileSyntaxError(
                f"{target.id!r} is one value for the whole CTA; the iterations of T.Parallel would race for it",
                advice="reduce a tile (T.reduce_sum, T.any_of) and assign the result outside of T.Parallel",
            ),
        )
    value = as_expression(value)
    check_uniform([value])
    store_variable(self.var_table.get()[target.id].source, value, f"assignment to {target.id!r}")


def bind_value(self, node, name: str, value):
    """What a name stands for: an expression itself where it reads no memory, else its value at this point."""
    context = _function()
    context.bound.add(name)
    if isinstance(value, VarHandle):
        IRBuilder.name(context.unique(name), value.buffer)
        context.named.add(value.buffer)
        if value.init is not None:
            init = as_expression(value.init)
            check_uniform([init])
            store_variable(value.buffer, init, f"T.alloc_var init of {name!r}")
        return value.load
    if is_buffer_var(value):
        name_buffer(context, name, value)
        return value
    if is_slice(value):
        return frozen(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(bind_value(self, node, f"{name}_{i}", v) for i, v in enumerate(value))
    return snapshot(value, name) if is_expression(value) else value


def name_buffer(context: ctx.FunctionContext, name: str, buffer) -> None:
    """Name a buffer after the first name it is bound to; annotations refer to buffers by name, so each is unique."""
    if scope_of(buffer) == "global" or buffer in context.named:
        return
    context.named.add(buffer)
    IRBuilder.name(context.unique(name), buffer)


def check_rebinding(self, node, target) -> None:
    """A name bound outside a loop or branch cannot be rebound inside: the change would be lost."""
    frames = self.var_table.frames
    for name in target_names(target):
        for depth in range(max(_function().function_frame - 1, 0), len(frames) - 1):
            if name in frames[depth].vars:
                self.report_error(
                    node,
                    TileSyntaxError(
                        f"{name!r} names a value bound outside of this loop or branch and cannot be rebound inside",
                        advice=f"make it a variable: {name} = T.alloc_var(dtype, init=...), then assign it; sum a "
                        f"tile with "
                        "T.reduce_sum; or use another name",
                    ),
                )


def target_names(target) -> list[str]:
    """Names that an assignment target binds."""
    if isinstance(target, doc.Name):
        return [target.id]
    if isinstance(target, doc.Tuple | doc.List):
        return [name for part in target.elts for name in target_names(part)]
    return []


@dispatch.register(TOKEN, "AugAssign")
def visit_aug_assign(self, node: doc.AugAssign) -> None:
    """``x op= expr`` as ``x = x op expr``."""
    position = {k: getattr(node, k, None) for k in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
    value = self.eval_expr(doc.BinOp(_as_load(node.target), node.op, node.value, **position))
    _assign(self, doc.Assign([node.target], node.value, **position), node.target, value)


def _as_load(target):
    position = (target.lineno, target.col_offset, target.end_lineno, target.end_col_offset)
    if isinstance(target, doc.Name):
        return doc.Name(target.id, doc.Load(), *position)
    if isinstance(target, doc.Subscript):
        return doc.Subscript(target.value, target.slice, doc.Load(), *position)
    return target


@dispatch.register(TOKEN, "AnnAssign")
def visit_ann_assign(self, node: doc.AnnAssign) -> None:
    """``x: T.int32 = expr`` declares a T.alloc_var variable; ``x: T.let = expr`` names a value."""
    annotation = self.eval_expr(node.annotation)
    value = None if node.value is None else self.eval_expr(node.value)
    if annotation is not B.let and not isinstance(annotation, getattr(B, "LetAnnotation", ())):
        value = alloc_var(annotation, value)
    elif value is None:
        self.report_error(node, TileSyntaxError("T.let needs a value", advice="write x: T.let = expr"))
    check_rebinding(self, node, node.target)
    self.eval_assign(target=node.target, source=value, bind_value=bind_value, allow_shadowing=True)


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
    context = _function()
    buffer = self.eval_expr(target.value)
    if isinstance(buffer, dict | list):
        self.report_error(target, TileSyntaxError("Python containers cannot be changed in a kernel"))
    if not is_buffer_var(buffer):
        self.report_error(target, TileTypeError(f"{describe(buffer)} cannot be assigned by index"))
    if context.kernel is None:
        self.report_error(target, TileSyntaxError("a store outside of T.Kernel", advice="move it into the kernel"))
    indices = [as_expression(i) for i in _indices(self, target.slice)]
    _check_indices(self, target, buffer, indices)
    if is_buffer_var(value) or isinstance(value, TensorRegion):
        region = as_region(value, "assignment", "the value")
        self.report_error(
            node.value,
            TileShapeError(
                f"the value is a tile {region} of shape {shape_text(region.extents)}, not one element",
                advice="index it with all its dimensions, or use T.copy for the whole tile",
            ),
        )
    number = constant(value, dtype_of(buffer), f"store to {buffer.name}")
    if context.in_parallel:
        B.buffer_store(buffer, number, indices)
        return
    if scope_of(buffer) == "fragment":
        self.report_error(
            target,
            TileTypeError(
                f"{buffer.name} is a fragment: its elements are spread over the threads, so a single one cannot be "
                f"stored here",
                advice=f"write `for i in T.Parallel(...): {buffer.name}[i] = ...`, or T.fill({buffer.name}, value)",
            ),
        )
    check_uniform([number, *indices])
    if scope_of(buffer) in ("local", "variable"):
        B.buffer_store(buffer, number, indices)
        return
    with block(context, "parallel"):
        B.buffer_store(buffer, number, indices)


def _check_indices(self, target, buffer, indices: list) -> None:
    rank = len(buffer.ty.shape)
    if any(isinstance(i, slice) for i in indices):
        self.report_error(
            target,
            TileSyntaxError(
                f"{buffer.name}[...] = value with a slice",
                advice="use T.copy for tiles, T.fill for a constant, T.Parallel for formulas",
            ),
        )
    if len(indices) != rank:
        self.report_error(
            target,
            TileShapeError(
                f"{buffer.name} has {rank} dimensions {shape_text(buffer.ty.shape)}, but it is indexed with "
                f"{len(indices)}",
                advice=f"write {buffer.name}[{', '.join('ijklmn'[:rank])}]",
            ),
        )
    for index in indices:
        if isinstance(index, int):
            continue
        if not is_expression(index) or not str(index.ty.dtype).startswith(("int", "uint")):
            what = f"{index} of dtype {index.ty.dtype}" if is_expression(index) else repr(index)
            self.report_error(
                target, TileTypeError(f"the index {what} is not an integer", advice='use // or T.cast(index, "int32")')
            )


def describe(value) -> str:
    """A value in words, for messages."""
    if is_buffer_var(value):
        return f"the buffer {value.name}"
    if is_expression(value):
        return f"the expression {as_expression(value)}"
    return f"{type(value).__name__} {value!r}" if not isinstance(value, type) else value.__name__
