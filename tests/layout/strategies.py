"""Random fragments, and slow but obvious enumerations of them, for the property tests."""

from __future__ import annotations

import itertools
import random

from tvm_tile.layout import REG, THREAD, Digit, Fragment, Replica


def random_fragment(rng: random.Random, limit: int = 1024, ndim: int | None = None) -> Fragment:
    """A well-formed fragment with random digits, replication, padding and surplus threads."""
    ndim = ndim or rng.randint(1, 3)
    budget = limit
    slots = []  # (dim or None for replication, position, size, place)
    for dim in range(ndim):
        for position in range(rng.randint(0, 3)):
            size = rng.choice([2, 2, 2, 3, 4, 5, 8])
            if size > budget:
                continue
            budget //= size
            slots.append((dim, position, size, rng.choice([THREAD, REG])))
    if rng.random() < 0.5 and budget >= 3:
        slots.append((None, 0, rng.choice([2, 3]), THREAD))
    rng.shuffle(slots)
    extent = {THREAD: 1, REG: 1}
    placed: dict[int | None, list] = {d: [] for d in (*range(ndim), None)}
    for dim, position, size, place in slots:
        placed[dim].append((position, Digit(size, place, extent[place])))
        extent[place] *= size
    digits = tuple(tuple(d for _, d in sorted(placed[dim], key=lambda p: p[0])) for dim in range(ndim))
    padded = Fragment(tuple(_size(d) for d in digits), digits,
                      tuple(Replica(d.size, d.stride) for _, d in placed[None]),
                      extent[THREAD] + rng.choice([0, 0, 1, 7]))
    return padded.crop([rng.randint(max(1, n - 2), n) for n in padded.shape]) if rng.random() < 0.4 else padded


def _size(digits) -> int:
    total = 1
    for d in digits:
        total *= d.size
    return total


def owners(fragment: Fragment) -> dict[tuple[int, ...], set[tuple[int, int]]]:
    """Element -> its (thread, register) pairs, by visiting each register of each thread (padding included)."""
    found: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for thread, reg in itertools.product(range(fragment.used_threads), range(fragment.registers)):
        found.setdefault(tuple(fragment.coords(thread, reg)), set()).add((thread, reg))
    return found


def inside(coords, shape) -> bool:
    """Whether coordinates are logical ones."""
    return all(0 <= c < n for c, n in zip(coords, shape, strict=True))
