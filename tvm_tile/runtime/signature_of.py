"""Reads a :class:`Signature` off a PrimFunc."""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx

from ..errors import TileTypeError
from .signature import Expression, Parameter, Signature

__all__ = ["assumptions_of", "expression_of", "signature_of"]

_NODES = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "FloorDiv": "//",
    "FloorMod": "%",
    "Div": "truncdiv",
    "Mod": "truncmod",
    "Min": "min",
    "Max": "max",
    "EQ": "==",
    "NE": "!=",
    "LT": "<",
    "LE": "<=",
    "GT": ">",
    "GE": ">=",
    "And": "and",
    "Or": "or",
}


def expression_of(expr) -> Expression:
    """A PrimExpr over parameters and symbolic sizes as an expression tree.

    Raises
    ------
    TileTypeError
        For an operation that cannot be evaluated at the call.
    """
    if isinstance(expr, (bool, int, float, str)):
        return expr
    if isinstance(expr, tirx.IntImm):
        return bool(expr.value) if str(expr.ty.dtype) == "bool" else int(expr.value)
    if isinstance(expr, tirx.FloatImm):
        return float(expr.value)
    if isinstance(expr, tirx.Var):
        return str(expr.name)
    kind = type(expr).__name__
    if kind in _NODES:
        return [_NODES[kind], expression_of(expr.a), expression_of(expr.b)]
    if kind == "Not":
        return ["not", expression_of(expr.a)]
    if kind == "Cast":
        return expression_of(expr.value)
    if kind == "Select":
        return ["select", *map(expression_of, (expr.condition, expr.true_value, expr.false_value))]
    if kind == "Call" and str(getattr(expr.op, "name", "")) in ("tirx.shift_left", "tirx.shift_right"):
        power = ["*" if str(expr.op.name).endswith("left") else "//", expression_of(expr.args[0])]
        amount = expression_of(expr.args[1])
        if isinstance(amount, int):
            return [*power, 2**amount]
    raise TileTypeError(
        f"{expr} cannot be evaluated at the call",
        advice="sizes and T.assume conditions may use + - * // % min max, comparisons and and/or/not",
    )


def assumptions_of(func: tirx.PrimFunc) -> list[tirx.AssertStmt]:
    """The checks in front of a function's kernels, which ``T.assume`` writes."""
    found: list[tirx.AssertStmt] = []
    body = func.body
    if isinstance(body, s_tir.SBlockRealize):
        body = body.block.body
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if not isinstance(stmt, tirx.AssertStmt):
            break
        found.append(stmt)
    return found


def _written_buffers(func: tirx.PrimFunc) -> set:
    """Parameters that the function may write: stored to, or whose address is taken."""
    written: set = set()
    params = {p for p in func.params if tirx.is_buffer_var(p)}

    def on_store(node):
        if node.buffer in params:
            written.add(node.buffer)

    def on_call(node):
        # A pointer that leaves as a call's argument (atomics, intrinsics) may be written through.
        for arg in node.args:
            if isinstance(arg, ir.TensorLoad) and _takes_address(node):
                if arg.source in params:
                    written.add(arg.source)
            elif isinstance(arg, tirx.Var) and arg in params:
                written.add(arg)

    tvm_ffi.structural_walk(func.body, [(tirx.BufferStore, on_store), (ir.Call, on_call)])
    return written


def _takes_address(call) -> bool:
    return str(getattr(call.op, "name", "")) in ("tirx.address_of", "tirx.ptr_byte_offset")


def _strides(buffer) -> list[Expression] | None:
    strides = [expression_of(s) for s in buffer.ty.strides]
    if not strides:
        return None
    compact, run = [], 1
    for extent in reversed([expression_of(s) for s in buffer.ty.shape]):
        compact.insert(0, run)
        run = run * extent if isinstance(run, int) and isinstance(extent, int) else None
    return None if strides == compact else strides


def signature_of(func: tirx.PrimFunc, name: str, target: tvm.target.Target, align: int | None = None) -> Signature:
    """The signature of a kernel.

    Parameters
    ----------
    func : PrimFunc
        Tile IR or plain TensorIR; its buffers' names are the parameters' names.
    name : str
        Name in the library.
    target : Target
        Decides the device.
    align : int or None
        Alignment in bytes that the lowering relies on; None for the element's own.
    """
    device = "cuda" if target.kind.name == "cuda" else "cpu"
    written = _written_buffers(func)
    parameters = []
    for param in func.params:
        if not tirx.is_buffer_var(param):
            parameters.append(Parameter(str(param.name), str(param.ty.dtype)))
            continue
        dtype = str(param.ty.dtype)
        bytes_ = max(1, tvm_ffi.dtype(dtype).itemsize)
        parameters.append(
            Parameter(
                str(param.name),
                dtype,
                [expression_of(s) for s in param.ty.shape],
                _strides(param),
                param in written,
                bytes_ if align is None else max(align, bytes_),
            )
        )
    conditions = [expression_of(node.condition) for node in assumptions_of(func)]
    return Signature(name, device, parameters, conditions)
