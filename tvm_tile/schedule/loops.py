"""In which layout an operation visits its iteration space, given the layouts of the fragments it uses.

One choice, used by the inference of fragment layouts, by the loop rule and by the copy rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm_ffi
from tvm.ir import Var

from ..errors import TileShapeError
from ..ir.ops import CopyOp, FillOp, ReduceOp
from ..layout import (
    BROADCAST,
    REG,
    THREAD,
    Digit,
    Fragment,
    LayoutError,
    contains,
    default_fragment,
    replicated_fragment,
)
from .analysis import FRAGMENT, Access, Site, static_shape
from .decisions import read_chunks, read_convert, read_window

__all__ = [
    "LoopChoice",
    "at_hand",
    "check_loop",
    "choose_loop",
    "default_loop",
    "loop_of_fragment",
    "plain_dims",
    "project",
    "result_at_hand",
    "windowed",
]

LayoutOf = Callable[[Var], "Fragment | None"]


@dataclass
class LoopChoice:
    """How an iteration space is visited.

    Attributes
    ----------
    layout : Fragment
        Over the axes; over the dimensions of ``window`` where that is set.
    why : str
        One line.
    window : Var or None
        Fragment visited as a whole because only a slice of it is used.
    convert : list of Var
        Fragments that are not at hand.
    chunks : list of int
        Axes of symbolic extent, covered chunk by chunk.
    """

    layout: Fragment
    why: str
    window: Var | None = None
    convert: list[Var] | None = None
    chunks: list[int] | None = None


def plain_dims(site: Site, access: Access) -> tuple[int, ...] | None:
    """For each dimension of a fragment the axis that runs over all of it, or BROADCAST (index 0 of extent 1).

    None where an index is anything else.
    """
    dims: list[int] = []
    for term, extent in zip(access.terms, static_shape(access.buffer), strict=True):
        if term is None or term.constant != 0:
            return None
        if term.axis is None:
            if extent != 1:
                return None
            dims.append(BROADCAST)
        else:
            if site.extents[term.axis] != extent or term.axis in dims:
                return None
            dims.append(term.axis)
    return tuple(dims)


def _covers(site: Site, axes) -> bool:
    """Whether every axis of more than one step is among ``axes``."""
    return all(n in axes or extent == 1 for n, extent in enumerate(site.extents))


def windowed(site: Site, access: Access) -> bool:
    """Whether the operation's axes sweep a box of the fragment, each along one dimension."""
    axes = [t.axis for t in access.terms if t is not None and t.axis is not None]
    return all(t is not None for t in access.terms) and len(set(axes)) == len(axes) and _covers(site, axes)


def same_window(a: Access, b: Access) -> bool:
    """Whether two accesses sweep the same box of equally shaped fragments."""
    if static_shape(a.buffer) != static_shape(b.buffer) or any(t is None for t in [*a.terms, *b.terms]):
        return False
    return all(
        x.axis == y.axis and tvm_ffi.structural_equal(x.start, y.start) for x, y in zip(a.terms, b.terms, strict=True)
    )


def loop_of_fragment(layout: Fragment, dims: tuple[int, ...], extents: list[int]) -> Fragment:
    """The iteration space laid out as a fragment that all of its axes index."""
    out, axes = layout, list(dims)
    for dim in reversed(range(len(axes))):
        if axes[dim] == BROADCAST:
            out = out.reduce(dim)
            del axes[dim]
    out = out.transpose(sorted(range(len(axes)), key=axes.__getitem__)) if axes else out
    for axis in range(len(extents)):
        if axis not in axes:  # of extent 1: other axes are indexed
            out = out.expand(axis, extents[axis])
    return out


def project(loop: Fragment, dims: tuple[int, ...]) -> Fragment:
    """Layout of a fragment whose elements each iteration of ``loop`` finds at hand."""
    out, axes = loop, list(range(loop.ndim))
    for axis in reversed(range(loop.ndim)):
        if axis not in dims:
            out = out.reduce(axis)
            axes.remove(axis)
    wanted = [d for d in dims if d != BROADCAST]
    if wanted:
        out = out.transpose([axes.index(d) for d in wanted])
    for dim, axis in enumerate(dims):
        if axis == BROADCAST:
            out = out.expand(dim, 1)
    return out


