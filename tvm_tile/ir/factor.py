"""Differences of products with a common constant factor."""

from __future__ import annotations

import math

from tvm import tirx

from .visit import rewrite

__all__ = ["factored"]


def factored(stmt):
    """A statement with ``(a - b) * c`` in place of ``a * c - b * c``, for a float constant ``c``.

    Where ``a`` and ``b`` are equal the first is exactly zero. The second is not where the compiler contracts it to one
    rounded and one unrounded product, and for large ``a`` it is infinite.

    Parameters
    ----------
    stmt : Stmt or expression
        What to rewrite; it is returned as it is where nothing matches.
    """

    def on_sub(sub, mutator):
        left, right = mutator.mutate(sub.a), mutator.mutate(sub.b)
        for one, number in _products(left):
            for other, same in _products(right):
                if float(number.value) == float(same.value):
                    return (one - other) * number
        return left - right

    return rewrite(stmt, [(tirx.Sub, on_sub)])


def _products(expression):
    """(other factor, constant) of a product with a finite float constant other than zero."""
    if isinstance(expression, tirx.Mul):
        for one, number in ((expression.a, expression.b), (expression.b, expression.a)):
            if isinstance(number, tirx.FloatImm) and float(number.value) != 0 and math.isfinite(float(number.value)):
                yield one, number
