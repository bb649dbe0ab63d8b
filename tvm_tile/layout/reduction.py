"""What a reduction over one dimension of a fragment has to combine: registers, lanes of a warp, and warps."""

from __future__ import annotations

from dataclasses import dataclass

from .arith import Index, digit_value, power_of_two_part, product, scale, total
from .errors import LayoutError
from .fragment import THREAD, Fragment, Replica

WARP_SIZE = 32


@dataclass(frozen=True)
class ReducePlan:
    """Steps of a reduction, in order: registers, then lanes, then through shared memory.

    Attributes
    ----------
    source, result : Fragment
        Layouts before and after (the result is replicated over the reduced threads).
    dim : int
        The reduced dimension of the source.
    registers : tuple of tuple of int
        For each register of the result, the source registers that combine into it.
    lane_masks : tuple of int
        Butterfly steps inside a warp: combine with the lane ``lane ^ mask``, in any order.
    shared_digits : tuple of Replica
        Thread digits (size, stride) left to combine through shared memory: those that cross warps, and those whose
        size is no power of two.
    """

    source: Fragment
    result: Fragment
    dim: int
    registers: tuple[tuple[int, ...], ...]
    lane_masks: tuple[int, ...]
    shared_digits: tuple[Replica, ...]

    @property
    def needs_shared(self) -> bool:
        """Whether partial results have to cross warps."""
        return bool(self.shared_digits)

    @property
    def ranks(self) -> int:
        """Partial results per group that shared memory combines."""
        return product(d.size for d in self.shared_digits)

    @property
    def groups(self) -> int:
        """Groups of threads whose partial results combine; scratch needs ``groups * ranks`` values a register."""
        return product(d.size for d in self._group_digits())

    def rank(self, thread: Index) -> Index:
        """Position of a thread among the partial results of its group, in ``[0, ranks)``."""
        return _compose(self.shared_digits, thread, self.source.used_threads)

    def group(self, thread: Index) -> Index:
        """Group of a thread, in ``[0, groups)``."""
        return _compose(self._group_digits(), thread, self.source.used_threads)

    def writes(self, thread: Index) -> Index:
        """Predicate: the one thread of each (group, rank) that writes its partial result. True if all do."""
        terms = [digit_value(thread, mask, 2, self.source.used_threads) for mask in self.lane_masks]
        if self.source.used_threads < self.source.threads:
            terms.append(thread // self.source.used_threads)
        return total(terms) == 0 if terms else True

    def _group_digits(self) -> tuple[Replica, ...]:
        """Thread digits that the reduction leaves alone."""
        kept = [Replica(d.size, d.stride) for d in self.source.thread_digits if d.dim != self.dim]
        return tuple(sorted(kept + list(self.source.replicate), key=lambda r: -r.stride))


def _compose(digits: tuple[Replica, ...], thread: Index, extent: int) -> Index:
    terms, weight = [], product(d.size for d in digits)
    for digit in digits:
        weight //= digit.size
        terms.append(scale(digit_value(thread, digit.stride, digit.size, extent), weight))
    return total(terms)


def lanes_for_reduce(fragment: Fragment, dim: int, warp_size: int = WARP_SIZE) -> ReducePlan:
    """Plan the reduction of ``fragment`` over ``dim``.

    Padding of the reduced dimension has to hold the reduction's identity; surplus threads take part in shuffles with
    any value (no active lane reads them). A digit such as 24 is split: 8 lanes by shuffles, 3 through shared memory.
    """
    if not -fragment.ndim <= dim < fragment.ndim:
        raise LayoutError(f"cannot reduce dimension {dim} of a fragment of {fragment.ndim} dimensions")
    dim %= fragment.ndim
    result = fragment.reduce(dim)
    masks: list[int] = []
    shared: list[Replica] = []
    for digit in fragment.digits[dim]:
        if digit.place != THREAD:
            continue
        size, stride = digit.size, digit.stride
        # A digit is a run of lane bits only where its stride is a power of two.
        aligned = stride == power_of_two_part(stride)
        while aligned and size % 2 == 0 and stride < warp_size:
            masks.append(stride)
            stride *= 2
            size //= 2
        if size > 1:
            shared.append(Replica(size, stride))
    groups: list[list[int]] = [[] for _ in range(result.registers)]
    for reg in range(fragment.registers):
        coords = list(fragment.reg_part(reg))
        del coords[dim]
        groups[result.register_of(coords)].append(reg)
    return ReducePlan(fragment, result, dim, tuple(map(tuple, groups)), tuple(sorted(masks)),
                      tuple(sorted(shared, key=lambda r: -r.stride)))