def default_loop(site: Site, bits: int, vector: int = 1) -> tuple[Fragment, list[int]]:
    """Coalesced layout of an iteration space and the axes that it covers in chunks.

    Parameters
    ----------
    bits : int
        Bits of the widest element in memory.
    vector : int
        Elements of the last axis that an access may join.
    """
    extents, threads = site.extents, site.threads
    chunks = [n for n, e in enumerate(extents) if e is None]
    if not extents:
        return replicated_fragment((), threads), []
    if chunks:
        # the innermost symbolic axis takes a chunk of one element a thread, the others one step at a time
        extents = [(threads if n == chunks[-1] else 1) if e is None else e for n, e in enumerate(extents)]
    return default_fragment(tuple(extents), threads, bits, max(bits, bits * vector)), chunks


def _spread(layout: Fragment, dims: tuple[int, ...], extents: list[int], vector: int) -> Fragment | None:
    """A space around a replicated vector: its replicas share the missing axes among them.

    ``out[i, j] = tile[i, j] * scale[i]`` with ``scale`` reduced from an accumulator: the lanes that hold the same
    ``scale[i]`` take different ``j``.
    """
    missing = [n for n, e in enumerate(extents) if n not in dims and e != 1]
    if len(missing) != 1 or BROADCAST in dims or layout.replication == 1:
        return None
    extent = extents[missing[0]]
    vector = vector if missing[0] == len(extents) - 1 else 1
    while vector > 1 and extent % (vector * layout.replication):
        vector //= 2
    passes, rest = divmod(extent, vector * layout.replication)
    if rest:
        return None
    inner = passes * vector
    digits = [tuple(d._replace(stride=d.stride * inner) if d.place == REG else d for d in dim) for dim in layout.digits]
    order = sorted(range(len(dims)), key=dims.__getitem__)
    placed: list[tuple[Digit, ...]] = [digits[n] for n in order]
    shape = [layout.shape[n] for n in order]
    threads = [Digit(r.size, THREAD, r.stride) for r in layout.replicate]
    new = (Digit(passes, REG, vector), *threads, Digit(vector, REG, 1))
    axes = sorted(dims)
    for axis in range(len(extents)):
        if axis not in axes:
            placed.insert(axis, new if axis == missing[0] else ())
            shape.insert(axis, extents[axis])
    return Fragment(tuple(shape), tuple(placed), (), layout.threads)


def at_hand(held: Fragment, loop: Fragment, dims: tuple[int, ...]) -> bool:
    """Whether a fragment laid out as ``held`` is at hand in a loop."""
    try:
        return contains(held, loop, dims)
    except LayoutError:
        return False


def result_at_hand(site: Site, layout_of: LayoutOf, loop: Fragment) -> bool:
    """Whether a reduction over a loop leaves its result exactly where the result's fragment has it."""
    access = next(a for a in site.of(FRAGMENT) if a.write)
    held, dims = layout_of(access.buffer), plain_dims(site, access)
    return dims is not None and at_hand(held, loop, dims) and _updates(held, loop, dims)


