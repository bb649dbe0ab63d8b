"""Integer expressions at many points at once, with NumPy: for the search for counterexamples in :mod:`.races`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import tirx
from tvm.ir import Var

__all__ = ["Opaque", "evaluate"]


class Opaque(Exception):
    """An expression whose value is not known before the kernel runs (it reads memory or calls something)."""


_BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
    "And": np.logical_and,
    "Or": np.logical_or,
}
_CALLS = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}


def evaluate(expr, values: Mapping[Var, np.ndarray]) -> np.ndarray:
    """Values of an integer or bool expression.

    Parameters
    ----------
    expr : expression
        What to evaluate.
    values : mapping
        Variable -> int64 array; all arrays broadcast against each other.

    Raises
    ------
    Opaque
        When a part is a memory read, a call with unknown meaning, or a variable without values.
    """
    kind = type(expr).__name__
    if isinstance(expr, bool | int):
        return np.asarray(expr)
    if isinstance(expr, tirx.IntImm):
        return np.asarray(bool(expr.value) if str(expr.ty.dtype) == "bool" else int(expr.value))
    if isinstance(expr, Var):
        if expr not in values:
            raise Opaque(str(expr))
        return values[expr]
    if kind in _BINARY:
        with np.errstate(divide="ignore"):
            return _BINARY[kind](evaluate(expr.a, values), evaluate(expr.b, values))
    if kind in ("Div", "Mod"):  # truncating, as in C
        a, b = np.broadcast_arrays(evaluate(expr.a, values), evaluate(expr.b, values))
        if np.any(b == 0):
            raise Opaque(str(expr))
        quotient = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        return quotient if kind == "Div" else a - quotient * b
    if kind == "Not":
        return np.logical_not(evaluate(expr.a, values))
    if kind == "Cast" and str(expr.ty.dtype).startswith(("int", "uint")):
        return evaluate(expr.value, values).astype(np.int64)
    if kind == "Select":
        parts = (expr.condition, expr.true_value, expr.false_value)
        return np.where(*[evaluate(part, values) for part in parts])
    if isinstance(expr, tvm.ir.Call):
        name = getattr(expr.op, "name", "").split(".")[-1]
        if name == "if_then_else":
            return np.where(*[evaluate(part, values) for part in expr.args])
        if name in _CALLS:
            return _CALLS[name](*[evaluate(part, values) for part in expr.args])
    raise Opaque(str(expr))
