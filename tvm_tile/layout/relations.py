"""Relations between two fragments of one tile: who can read whose registers, and where the element lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .arith import Index, digit_value, scale, total
from .errors import LayoutError
from .fragment import REG, THREAD, Fragment, PlacedDigit

#: In ``dims``: the holder's dimension has extent 1 and is read at index 0.
BROADCAST = -1


class _Part(NamedTuple):
    """``digit_value(index, stride, size) % wrap`` of one fragment, worth ``weight`` in a digit of the other."""

    place: str
    stride: int
    size: int
    weight: int
    wrap: int


def _express(reader: Fragment, holder: Fragment, wanted: PlacedDigit, dims: Sequence[int]) -> list[_Part] | None:
    """A digit of the holder, for the reader's elements, in the reader's own digits; None where they do not nest.

    Exact for logical elements; for the reader's padding the value is meaningless but within the digit's size.
    """
    parts: list[_Part] = []
    dim, end = dims[wanted.dim], wanted.weight * wanted.size
    if dim == BROADCAST:
        return parts
    for digit, low in reader.weighted_digits(dim):
        top = low * digit.size
        lo, hi = max(low, wanted.weight), min(top, end)
        if lo >= hi:
            continue
        if lo % low or lo % wanted.weight or hi % lo or top % lo:
            return None
        stride, weight = digit.stride * (lo // low), lo // wanted.weight
        if top % hi == 0:
            parts.append(_Part(digit.place, stride, hi // lo, weight, 0))
        elif end == holder.padded_shape[wanted.dim]:
            # The reader pads further than the holder: only padding elements reach beyond ``hi``.
            parts.append(_Part(digit.place, stride, top // lo, weight, hi // lo))
        else:
            return None
    return parts


def _provably_contains(holder: Fragment, reader: Fragment, dims: Sequence[int]) -> bool:
    if reader.used_threads > holder.used_threads:
        return False
    for digit in holder.thread_digits:
        parts = _express(reader, holder, digit, dims)
        if parts is None:
            return False
        covered = 1
        for part in parts:
            if part.place != THREAD or part.wrap or part.stride != digit.stride * part.weight:
                return False
            covered *= part.size
        if covered != digit.size:
            return False
    return True


def _aligned(holder: Fragment, reader: Fragment, dims: Sequence[int] | None) -> tuple[int, ...]:
    if dims is None and holder.ndim != reader.ndim:
        raise LayoutError(f"fragments of {holder.ndim} and {reader.ndim} dimensions", "name the dimensions that meet")
    dims = tuple(range(holder.ndim)) if dims is None else tuple(dims)
    known = len(dims) == holder.ndim and all(d == BROADCAST or 0 <= d < reader.ndim for d in dims)
    if not known or tuple(1 if d == BROADCAST else reader.shape[d] for d in dims) != holder.shape:
        raise LayoutError(f"fragments of different shapes: {holder.shape}, read at dimensions {dims} of {reader.shape}")
    return dims


@lru_cache(maxsize=4096)
def _contains(holder: Fragment, reader: Fragment, dims: tuple[int, ...]) -> bool:
    if _provably_contains(holder, reader, dims):
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
            at = [0 if d == BROADCAST else coords[d] for d in dims]
            if any(at[d.dim] // d.weight % d.size != v for d, v in zip(digits, expected, strict=True)):
                return False
    return True


def contains(holder: Fragment, reader: Fragment, dims: Sequence[int] | None = None) -> bool:
    """Whether each thread that visits an element in ``reader`` also owns it in ``holder``.

    If so, a value laid out as ``holder`` is read in a loop laid out as ``reader`` without any communication. Padding is
    ignored. The digits prove the usual cases at once; what they cannot prove is decided element by element.

    Parameters
    ----------
    dims : sequence of int, optional
        For each dimension of the holder the dimension of the reader that indexes it: ``(0,)`` for ``row[i]`` in a loop
        over ``(i, j)``, ``(1, 0)`` for ``a[j, i]``, `BROADCAST` for the constant index 0 of an extent of 1. Default:
        the same dimensions.

    Raises
    ------
    LayoutError
        When the extents do not agree.
    """
    return _contains(holder, reader, _aligned(holder, reader, dims))


def same_owners(a: Fragment, b: Fragment) -> bool:
    """Whether both layouts give each element to the same threads (register order and counts may differ)."""
    return contains(a, b) and contains(b, a)


def register_in(holder: Fragment, reader: Fragment, thread: Index, reg: Index,
                dims: Sequence[int] | None = None) -> Index:
    """Register of ``holder`` with the element that ``reader`` visits in (thread, reg); ``holder`` contains ``reader``.

    In range also for the reader's padding, where the value means nothing. Composed digit by digit, so that a constant
    ``reg`` gives a constant wherever the layouts allow it: arrays indexed by constants stay in registers, others go to
    memory. ``dims`` as in `contains`.
    """
    dims = _aligned(holder, reader, dims)
    terms = []
    for digit in holder.reg_digits:
        parts = _express(reader, holder, digit, dims)
        if parts is None:
            coords = reader.coords(thread, reg)
            terms.append(scale(coords[dims[digit.dim]] // digit.weight % digit.size, digit.stride))
            continue
        for part in parts:
            index, extent = (reg, reader.registers) if part.place == REG else (thread, reader.used_threads)
            value = digit_value(index, part.stride, part.size, extent)
            terms.append(scale(value % part.wrap if part.wrap else value, digit.stride * part.weight))
    return total(terms)
