"""Relations between two fragments of one tile: who can read whose registers, and where the element lies."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from .arith import Index, digit_value, scale, total
from .errors import LayoutError
from .fragment import REG, THREAD, Fragment


class _Part(NamedTuple):
    """``digit_value(index, stride, size)`` of one fragment, worth ``weight`` in a digit of the other."""

    place: str
    stride: int
    size: int
    weight: int


def _express(fragment: Fragment, dim: int, weight: int, size: int) -> list[_Part] | None:
    """``(coords[dim] // weight) % size`` in the fragment's own digits, or None where the radices do not nest."""
    parts = []
    for digit, low in fragment._weighted(dim):
        lo, hi = max(low, weight), min(low * digit.size, weight * size)
        if lo >= hi:
            continue
        if lo % low or lo % weight or hi % lo:
            return None
        parts.append(_Part(digit.place, digit.stride * (lo // low), hi // lo, lo // weight))
    return parts


def _provably_contains(holder: Fragment, reader: Fragment) -> bool:
    if reader.used_threads > holder.used_threads:
        return False
    for digit in holder.thread_digits:
        parts = _express(reader, digit.dim, digit.weight, digit.size)
        if parts is None:
            return False
        covered = 1
        for part in parts:
            if part.place != THREAD or part.stride != digit.stride * part.weight:
                return False
            covered *= part.size
        if covered != digit.size:
            return False
    return True


@lru_cache(maxsize=4096)
def contains(holder: Fragment, reader: Fragment) -> bool:
    """Whether each thread that owns an element in ``reader`` also owns it in ``holder``.

    If so, a value laid out as ``holder`` is read in a loop laid out as ``reader`` without any communication. Padding is
    ignored. The digits prove the usual cases at once; what they cannot prove is decided element by element.
    """
    if holder.shape != reader.shape:
        raise LayoutError(f"fragments of different shapes: {holder.shape} and {reader.shape}")
    if _provably_contains(holder, reader):
        return True
    digits = holder.thread_digits
    for thread in range(reader.used_threads):
        base = reader.thread_part(thread)
        expected = [digit_value(thread, d.stride, d.size, holder.used_threads) for d in digits]
        for reg in range(reader.registers):
            coords = [a + b for a, b in zip(base, reader.reg_part(reg), strict=True)]
            if any(c >= n for c, n in zip(coords, reader.shape, strict=True)):
                continue
            if thread >= holder.used_threads:
                return False
            if any((coords[d.dim] // d.weight) % d.size != v for d, v in zip(digits, expected, strict=True)):
                return False
    return True


def same_owners(a: Fragment, b: Fragment) -> bool:
    """Whether both layouts give each element to the same threads (register order and counts may differ)."""
    return contains(a, b) and contains(b, a)


def register_in(holder: Fragment, reader: Fragment, thread: Index, reg: Index) -> Index:
    """Register of ``holder`` with the element that ``reader`` has in (thread, reg); ``holder`` contains ``reader``.

    Composed digit by digit, so that a constant ``reg`` gives a constant wherever the layouts allow it: arrays indexed
    by constants stay in registers, others go to memory.
    """
    if holder.shape != reader.shape:
        raise LayoutError(f"fragments of different shapes: {holder.shape} and {reader.shape}")
    terms = []
    for digit in holder.reg_digits:
        parts = _express(reader, digit.dim, digit.weight, digit.size)
        if parts is None:
            coords = reader.coords(thread, reg)
            terms.append(scale(coords[digit.dim] // digit.weight % digit.size, digit.stride))
            continue
        for part in parts:
            index, extent = (reg, reader.registers) if part.place == REG else (thread, reader.used_threads)
            terms.append(scale(digit_value(index, part.stride, part.size, extent), digit.stride * part.weight))
    return total(terms)
