"""Values of expressions at a point of the kernel: what reads memory, what is uniform over the CTA, snapshots."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import tirx
from tvm.ir import Range, TensorLoad, TensorRegion, Var
from tvm.script.ir_builder import IRBuilder
from tvm.tirx import is_buffer_var
from tvm.tirx.script import builder as B

from ..errors import TileTypeError
from ..ir.visit import walk
from .context import active
from .regions import scope_name, scope_of

__all__ = [
    "as_expression",
    "check_uniform",
    "element_of",
    "frozen",
    "has_effect",
    "is_expression",
    "is_slice",
    "reads_memory",
    "snapshot",
]

_EFFECTS = ("tirx.call_extern", "tirx.call_packed", "tirx.call_llvm_intrin", "tirx.call_pure_extern")


def is_expression(value) -> bool:
    """Whether a value is a scalar expression of the kernel (not a Python number, buffer or slice)."""
    if is_buffer_var(value):
        return False
    # `a == b` of two expressions is a deferred object until it is used
    return tvm.ir.is_prim_expr(value) or hasattr(value, "expr_ty")


def as_expression(value):
    """The expression behind a deferred comparison; everything else unchanged."""
    if not is_buffer_var(value) and not tvm.ir.is_prim_expr(value) and hasattr(value, "expr_ty"):
        return tirx.convert(value)
    return value


def has_effect(call) -> bool:
    """Whether a call does more than compute a value."""
    name = getattr(call.op, "name", "")
    return name in _EFFECTS or name.startswith("tirx.ptx")


def reads_memory(value) -> bool:
    """Whether an expression's value depends on when it is evaluated: memory reads and calls with effects."""
    found: list = []
    walk(
        value, (TensorLoad, found.append), (tvm.ir.Call, lambda call: found.append(call) if has_effect(call) else None)
    )
    return bool(found)


def check_uniform(values: Iterable) -> None:
    """Outside of T.Parallel an expression has one value for the CTA: it cannot read a fragment's elements.

    Raises
    ------
    TileTypeError
        Naming the fragment and the ways to use it.
    """
    context = active()
    if context is None or context.in_parallel:
        return
    for value in values:
        if not isinstance(value, tvm.ir.Expr) or is_buffer_var(value):
            continue
        loads: list[TensorLoad] = []
        walk(value, (TensorLoad, loads.append))
        for load in loads:
            if is_buffer_var(load.source) and scope_of(load.source) == "fragment":
                name = load.source.name
                raise TileTypeError(
                    f"{name} is {scope_name(load.source)}: its elements are spread over the threads, "
                    f"so {load} cannot be read as one value outside of T.Parallel",
                    advice=f"sum it with T.reduce_sum({name}, out), compute in `for ... in T.Parallel(...)`, or "
                    f"T.copy it "
                    "to shared memory",
                )


def snapshot(value, name: str = "value"):
    """An expression's value at this point: the expression itself where it reads no memory.

    Parameters
    ----------
    value : expression or Python value
        What to take the value of; Python values stay as they are.
    name : str
        Name of the variable that holds the value.
    """
    value = as_expression(value)
    if not tvm.ir.is_prim_expr(value) or is_buffer_var(value):
        return value
    check_uniform([value])
    if not reads_memory(value):
        return value
    context = active()
    if context is not None and context.kernel is None:
        raise TileTypeError(
            f"{value} reads memory outside of T.Kernel: only scalars and shapes are known before a kernel runs",
            advice="read it inside `with T.Kernel(...)`, or pass the value as a scalar parameter",
        )
    var = B.Bind(value)
    IRBuilder.name(name, var)
    return var


def frozen(region):
    """A slice whose bounds are taken at this point, whatever changes the memory they came from."""
    if isinstance(region, TensorRegion):
        ranges = [(snapshot(r.min, "start"), snapshot(r.extent, "extent")) for r in region.region]
        return tirx.stmt.BufferRegion(region.source, [Range.from_min_extent(low, extent) for low, extent in ranges])
    indices = []
    for index in region.indices:
        if isinstance(index, tirx.Ramp):
            index = tirx.Ramp(snapshot(index.base, "start"), index.stride, index.lanes)
        else:
            index = snapshot(index, "start")
        indices.append(index)
    return tirx.BufferLoad(region.source, indices)


def is_slice(value) -> bool:
    """Whether a value is a part of a buffer with at least one range."""
    if isinstance(value, TensorRegion):
        return True
    return isinstance(value, TensorLoad) and any(isinstance(i, tirx.Ramp) for i in value.indices)


def macro_argument(value, name: str):
    """What a macro's parameter stands for: a value taken at the call.

    A single element (``C[i, j]``) can also be the start of a tile or the target of an atomic: the parser remembers
    which element the value came from. T.alloc_var variables are passed by reference.
    """
    if isinstance(value, list | tuple):
        return type(value)(macro_argument(v, f"{name}_{i}") for i, v in enumerate(value))
    if is_slice(value):
        return frozen(value)
    if not is_expression(value):
        return value
    value = as_expression(value)
    if not isinstance(value, TensorLoad):
        return snapshot(value, name)
    context, scope = active(), scope_of(value.source)
    if scope == "variable" or (scope == "fragment" and not context.in_parallel):
        return value
    var = snapshot(value, name)
    context.elements[var] = value
    return var


def element_of(value):
    """The element that a macro's parameter was given, or the value itself."""
    context = active()
    if context is not None and isinstance(value, Var) and value in context.elements:
        return context.elements[value]
    return value
