"""Layouts of all fragments of a kernel, from what the products require and from how fragments are used together.

Products fix their operands. What is used with a fragment of known layout in one operation follows from it (a reduced
vector, a second operand, a converted accumulator), until nothing changes; the largest fragment that is left gets a
coalesced default, and so on. A fragment of a known layout is never changed: where two uses do not agree, the loop rule
has it converted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.ir import Var

from ..errors import TileShapeError
from ..ir.ops import CopyOp, CumsumOp, GemmOp, ParallelOp, ReduceOp
from ..layout import Fragment, LayoutError, default_fragment, replicated_fragment
from .analysis import FRAGMENT, GLOBAL, SHARED, KernelView, Site, dtype_bits, static_shape
from .loops import choose_loop, default_loop, plain_dims, project, same_window
from .rule import shape_error
from .vectors import MAX_VECTOR_BITS

__all__ = ["FragmentTable", "infer"]

#: Fragments of so few elements are held by every thread: reading one never needs communication.
REPLICATED_ELEMENTS = 4


@dataclass
class FragmentTable:
    """Layouts of a kernel's fragments, kept for the allocated buffers; views follow from them."""

    kernel: KernelView
    layouts: dict[Var, Fragment] = field(default_factory=dict)
    reasons: dict[Var, str] = field(default_factory=dict)

    def get(self, buffer: Var) -> Fragment | None:
        """Layout of a fragment or view, None where it is not known yet."""
        base = self.kernel.base(buffer)
        layout = self.layouts.get(base)
        if layout is None or base.same_as(buffer):
            return layout
        return self._reshaped(layout, base, buffer)

    def set(self, buffer: Var, layout: Fragment, why: str) -> None:
        """Fix the layout of a fragment, or of the fragment behind a view."""
        base = self.kernel.base(buffer)
        if not base.same_as(buffer):
            layout = self._reshaped(layout, buffer, base)
            why = f"{why} (through its view {buffer.name})"
        self.layouts[base] = layout
        self.reasons[base] = why

    def _reshaped(self, layout: Fragment, old: Var, new: Var) -> Fragment:
        try:
            return layout.reshape(static_shape(new))
        except LayoutError as err:
            raise TileShapeError(
                f"{new.name} {static_shape(new)} is a view of {old.name} {static_shape(old)}, whose layout {layout} "
                f"does not have that form: {err.message}",
                self.kernel.location,
                "copy the fragment to one of the other shape instead",
            ) from err


def infer(table: FragmentTable) -> None:
    """Complete a table that holds the required layouts."""
    kernel = table.kernel
    while True:
        _propagate(table)
        left = [b for b in kernel.buffers(FRAGMENT) if b not in table.layouts and any(True for _ in kernel.uses(b))]
        if not left:
            break
        _default(table, max(left, key=_elements))


def _elements(buffer: Var) -> int:
    count = 1
    for extent in static_shape(buffer):
        count *= extent
    return count


def _propagate(table: FragmentTable) -> None:
    changed = True
    while changed:
        changed = False
        for site in table.kernel.sites:
            if not isinstance(site.op, GemmOp) and _visit(table, site):
                changed = True


def _visit(table: FragmentTable, site: Site) -> bool:
    """Lay out what is used together with a known fragment; whether anything was new."""
    accesses = site.of(FRAGMENT)
    unknown = [a for a in accesses if table.get(a.buffer) is None]
    if not unknown or len(unknown) == len(accesses):
        return False
    if isinstance(site.op, CumsumOp):
        source, target = site.op.src.buffer, site.op.dst.buffer
        known = next((b for b in (source, target) if table.get(b) is not None), None)
        if known is None or static_shape(source) != static_shape(target):
            return False
        table.set(
            source if known.same_as(target) else target, table.get(known), f"as {known.name}, which it is scanned from"
        )
        return True
    changed = False
    choice = choose_loop(site, table.get)
    driver = choice.window is not None or _driven(site, table, choice)
    for access in unknown:
        if table.get(access.buffer) is not None or not driver:
            continue
        if choice.window is not None:
            window = next(a for a in accesses if a.buffer.same_as(choice.window))
            if same_window(window, access):
                table.set(access.buffer, choice.layout, f"as {choice.window.name}, whose slice it meets in {site.name}")
                changed = True
            continue
        dims = plain_dims(site, access)
        if dims is None:
            continue
        what = "reduced" if isinstance(site.op, ReduceOp) else "used together"
        table.set(access.buffer, project(choice.layout, dims), f"{what} in {site.name}, {choice.why}")
        changed = True
    return changed


def _driven(site: Site, table: FragmentTable, choice) -> bool:
    """Whether the loop's layout comes from a fragment that all axes index (a default says nothing about fragments)."""
    for access in site.of(FRAGMENT):
        if table.get(access.buffer) is None:
            continue
        dims = plain_dims(site, access)
        if dims is not None and all(n in dims or e == 1 for n, e in enumerate(site.extents)):
            return True
    return False


def _default(table: FragmentTable, buffer: Var) -> None:
    site, _ = next(iter(table.kernel.uses(buffer)))
    shape, bits = static_shape(buffer), _narrowest(table.kernel, buffer)
    for user, used in table.kernel.uses(buffer):
        # the result of reducing a shared tile lies as the tile is visited
        if isinstance(user.op, ReduceOp) and used.write and user.op.src.scope != FRAGMENT:
            dims = plain_dims(user, used)
            if dims is not None and None not in user.extents:
                loop = reduce_loop(user)
                table.set(
                    used.buffer, project(loop, dims), f"reduced in {user.name}, which visits its source coalesced"
                )
                return
        # a vector that every row or column of a memory-bound loop needs lies as that loop will visit memory
        dims = plain_dims(user, used) if isinstance(user.op, ParallelOp) and None not in user.extents else None
        if dims is not None and any(n not in dims and e != 1 for n, e in enumerate(user.extents)):
            memory = [a.bits for a in user.accesses if a.scope in (GLOBAL, SHARED)]
            if memory:
                loop, _ = default_loop(user, min(memory), MAX_VECTOR_BITS // min(memory))
                table.set(buffer, project(loop, dims), f"used with every step of another axis in {user.name}")
                return
    if _elements(buffer) <= REPLICATED_ELEMENTS:
        table.set(buffer, replicated_fragment(shape, site.threads), "so few elements that every thread holds them")
        return
    try:
        layout = default_fragment(shape, site.threads, bits)
    except LayoutError as err:
        raise shape_error(err, f"fragment {buffer.name}", site.location) from err
    table.set(buffer, layout, "coalesced: no product decides it")


def _narrowest(kernel: KernelView, buffer: Var) -> int:
    """Bits of the narrowest element that a fragment's elements are copied from or to: vectors are made of these."""
    bits = [dtype_bits(str(buffer.ty.dtype))]
    for site, _ in kernel.uses(buffer):
        if isinstance(site.op, CopyOp):
            bits += [a.bits for a in site.accesses if a.scope in (GLOBAL, SHARED)]
    return min(bits)


def reduce_loop(site: Site) -> Fragment:
    """Layout in which a reduction visits a source that is no fragment: coalesced in the source's dimension order."""
    op: ReduceOp = site.op
    order = [a for a in op.src.axes if a is not None]
    extents = [site.extents[a] for a in order]
    bits = dtype_bits(op.src.dtype)
    if len(order) != len(site.extents) or None in extents:
        return default_loop(site, bits)[0]
    layout = default_fragment(tuple(extents), site.threads, bits)
    return layout.transpose(sorted(range(len(order)), key=order.__getitem__))
