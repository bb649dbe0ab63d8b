"""Mixed-radix arithmetic shared by all index functions.

Every function works on Python ints, numpy integer arrays and TVM int32 PrimExprs alike: only ``+ * // %`` are used,
nothing branches on an index, and operations that cannot change the value are left out so that generated code is lean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Index = Any  # int | numpy.ndarray | tvm PrimExpr: named for documentation


def digit_value(index: Index, stride: int, size: int, extent: int) -> Index:
    """Value of the digit ``(index // stride) % size`` of an index known to lie in ``[0, extent)``."""
    if size == 1:
        return 0
    value = index if stride == 1 else index // stride
    return value if stride * size >= extent else value % size


def scale(value: Index, factor: int) -> Index:
    """``value * factor`` without a multiplication by one."""
    return value if factor == 1 else value * factor


def total(terms: Iterable[Index]) -> Index:
    """Sum of the terms; literal zeros are dropped, and no term at all gives 0."""
    result: Index = 0
    for term in terms:
        if isinstance(term, int) and term == 0:
            continue
        result = term if isinstance(result, int) and result == 0 else result + term
    return result


def product(values: Iterable[int]) -> int:
    """Product of the values, 1 for none."""
    result = 1
    for value in values:
        result *= value
    return result


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b


def power_of_two_part(n: int) -> int:
    """Largest power of two that divides ``n``."""
    return n & -n


def unravel(index: Index, sizes: Sequence[int]) -> list[Index]:
    """Digits of ``index``, slowest first, for the given digit sizes."""
    out: list[Index] = []
    extent, stride = product(sizes), product(sizes)
    for size in sizes:
        stride //= size
        out.append(digit_value(index, stride, size, extent))
    return out
