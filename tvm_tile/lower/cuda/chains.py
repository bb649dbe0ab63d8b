"""Partial results of a reduction: registers of a thread combined in a few independent chains.

One chain of dependent additions would take its latency times its length; a few independent ones hide it. Each chain
begins with its first element instead of the identity, which saves an operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ...layout import REG
from ...layout.arith import product
from .build import const
from .loops import ElementLoop
from .space import UNROLL_LIMIT, expr

__all__ = ["Chains", "chains_of"]

#: Independent chains for each result.
CHAINS = 4


@dataclass(frozen=True)
class Chains:
    """How the registers of a thread that make one result are combined.

    Attributes
    ----------
    digits : list of (int, int)
        (size, stride) of register digits along the reduced dimension whose values are combined apart.
    begins : list of (int, int, int) or None
        (size, stride, chains) of all register digits that are summed up; below ``chains`` a chain begins. None where
        not every register of every thread is visited, so that a result begins with the identity.
    """

    digits: list[tuple[int, int]]
    begins: list[tuple[int, int, int]] | None

    @property
    def width(self) -> int:
        """Number of chains for each result."""
        return product(size for size, _ in self.digits)

    def number(self, reg):
        """Number of the chain that a register of the source belongs to."""
        number = const(0)
        for size, stride in self.digits:
            number = number * size + tirx.floormod(tirx.floordiv(reg, stride) if stride > 1 else reg, size)
        return number

    def begun(self, reg):
        """Whether a register of the source is not the first of its chain, None where all are."""
        later = [
            tirx.floormod(tirx.floordiv(expr(reg), stride), size) >= chains
            for size, stride, chains in self.begins
            if chains < size
        ]
        return functools.reduce(tirx.Or, later) if later else None

    def joined(self, terms: list, combine: Callable[[object, object], object]):
        """The chains of one result combined, pairwise."""
        while len(terms) > 1:
            pairs = [combine(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
            terms = pairs + (terms[-1:] if len(terms) % 2 else [])
        return terms[0]


def chains_of(space: ElementLoop, dim: int, registers: int, vote: bool, tx) -> Chains:
    """The chains of a reduction.

    Parameters
    ----------
    space : ElementLoop
        The elements that are reduced.
    dim : int
        The reduced dimension of their layout.
    registers : int
        Results of a thread.
    vote : bool
        Whether all elements make one truth value.
    tx : Var
        Number of the thread.
    """
    layout = space.layout
    if layout is None or vote:
        return Chains([], None)
    digits: list[tuple[int, int]] = []
    total = 1
    if layout.registers // registers >= 2 * CHAINS:
        for digit in sorted((d for d in layout.digits[dim] if d.place == REG), key=lambda d: d.stride):
            size = min(digit.size, CHAINS // total)
            while digit.size % size:
                size -= 1
            if size > 1:
                digits.append((size, digit.stride))
                total *= size
    if space.window is not None or space.chunks or layout.bounds() or layout.active(tx) is not True:
        return Chains(digits, None)
    widths = {stride: size for size, stride in digits}
    begins = [(d.size, d.stride, widths.get(d.stride, 1)) for d in layout.digits[dim] if d.place == REG]
    whole = layout.registers == registers * product(size for size, _, _ in begins)
    return Chains(digits, begins if whole and layout.registers <= UNROLL_LIMIT else None)