def choose_loop(
    site: Site, layout_of: LayoutOf, bits: int = 32, vector: int = 1, base: Fragment | None = None
) -> LoopChoice:
    """The layout in which an operation visits its axes.

    Fragments decide: the layout under which fewest elements have to move through shared memory, written ones first.
    Without fragments, or where none is indexed by all axes, the default: coalesced for vectors of the last axis.

    Parameters
    ----------
    site : Site
        The operation.
    layout_of : callable
        Fragment buffer -> its layout, None where it is not known yet (such fragments do not count).
    bits, vector : int
        Of the memory accesses, for the default.
    base : Fragment, optional
        The default to use instead (for example a copy's, which follows the swizzle).
    """
    accesses = [a for a in site.of(FRAGMENT) if layout_of(a.buffer) is not None]
    candidates: list[LoopChoice] = []
    static = None not in site.extents
    if _uniform(site):
        candidates.append(
            LoopChoice(replicated_fragment(tuple(site.extents), site.threads), "every thread does the same")
        )
    for access in [] if candidates else accesses:
        held = layout_of(access.buffer)
        dims = plain_dims(site, access) if static else None
        if dims is not None and _covers(site, dims):
            layout = loop_of_fragment(held, dims, site.extents)
            candidates.append(LoopChoice(layout, f"as {access.buffer.name} lies"))
        elif windowed(site, access) and site.extents:
            candidates.append(LoopChoice(held, f"the slice of {access.buffer.name} as it lies", window=access.buffer))
    if not candidates:
        default, chunks = default_loop(site, bits, vector)
        if base is not None:
            default = base
        why = "every thread does the same" if not site.extents else f"coalesced, {vector * bits // 8}-byte accesses"
        candidates.append(LoopChoice(default, why, chunks=chunks))
        if static and site.extents:
            for access in accesses:
                dims = plain_dims(site, access)
                spread = _spread(layout_of(access.buffer), dims, site.extents, vector) if dims else None
                if spread is not None:
                    candidates.append(
                        LoopChoice(spread, f"the threads that hold {access.buffer.name}[i] share its row")
                    )

    best, lowest = None, None
    for order, choice in enumerate(candidates):
        choice.convert, cost = _missing(site, accesses, choice, layout_of)
        key = (*cost, order)
        if lowest is None or key < lowest:
            best, lowest = choice, key
    return best


def check_loop(site: Site, layout_of: LayoutOf, given: Fragment) -> None:
    """Refuse a given loop layout that does not fit an operation.

    Raises
    ------
    TileShapeError
        Other extents, or a fragment that is neither at hand in it nor listed in ``tile.convert``.
    """
    notes = site.op.annotations
    accesses = [a for a in site.of(FRAGMENT) if layout_of(a.buffer) is not None]
    window = next((a.buffer for a in accesses if a.buffer.name == read_window(notes)), None)
    chunks = read_chunks(notes)
    extents = static_shape(window) if window is not None else tuple(site.extents)
    fits = len(extents) == given.ndim and all(
        n in chunks if e is None else e == given.shape[n] for n, e in enumerate(extents)
    )
    if not fits or given.threads != site.threads:
        raise TileShapeError(
            f"{site.name}: the given loop layout {given} does not cover its {len(site.extents)} axes of extents "
            f"{site.extents} on {site.threads} threads",
            site.location,
        )
    away, _ = _missing(site, accesses, LoopChoice(given, "given", window), layout_of)
    left = sorted({b.name for b in away} - set(read_convert(notes)))
    if left and not isinstance(site.op, ReduceOp):
        raise TileShapeError(
            f"{site.name}: in the given loop layout {given} the fragments {', '.join(left)} are not at hand",
            site.location,
            "list them in tile.convert, or leave the loop's layout out",
        )


def _uniform(site: Site) -> bool:
    """Whether an operation fills per-thread memory, which is alike in every thread, or copies it."""
    uniform = any(a.scope in ("local", "local.var") for a in site.accesses)
    return uniform and isinstance(site.op, CopyOp | FillOp) and None not in site.extents


def _updates(held: Fragment, loop: Fragment, dims: tuple[int, ...]) -> bool:
    """Whether every thread that holds an element also visits it: no replica of a written fragment may go stale."""
    try:
        return contains(project(loop, dims), held)
    except LayoutError:
        return False


def _missing(site: Site, accesses: list[Access], choice: LoopChoice, layout_of: LayoutOf):
    """(fragments that are not at hand, (written elements, read elements) that have to move)."""
    convert: list[Var] = []
    written = read = 0
    window = None
    if choice.window is not None:
        window = next(a for a in accesses if a.buffer.same_as(choice.window) and windowed(site, a))
    for access in accesses:
        held = layout_of(access.buffer)
        if window is not None:
            dims = tuple(range(held.ndim)) if same_window(window, access) else None
        else:
            dims = plain_dims(site, access)
        fine = dims is not None and at_hand(held, choice.layout, dims)
        if fine and access.write:
            fine = _updates(held, choice.layout, dims)
        if fine:
            continue
        size = 1
        for extent in static_shape(access.buffer):
            size *= extent
        written, read = (written + size, read) if access.write else (written, read + size)
        if all(not access.buffer.same_as(c) for c in convert):
            convert.append(access.buffer)
    return convert, (written, read)
