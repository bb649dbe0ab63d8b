"""`WarpPartition`: how the warps of a CTA split the ``M x N`` tile of a matrix product.

Policies decide only the split; that the split is possible is checked in one place. New ones are added with
`register_policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .arith import ceil_div, round_up
from .errors import LayoutError
from .instructions import Instruction

PolicyFunction = Callable[[int, int, int, Instruction], "tuple[int, int]"]


@dataclass(frozen=True)
class WarpPartition:
    """A split of ``M x N`` over ``m_warps x n_warps`` warps, each with a contiguous sub-tile.

    Warp w (of the tile's warps) has row block ``w // n_warps`` and column block ``w % n_warps``; with wgmma the same
    holds for warpgroups, whose four warps lie along M. `groups` are what executes an instruction: warps, or warpgroups.

    With ``k_groups`` 2 pairs of neighbouring warps share a sub-tile: warp w computes the sub-tile of ``w // 2`` for one
    half of K, and keeps of the sums of both the upper (``w % 2 == 0``) or the lower eight rows of each instruction.

    Attributes
    ----------
    M, N : int
        The logical tile; with padding, groups cover `padded_m` x `padded_n`.
    m_warps, n_warps : int
        Warps along M and N.
    m_groups, n_groups : int
        Instruction groups along M and N.
    m_repeat, n_repeat : int
        Instructions of one group along M and N.
    instruction_m, instruction_n : int
        Extents of one instruction.
    k_groups : int
        Parts of K that different warps multiply, 1 or 2.
    """

    policy: str
    M: int
    N: int
    m_warps: int
    n_warps: int
    m_groups: int
    n_groups: int
    m_repeat: int
    n_repeat: int
    instruction_m: int
    instruction_n: int
    k_groups: int = 1

    @property
    def warps(self) -> int:
        """Warps that take part."""
        return self.m_warps * self.n_warps * self.k_groups

    @property
    def group_m(self) -> int:
        """Rows of one group's sub-tile, padding included."""
        return self.m_repeat * self.instruction_m

    @property
    def group_n(self) -> int:
        """Columns of one group's sub-tile, padding included."""
        return self.n_repeat * self.instruction_n

    @property
    def padded_m(self) -> int:
        """Rows that the groups cover."""
        return self.m_groups * self.group_m

    @property
    def padded_n(self) -> int:
        """Columns that the groups cover."""
        return self.n_groups * self.group_n

    def operand_bytes(self, k: int, a_bits: int, b_bits: int) -> int:
        """Bytes of A and B that all groups together read for a product of depth ``k``."""
        return (self.padded_m * self.n_groups * a_bits + self.padded_n * self.m_groups * b_bits) * k // 8

    def to_json(self) -> list:
        """Flat list of the policy's name and ints, for annotations."""
        return [self.policy, self.M, self.N, self.m_warps, self.n_warps, self.m_groups, self.n_groups, self.m_repeat,
                self.n_repeat, self.instruction_m, self.instruction_n, *([self.k_groups] if self.k_groups > 1 else [])]

    @staticmethod
    def from_json(data) -> WarpPartition:
        """Inverse of `to_json`."""
        return WarpPartition(str(data[0]), *(int(v) for v in data[1:]))


def _splits(groups: int) -> list[tuple[int, int]]:
    return [(m, groups // m) for m in range(1, groups + 1) if groups % m == 0]


def _fits(m: int, n: int, m_groups: int, n_groups: int, instruction: Instruction) -> bool:
    return m % (m_groups * instruction.m) == 0 and n % (n_groups * instruction.valid_n[0]) == 0


def _square(m: int, n: int, warps: int, instruction: Instruction) -> tuple[int, int]:
    """Nearest to square sub-tiles of the real M x N, which also read the fewest operand bytes; ties keep rows whole.

    Splits that tie (sub-tiles a x b and b x a) read equally many bytes, since A and B have elements of one width.
    """
    groups = warps // instruction.warps
    candidates = [s for s in _splits(groups) if _fits(m, n, *s, instruction)]
    if not candidates:
        raise _impossible("Square", m, n, warps, instruction)

    def cost(split: tuple[int, int]) -> tuple[float, int]:
        m_groups, n_groups = split
        aspect = abs(math.log((m / m_groups) / (n / n_groups)))
        return round(aspect, 9), n_groups

    m_groups, n_groups = min(candidates, key=cost)
    return m_groups * instruction.warps, n_groups


def _full_row(m: int, n: int, warps: int, instruction: Instruction) -> tuple[int, int]:
    """All groups along M: each row of the tile belongs to one group."""
    return warps, 1


def _full_col(m: int, n: int, warps: int, instruction: Instruction) -> tuple[int, int]:
    """All groups along N."""
    return instruction.warps, warps // instruction.warps


def _tile_64x64(m: int, n: int, warps: int, instruction: Instruction) -> tuple[int, int]:
    """A 64 x 64 sub-tile for each group."""
    if m % 64 or n % 64 or (m // 64) * (n // 64) * instruction.warps != warps:
        unit = "warp" if instruction.warps == 1 else "warpgroup"
        need = ceil_div(m, 64) * ceil_div(n, 64) * instruction.warps
        raise LayoutError(f"policy Tile64x64 cannot give 64x64 of a {m}x{n} tile to each {unit} of {warps} warps",
                          f"make M and N multiples of 64 and use {need} warps ({need * 32} threads)")
    return m // 64 * instruction.warps, n // 64


_POLICIES: dict[str, PolicyFunction] = {
    "Square": _square, "FullRow": _full_row, "FullCol": _full_col, "Tile64x64": _tile_64x64,
}
_BUILTIN = frozenset(_POLICIES)


def register_policy(name: str, fn: PolicyFunction) -> None:
    """Add a policy: ``fn(M, N, warps, instruction) -> (m_warps, n_warps)``, whose result is checked at each use.

    With wgmma ``m_warps`` counts warps too: it is a multiple of 4. Registering a user's name again replaces it; the
    built-in policies cannot be replaced.
    """
    if not isinstance(name, str) or not name:
        raise LayoutError(f"a policy needs a name, got {name!r}")
    if name in _BUILTIN:
        raise LayoutError(f"policy {name!r} is built in and cannot be replaced", "choose another name")
    if not callable(fn):
        raise LayoutError(f"policy {name!r} has to be a function (M, N, warps, instruction) -> (m_warps, n_warps)")
    _POLICIES[name] = fn


def unregister_policy(name: str) -> None:
    """Remove a user's policy."""
    if name in _BUILTIN or name not in _POLICIES:
        raise LayoutError(f"no user policy is named {name!r}")
    del _POLICIES[name]


def policy_names() -> tuple[str, ...]:
    """Names of all policies, built-in ones first."""
    return tuple(_POLICIES)


def partition(
    policy: str, M: int, N: int, warps: int, instruction: Instruction, pad: bool = False, most_n: int | None = None
) -> WarpPartition:
    """Split an ``M x N`` tile over ``warps`` warps.

    Parameters
    ----------
    policy : str
        Square, FullRow, FullCol, Tile64x64, or a registered name.
    instruction : Instruction
        Fixes the granularity: m x 8 a warp (mma.sync), 64 x 8 a warpgroup of 4 warps (wgmma).
    pad : bool
        Round M and N up to what the instruction needs (for example 8 query heads on m = 16) instead of refusing. The
        policy then sees the padded extents.
    most_n : int, optional
        Largest n of an instruction (its accumulator has to fit the registers that a thread is launched with).

    Raises
    ------
    LayoutError
        When the policy's split does not fit, with the values and what to change.
    """
    if policy not in _POLICIES:
        raise LayoutError(f"unknown warp policy {policy!r}", f"known are {', '.join(_POLICIES)}")
    if min(M, N, warps) < 1:
        raise LayoutError(f"M, N and the number of warps have to be positive, got {M}, {N}, {warps}",
                          "launch whole warps of 32 threads")
    unit = instruction.warps
    if warps % unit:
        raise LayoutError(f"{warps} warps do not form warpgroups of {unit}",
                          f"use a multiple of {unit * 32} threads for {instruction.family}")
    n_step = instruction.valid_n[0]
    m, n = (round_up(M, instruction.m), round_up(N, n_step)) if pad else (M, N)
    if m % instruction.m:
        raise LayoutError(f"M = {M} is no multiple of {instruction.m}, the m of {instruction.family}",
                          f"use M = {round_up(M, instruction.m)} (pad the tile's rows)")
    if n % n_step:
        raise LayoutError(f"N = {N} is no multiple of {n_step}, the smallest n of {instruction.family}",
                          f"use N = {round_up(N, n_step)}")
    if pad:
        m, n = _padded_extents(policy, m, n, warps, instruction)
    split = _POLICIES[policy](m, n, warps, instruction)
    m_warps, n_warps = _checked_split(policy, split, warps, unit)
    m_groups, n_groups = m_warps // unit, n_warps
    if not _fits(m, n, m_groups, n_groups, instruction):
        raise _impossible(policy, m, n, warps, instruction, (m_groups, n_groups))
    instruction_n = instruction.largest_n(n // n_groups, most_n)
    return WarpPartition(policy, M, N, m_warps, n_warps, m_groups, n_groups, m // m_groups // instruction.m,
                         n // n_groups // instruction_n, instruction.m, instruction_n)


def halves_of_k(part: WarpPartition, instruction: Instruction) -> WarpPartition | None:
    """The split of a tile over half as many sub-tiles, each for two warps with one half of K, that reads least.

    Larger sub-tiles read fewer operand bytes; ties keep rows whole.

    Parameters
    ----------
    part : WarpPartition
        A split of the same tile along M and N alone.
    instruction : Instruction
        An instruction of single warps.

    Returns
    -------
    WarpPartition or None
        None where no such split fits the tile.
    """
    if instruction.warps != 1 or part.warps % 2 or (part.padded_m, part.padded_n) != (part.M, part.N):
        return None
    bits = instruction.operand_bits
    options = []
    for m_groups, n_groups in _splits(part.warps // 2):
        if _fits(part.M, part.N, m_groups, n_groups, instruction):
            options.append(WarpPartition(part.policy, part.M, part.N, m_groups, n_groups, m_groups, n_groups,
                                         part.M // m_groups // instruction.m, part.N // n_groups // instruction.n,
                                         instruction.m, instruction.n, 2))
    return min(options, key=lambda p: (p.operand_bytes(instruction.k, bits, bits), p.n_groups), default=None)


def _padded_extents(policy: str, m: int, n: int, warps: int, instruction: Instruction) -> tuple[int, int]:
    """Least padded extents on which a built-in policy fits (users' policies see the rounded ones)."""
    groups, step = warps // instruction.warps, instruction.valid_n[0]
    if policy == "FullRow":
        return round_up(m, groups * instruction.m), n
    if policy == "FullCol":
        return m, round_up(n, groups * step)
    if policy == "Square":
        options = [(round_up(m, gm * instruction.m), round_up(n, gn * step)) for gm, gn in _splits(groups)]
        return min(options, key=lambda e: e[0] * e[1])
    if policy == "Tile64x64":
        return round_up(m, 64), round_up(n, 64)
    return m, n


def _checked_split(policy: str, split: object, warps: int, unit: int) -> tuple[int, int]:
    ok = (isinstance(split, (tuple, list)) and len(split) == 2
          and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in split))
    if not ok:
        raise LayoutError(f"policy {policy!r} returned {split!r}", "return two positive ints (m_warps, n_warps)")
    m_warps, n_warps = split  # type: ignore[misc]
    if m_warps * n_warps != warps:
        raise LayoutError(f"policy {policy!r} returned {m_warps} x {n_warps} warps for {warps} warps",
                          f"m_warps * n_warps has to be {warps}")
    if m_warps % unit:
        raise LayoutError(f"policy {policy!r} returned m_warps = {m_warps}, but the {unit} warps of a warpgroup "
                          "lie along M",
                          f"m_warps has to be a multiple of {unit}")
    return m_warps, n_warps


def _impossible(policy: str, m: int, n: int, warps: int, instruction: Instruction,
                split: tuple[int, int] | None = None) -> LayoutError:
    groups, step = warps // instruction.warps, instruction.valid_n[0]
    unit = "warps" if instruction.warps == 1 else "warpgroups"
    possible = [f"{gm} x {gn}" for gm, gn in _splits(groups) if _fits(m, n, gm, gn, instruction)]
    if split is None:
        message = f"policy {policy}: no split of {groups} {unit} fits a {m}x{n} tile with {instruction.family}"
    else:
        gm, gn = split
        message = (f"policy {policy}: {gm} x {gn} {unit} do not fit a {m}x{n} tile with {instruction.family}: M has to "
                   f"be a multiple of {gm * instruction.m} and N of {gn * step}")
    fewer = [w for w in range(groups - 1, 0, -1) if any(_fits(m, n, *s, instruction) for s in _splits(w))]
    if possible:
        advice = f"splits that fit: {', '.join(possible)}"
    elif fewer:
        advice = f"use {fewer[0] * instruction.warps * 32} threads or a larger tile"
    else:
        advice = "use a larger tile"
    return LayoutError(message, advice)
