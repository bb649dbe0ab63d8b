"""Linear forms of index expressions and conditions in a tile operation's axes."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import Expr, Var

from ...ir.visit import mentions
from .builder import const_int


def affine(expr, var: Var) -> tuple[object, object] | None:
    """``(coefficient, rest)`` with ``expr == coefficient * var + rest``; None where it is not linear in ``var``."""
    if isinstance(expr, int) or isinstance(expr, tirx.IntImm):
        return 0, expr
    if isinstance(expr, Var):
        return (1, tirx.const(0, str(expr.ty.dtype))) if expr.same_as(var) else (0, expr)
    if isinstance(expr, tirx.Add | tirx.Sub):
        left, right = affine(expr.a, var), affine(expr.b, var)
        if left is None or right is None:
            return None
        if isinstance(expr, tirx.Add):
            return _add(left[0], right[0]), left[1] + right[1]
        return _add(left[0], _scale(right[0], -1)), left[1] - right[1]
    if isinstance(expr, tirx.Mul):
        for x, y in ((expr.a, expr.b), (expr.b, expr.a)):
            if not mentions(x, var):
                inner = affine(y, var)
                return None if inner is None else (_scale(inner[0], x), x * inner[1])
        return None
    if isinstance(expr, tirx.Cast) and _is_index(expr) and _is_index(expr.value):
        inner = affine(expr.value, var)
        if inner is None:
            return None
        return _cast(inner[0], str(expr.ty.dtype)), tirx.Cast(str(expr.ty.dtype), inner[1])
    return None if mentions(expr, var) else (0, expr)


def _is_index(expr) -> bool:
    return str(expr.ty.dtype) in ("int32", "int64")


def _add(a, b):
    if const_int(a) is not None and const_int(b) is not None:
        return const_int(a) + const_int(b)
    return b if const_int(a) == 0 else a if const_int(b) == 0 else a + b


def _scale(coefficient, factor):
    c, f = const_int(coefficient), const_int(factor)
    if c is not None and f is not None:
        return c * f
    if c == 0:
        return 0
    return factor if c == 1 else coefficient * factor


def _cast(coefficient, dtype: str):
    return coefficient if const_int(coefficient) is not None else tirx.Cast(dtype, coefficient)


def extremes(expr, axes: list[tuple[Var, object]]) -> tuple[Expr, Expr] | None:
    """Smallest and largest value over the axes' ranges; None unless linear with constant coefficients."""
    low = high = expr
    for var, extent in axes:
        parts_low, parts_high = affine(low, var), affine(high, var)
        if parts_low is None or parts_high is None:
            return None
        coefficient = const_int(parts_low[0])
        if coefficient is None or const_int(parts_high[0]) != coefficient:
            return None
        low, high = parts_low[1], parts_high[1]
        if coefficient > 0:
            high = high + coefficient * (extent - 1)
        elif coefficient < 0:
            low = low + coefficient * (extent - 1)
    return low, high


def always(condition, axes: list[tuple[Var, object]]) -> Expr | None:
    """A condition free of the axes under which a comparison holds on the whole tile; None where there is none.

    ``bx * 64 + i < m`` over i in [0, 64) becomes ``bx * 64 + 63 < m``.
    """
    if not isinstance(condition, tirx.LT | tirx.LE | tirx.GT | tirx.GE) or not _is_index(condition.a):
        return None
    difference = extremes(condition.a - condition.b, axes)
    if difference is None:
        return None
    zero = tirx.const(0, str(condition.a.ty.dtype))
    if isinstance(condition, tirx.LT | tirx.LE):
        return type(condition)(difference[1], zero)
    return type(condition)(difference[0], zero)


def conjuncts(condition) -> list[Expr]:
    """The terms of a conjunction."""
    if isinstance(condition, tirx.And):
        return conjuncts(condition.a) + conjuncts(condition.b)
    return [condition]


def same(a, b) -> bool:
    """Whether two expressions are the same tree."""
    return bool(tvm_ffi.structural_equal(a, b))
