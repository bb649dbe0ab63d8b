"""Fragments for tiles that no tensor-core instruction touches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from .arith import ceil_div, product
from .errors import LayoutError
from .fragment import REG, THREAD, Digit, Fragment, Replica
from .shared import SharedLayout


def _thread_choices(extent: int, threads: int) -> list[int]:
    """Thread counts worth giving to an extent: the least for each number of passes, and powers of two."""
    counts = {ceil_div(extent, passes) for passes in range(1, int(extent ** 0.5) + 2)}
    counts |= set(range(1, int(extent ** 0.5) + 2))
    power = 1
    while power < 2 * extent:
        counts.add(power)
        power *= 2
    return sorted((c for c in counts if c <= threads), reverse=True)


@lru_cache(maxsize=65536)
def _split(extents: tuple[int, ...], threads: int) -> tuple[int, int, int, tuple[int, ...]]:
    """(passes a thread, odd counts, padded cells, threads a dim) that spread cells best.

    Threads go to the last dim first. Fewest passes decide; then thread counts that are powers of two, so that
    reductions are shuffles; then least padding; then most threads along the last dimension (coalescing).
    """
    if not extents:
        return 1, 0, 1, ()
    best: tuple | None = None
    for count in _thread_choices(extents[-1], threads):
        here = ceil_div(extents[-1], count)
        rest_passes, rest_odd, rest_cells, rest = _split(extents[:-1], threads // count)
        odd = rest_odd + (count & (count - 1) != 0)
        key = (here * rest_passes, odd, here * count * rest_cells, -count)
        if best is None or key < best[0]:
            best = (key, (*rest, count))
    assert best is not None  # one thread is always a choice
    return *best[0][:3], best[1]


@lru_cache(maxsize=4096)
def _default(shape: tuple[int, ...], threads: int, dtype_bits: int, max_vector_bits: int) -> Fragment:
    vector = 1
    while (shape[-1] % (2 * vector) == 0 and 2 * vector * dtype_bits <= max_vector_bits
           and product(shape) // (2 * vector) >= threads):
        vector *= 2
    cells = (*shape[:-1], shape[-1] // vector)
    counts = _split(cells, threads)[-1]
    digits: list[tuple[Digit, ...]] = []
    reg_stride, thread_stride = vector, 1
    for dim in reversed(range(len(shape))):
        passes = ceil_div(cells[dim], counts[dim])
        placed = [Digit(passes, REG, reg_stride), Digit(counts[dim], THREAD, thread_stride)]
        if dim == len(shape) - 1:
            placed.append(Digit(vector, REG, 1))
        digits.append(tuple(placed))
        reg_stride *= passes
        thread_stride *= counts[dim]
    return Fragment(shape, tuple(reversed(digits)), (), threads)


def _checked(shape: Sequence[int], threads: int) -> tuple[int, ...]:
    shape = tuple(int(n) for n in shape)
    if any(n < 1 for n in shape):
        raise LayoutError(f"every extent of {shape} has to be at least 1")
    if threads < 1:
        raise LayoutError(f"a fragment needs at least 1 thread, got {threads}")
    return shape


def default_fragment(shape: Sequence[int], threads: int, dtype_bits: int, max_vector_bits: int = 128) -> Fragment:
    """Coalesced distribution: vectors along the last dimension, neighbouring threads next to them, the rest repeated.

    Parameters
    ----------
    shape : sequence of int
        Any shape, odd extents included; what the threads cannot cover evenly becomes padding.
    threads : int
        Threads of the CTA, any number. Fewer are used where that needs no more registers.
    dtype_bits, max_vector_bits : int
        Width of an element and of the widest access. Vectors are shortened before threads are left idle.
    """
    shape = _checked(shape, threads)
    return _default(shape, threads, dtype_bits, max_vector_bits) if shape else replicated_fragment(shape, threads)


def copy_fragment(layout: SharedLayout, threads: int, max_vector_bits: int = 128) -> Fragment:
    """Distribution of a copy to or from a shared tile: as `default_fragment`, but one column block after the other.

    Neighbouring threads stay inside a column block, which the default does not where the swizzle is narrower than a
    row: there, equal rows of two blocks lie in the same banks.
    """
    shape, bits = layout.shape, layout.dtype_bits
    if layout.blocks == 1:
        return default_fragment(shape, threads, bits, max_vector_bits)
    apart = default_fragment((*shape[:-2], layout.blocks, layout.rows, layout.block_columns), threads, bits,
                             max_vector_bits)
    if apart.padded_shape[-1] != layout.block_columns:
        return default_fragment(shape, threads, bits, max_vector_bits)
    *lead, blocks, rows, columns = apart.digits
    return Fragment(shape, (*lead, rows, (*blocks, *columns)), apart.replicate, threads)


def replicated_fragment(shape: Sequence[int], threads: int) -> Fragment:
    """Every thread holds the whole tile in registers, row-major: for scalars and very small tiles."""
    shape = _checked(shape, threads)
    digits: list[tuple[Digit, ...]] = []
    stride = 1
    for extent in reversed(shape):
        digits.append((Digit(extent, REG, stride),))
        stride *= extent
    return Fragment(shape, tuple(reversed(digits)), (Replica(threads, 1),), threads)
