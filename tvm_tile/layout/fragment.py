"""`Fragment`: how a tile is distributed over the registers of a CTA's threads.

A fragment is a mixed-radix map. Each logical dimension is split into *digits* (slowest first); a digit is placed either
in the thread index or in the register index, with a stride there. Thread digits that belong to no dimension are
*replication*: all threads that differ only in them hold the same elements. Tensor-core operands and accumulators,
coalesced tiles, and broadcast row or column vectors are all of this form, and so are their reductions, transposes and
repetitions, which is why the whole algebra needs no general functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .arith import Index, digit_value, product, scale, total, unravel
from .errors import LayoutError

THREAD = "t"
REG = "r"


class Digit(NamedTuple):
    """One digit of a dimension: ``size`` values, placed in the thread (``"t"``) or register (``"r"``) index."""

    size: int
    place: str
    stride: int


class PlacedDigit(NamedTuple):
    """A digit seen from the thread or register index: which dimension it moves in, by ``weight`` elements a step."""

    dim: int
    weight: int
    size: int
    stride: int


class Replica(NamedTuple):
    """A thread digit without a logical dimension."""

    size: int
    stride: int


def _canonical_digits(digits: Sequence[Digit]) -> tuple[Digit, ...]:
    merged: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        if merged:
            outer = merged[-1]
            if outer.place == digit.place and outer.stride == digit.stride * digit.size:
                merged[-1] = Digit(outer.size * digit.size, digit.place, digit.stride)
                continue
        merged.append(digit)
    return tuple(merged)


def _canonical_replicas(replicas: Sequence[Replica]) -> tuple[Replica, ...]:
    merged: list[Replica] = []
    for replica in sorted((r for r in replicas if r.size != 1), key=lambda r: -r.stride):
        if merged and merged[-1].stride == replica.stride * replica.size:
            merged[-1] = Replica(merged[-1].size * replica.size, replica.stride)
            continue
        merged.append(replica)
    return tuple(merged)


def _check_dense(what: str, placed: Sequence[tuple[int, int]]) -> int:
    """Check that (size, stride) digits count 0, 1, 2, ... without gaps or overlaps; return how far."""
    extent = 1
    for size, stride in sorted(placed, key=lambda p: p[1]):
        if stride != extent:
            raise LayoutError(f"the {what} digits {sorted(placed)} leave a gap or overlap at stride {stride}",
                              f"the next stride has to be {extent}")
        extent *= size
    return extent


@dataclass(frozen=True)
class Fragment:
    """Distribution of a tile over threads and registers, in canonical form (equal maps compare equal).

    Parameters
    ----------
    shape : sequence of int
        Logical extents, each at least 1.
    digits : sequence of sequence of Digit
        For each dimension its digits, slowest first. Their sizes may cover more than the extent: what lies outside
        is padding, owned but meaningless, and has to be predicated.
    replicate : sequence of Replica
        Thread digits along which the tile is replicated.
    threads : int, optional
        Threads of the CTA (default: those the digits use). Surplus threads own nothing, see `active`.

    Raises
    ------
    LayoutError
        When digits overlap, leave gaps, do not cover the shape, or need more threads than there are.
    """

    shape: tuple[int, ...]
    digits: tuple[tuple[Digit, ...], ...]
    replicate: tuple[Replica, ...] = ()
    threads: int = 0

    def __post_init__(self) -> None:
        shape = tuple(int(n) for n in self.shape)
        if len(shape) != len(self.digits):
            raise LayoutError(f"shape {shape} has {len(shape)} dimensions, digits are given for {len(self.digits)}")
        if any(n < 1 for n in shape):
            raise LayoutError(f"every extent of {shape} has to be at least 1")
        digits = tuple(_canonical_digits([Digit(*d) for d in dim]) for dim in self.digits)
        replicate = _canonical_replicas([Replica(*r) for r in self.replicate])
        for dim, placed in enumerate(digits):
            if any(d.place not in (THREAD, REG) for d in placed):
                raise LayoutError(f"a digit is placed in {THREAD!r} or {REG!r}, got {placed}")
            if any(d.size < 1 or d.stride < 1 for d in placed) or any(r.size < 1 or r.stride < 1 for r in replicate):
                raise LayoutError(f"digit sizes and strides have to be positive: {placed}, {replicate}")
            if product(d.size for d in placed) < shape[dim]:
                raise LayoutError(f"the digits of dimension {dim} cover {product(d.size for d in placed)} of "
                                  f"{shape[dim]} elements")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "digits", digits)
        object.__setattr__(self, "replicate", replicate)
        flat = [d for dim in digits for d in dim]
        used = _check_dense("thread", [(d.size, d.stride) for d in flat if d.place == THREAD] + list(replicate))
        _check_dense("register", [(d.size, d.stride) for d in flat if d.place == REG])
        threads = int(self.threads) or used
        if threads < used:
            raise LayoutError(f"the layout needs {used} threads, the CTA has {threads}")
        object.__setattr__(self, "threads", threads)

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of logical dimensions."""
        return len(self.shape)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Extents that the digits cover."""
        return tuple(product(d.size for d in dim) for dim in self.digits)

    @property
    def is_padded(self) -> bool:
        """Whether some owned elements lie outside the shape."""
        return self.padded_shape != self.shape

    @cached_property
    def thread_digits(self) -> tuple[PlacedDigit, ...]:
        """Logical digits placed in the thread index, slowest thread stride first."""
        return self._placed(THREAD)

    @cached_property
    def reg_digits(self) -> tuple[PlacedDigit, ...]:
        """Digits placed in the register index, slowest register stride first."""
        return self._placed(REG)

    @cached_property
    def registers(self) -> int:
        """Elements that each thread holds."""
        return product(d.size for d in self.reg_digits)

    @cached_property
    def used_threads(self) -> int:
        """Threads that own elements: the first so many of the CTA."""
        return product(d.size for d in self.thread_digits) * self.replication

    @cached_property
    def replication(self) -> int:
        """How many threads hold each element."""
        return product(r.size for r in self.replicate)

    def weighted_digits(self, dim: int) -> Iterator[tuple[Digit, int]]:
        """Digits of a dimension, slowest first, each with the elements that one step of it moves."""
        weight = self.padded_shape[dim]
        for digit in self.digits[dim]:
            weight //= digit.size
            yield digit, weight

    def _placed(self, place: str) -> tuple[PlacedDigit, ...]:
        found = [PlacedDigit(dim, weight, d.size, d.stride)
                 for dim in range(self.ndim) for d, weight in self.weighted_digits(dim) if d.place == place]
        return tuple(sorted(found, key=lambda p: -p.stride))

    # ---- (thread, register) -> element ------------------------------------------------------------------------

    def thread_part(self, thread: Index) -> tuple[Index, ...]:
        """Each coordinate's share that depends on the thread only (``coords`` is the sum of both parts)."""
        return self._part(self.thread_digits, thread, self.used_threads)

    def reg_part(self, reg: Index) -> tuple[Index, ...]:
        """Each coordinate's share that depends on the register only."""
        return self._part(self.reg_digits, reg, self.registers)

    def _part(self, placed: Sequence[PlacedDigit], index: Index, extent: int) -> tuple[Index, ...]:
        terms: list[list[Index]] = [[] for _ in self.shape]
        for d in placed:
            terms[d.dim].append(scale(digit_value(index, d.stride, d.size, extent), d.weight))
        return tuple(total(t) for t in terms)

    def coords(self, thread: Index, reg: Index) -> tuple[Index, ...]:
        """Coordinates of the element in register ``reg`` of ``thread``; may lie in the padding.

        The thread has to be active: for a surplus thread the result has no meaning.
        """
        return tuple(total(p) for p in zip(self.thread_part(thread), self.reg_part(reg), strict=True))

    # ---- element -> (thread, register) ------------------------------------------------------------------------

    def owner(self, coords: Sequence[Index], rep: Index = 0) -> tuple[Index, Index]:
        """Thread and register that hold an element, for replica ``rep`` of `replication`."""
        return self.thread_of(coords, rep), self.register_of(coords)

    def thread_of(self, coords: Sequence[Index], rep: Index = 0) -> Index:
        """Thread that holds replica ``rep`` of an element."""
        terms = self._gather(coords, THREAD)
        if not (isinstance(rep, int) and rep == 0):
            values = unravel(rep, [r.size for r in self.replicate])
            terms += [scale(v, r.stride) for v, r in zip(values, self.replicate, strict=True)]
        return total(terms)

    def register_of(self, coords: Sequence[Index]) -> Index:
        """Register that holds an element (the same in each of its threads)."""
        return total(self._gather(coords, REG))

    def _gather(self, coords: Sequence[Index], place: str) -> list[Index]:
        if len(coords) != self.ndim:
            raise LayoutError(f"{len(coords)} coordinates given for a fragment of {self.ndim} dimensions")
        return [scale(digit_value(coords[dim], weight, d.size, self.padded_shape[dim]), d.stride)
                for dim in range(self.ndim) for d, weight in self.weighted_digits(dim) if d.place == place]

    # ---- predicates -------------------------------------------------------------------------------------------

    def active(self, thread: Index) -> Index:
        """Predicate: the thread owns elements. Plain True when all threads of the CTA do."""
        return True if self.used_threads == self.threads else thread < self.used_threads

    def is_primary(self, thread: Index) -> Index:
        """Predicate that holds for exactly one owner of each element (and for no surplus thread).

        One comparison, so that no logical "and" is needed: its operands are all non-negative.
        """
        terms = [digit_value(thread, r.stride, r.size, self.used_threads) for r in self.replicate]
        if self.used_threads < self.threads:
            terms.append(thread // self.used_threads)
        return total(terms) == 0 if terms else True

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(dim, extent) of each dimension with padding: an access is valid where ``coords[dim] < extent``."""
        return tuple((dim, n) for dim, n in enumerate(self.shape) if self.padded_shape[dim] != n)

    # ---- derived fragments ------------------------------------------------------------------------------------

    def with_threads(self, threads: int) -> Fragment:
        """The same distribution in a CTA of that many threads."""
        return Fragment(self.shape, self.digits, self.replicate, threads)

    def crop(self, shape: Sequence[int]) -> Fragment:
        """The same distribution for a smaller logical shape; the rest becomes padding."""
        return Fragment(tuple(shape), self.digits, self.replicate, self.threads)

    def repeat(self, dim: int, n: int, place: str = REG) -> Fragment:
        """Repeat the tile ``n`` times along ``dim``, in new registers or over new threads (slowest there).

        ``atom.repeat(1, 4).repeat(0, 2, THREAD)`` is four atoms side by side in registers, on two warps of rows.
        """
        dim = self._dim(dim)
        if n < 1:
            raise LayoutError(f"cannot repeat {n} times")
        if self.padded_shape[dim] != self.shape[dim]:
            raise LayoutError(f"dimension {dim} is padded ({self.shape[dim]} of {self.padded_shape[dim]}): a "
                              "repetition would have holes", "repeat first, then crop")
        stride = self.used_threads if place == THREAD else self.registers
        digits = list(self.digits)
        digits[dim] = (Digit(n, place, stride), *digits[dim])
        shape = list(self.shape)
        shape[dim] *= n
        used = self.used_threads * (n if place == THREAD else 1)
        return Fragment(tuple(shape), tuple(digits), self.replicate, max(self.threads, used))

    def replicated(self, n: int) -> Fragment:
        """``n`` copies of the tile on consecutive groups of threads."""
        if n < 1:
            raise LayoutError(f"cannot replicate {n} times")
        replicate = (*self.replicate, Replica(n, self.used_threads))
        return Fragment(self.shape, self.digits, replicate, max(self.threads, self.used_threads * n))

    def reduce(self, dim: int, keepdims: bool = False) -> Fragment:
        """Layout of a reduction over ``dim``: its thread digits become replication, its registers vanish."""
        dim = self._dim(dim)
        replicate = list(self.replicate) + [Replica(d.size, d.stride) for d in self.digits[dim] if d.place == THREAD]
        digits = list(self.digits)
        shape = list(self.shape)
        if keepdims:
            digits[dim], shape[dim] = (), 1
        else:
            del digits[dim], shape[dim]
        return Fragment(tuple(shape), _compact_registers(digits), tuple(replicate), self.threads)

    def expand(self, dim: int, extent: int) -> Fragment:
        """Insert a dimension before ``dim``: every owner of an element holds all ``extent`` copies in registers."""
        dim = dim + self.ndim + 1 if dim < 0 else dim
        if not 0 <= dim <= self.ndim:
            raise LayoutError(f"cannot insert a dimension at {dim} of {self.ndim}")
        shape, digits = list(self.shape), list(self.digits)
        shape.insert(dim, extent)
        digits.insert(dim, (Digit(extent, REG, self.registers),))
        return Fragment(tuple(shape), tuple(digits), self.replicate, self.threads)

    def broadcast_to(self, shape: Sequence[int]) -> Fragment:
        """NumPy broadcasting: leading dimensions are added, dimensions of extent 1 are repeated in registers."""
        shape = tuple(shape)
        lead = len(shape) - self.ndim
        if lead < 0 or any(a not in (1, b) for a, b in zip(self.shape, shape[lead:], strict=True)):
            raise LayoutError(f"shape {self.shape} does not broadcast to {shape}")
        out = self
        for dim in range(self.ndim):
            if self.shape[dim] != shape[lead + dim]:
                # A padded dimension of extent 1 is dropped with its registers; its threads stay as replication.
                out = out.reduce(dim).expand(dim, shape[lead + dim])
        for n in reversed(shape[:lead]):
            out = out.expand(0, n)
        return out

    def transpose(self, perm: Sequence[int] | None = None) -> Fragment:
        """Permute the dimensions (reverse them by default)."""
        perm = tuple(reversed(range(self.ndim))) if perm is None else tuple(perm)
        if sorted(perm) != list(range(self.ndim)):
            raise LayoutError(f"{perm} is no permutation of {self.ndim} dimensions")
        return Fragment(tuple(self.shape[p] for p in perm), tuple(self.digits[p] for p in perm), self.replicate,
                        self.threads)

    def reshape(self, shape: Sequence[int]) -> Fragment:
        """The same elements in row-major order under another shape, where that stays digit-wise.

        Raises
        ------
        LayoutError
            When the element counts differ, a dimension other than the first is padded, or an extent cuts a digit.
        """
        shape = tuple(int(n) for n in shape)
        if product(shape) != product(self.shape):
            raise LayoutError(f"cannot reshape {self.shape} to {shape}: {product(self.shape)} and {product(shape)} "
                              "elements")
        if self.padded_shape[1:] != self.shape[1:]:
            raise LayoutError(f"cannot reshape {self.shape}: the layout pads it to {self.padded_shape}")
        pending = [d for dim in self.digits for d in dim]
        digits: list[tuple[Digit, ...]] = []
        for extent in reversed(shape[1:]):
            taken, pending = _take_fast(pending, extent, self.shape, shape)
            digits.append(taken)
        if shape:
            digits.append(tuple(pending))
        elif pending:
            raise LayoutError(f"cannot reshape padded {self.shape} to a scalar")
        return Fragment(shape, tuple(reversed(digits)), self.replicate, self.threads)

    def _dim(self, dim: int) -> int:
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(f"dimension {dim} of a fragment of {self.ndim} dimensions")
        return dim % self.ndim

    # ---- accesses ---------------------------------------------------------------------------------------------

    def vector_width(self, dim: int, dtype_bits: int, max_bits: int = 128) -> int:
        """Elements of ``dim`` that are consecutive registers of one thread, as a legal vector of at most ``max_bits``.

        Vectors start at multiples of the width, in the coordinate and in the register index alike. The width is a
        power of two; a logical extent that it does not divide still needs its tail predicated.
        """
        digits = self.digits[self._dim(dim)]
        run = digits[-1].size if digits and digits[-1].place == REG and digits[-1].stride == 1 else 1
        width = 1
        while run % (2 * width) == 0 and 2 * width * dtype_bits <= max_bits:
            width *= 2
        return width

    # ---- exchange ---------------------------------------------------------------------------------------------

    def to_json(self) -> list:
        """Nested lists of ints and strings, for annotations."""
        return [list(self.shape), [[list(d) for d in dim] for dim in self.digits],
                [list(r) for r in self.replicate], self.threads]

    @staticmethod
    def from_json(data: Sequence) -> Fragment:
        """Inverse of `to_json`; accepts any sequence and int types that TVM gives back."""
        if len(data) != 4:
            raise LayoutError(f"a fragment is stored as 4 entries, got {len(data)}")
        shape, digits, replicate, threads = data
        return Fragment(
            tuple(int(n) for n in shape),
            tuple(tuple(Digit(int(s), str(p), int(t)) for s, p, t in dim) for dim in digits),
            tuple(Replica(int(s), int(t)) for s, t in replicate), int(threads))

    def __repr__(self) -> str:
        dims = "; ".join(
            f"d{i} = " + (" ".join(f"{'thread' if d.place == THREAD else 'reg'}({d.size}@{d.stride})" for d in dim)
                          or "0") for i, dim in enumerate(self.digits))
        text = f"Fragment {'x'.join(map(str, self.shape)) or 'scalar'}"
        if self.is_padded:
            text += f" padded to {'x'.join(map(str, self.padded_shape))}"
        text += f" on {self.used_threads}"
        text += f" of {self.threads} threads" if self.threads != self.used_threads else " threads"
        text += f" x {self.registers} registers"
        if dims:
            text += f": {dims}"
        if self.replicate:
            text += "; replicated " + " ".join(f"({r.size}@{r.stride})" for r in self.replicate)
        return f"<{text}>"


def _compact_registers(digits: Sequence[Sequence[Digit]]) -> tuple[tuple[Digit, ...], ...]:
    """Close the gaps that removed register digits left, keeping the order of the others."""
    strides = sorted({(d.stride, d.size) for dim in digits for d in dim if d.place == REG})
    renamed, extent = {}, 1
    for stride, size in strides:
        renamed[stride] = extent
        extent *= size
    return tuple(tuple(d._replace(stride=renamed[d.stride]) if d.place == REG else d for d in dim) for dim in digits)


def _take_fast(pending: Sequence[Digit], extent: int, old: tuple[int, ...],
               new: tuple[int, ...]) -> tuple[tuple[Digit, ...], list[Digit]]:
    """Take digits that together count ``extent`` from the fast end, splitting the last one if need be."""
    rest, taken = list(pending), []
    while extent > 1:
        digit = rest.pop()
        if extent % digit.size == 0:
            taken.append(digit)
            extent //= digit.size
        elif digit.size % extent == 0:
            taken.append(Digit(extent, digit.place, digit.stride))
            rest.append(Digit(digit.size // extent, digit.place, digit.stride * extent))
            extent = 1
        else:
            raise LayoutError(f"cannot reshape {old} to {new} digit by digit: the extent cuts a digit of size "
                              f"{digit.size}")
    return tuple(reversed(taken)), rest
