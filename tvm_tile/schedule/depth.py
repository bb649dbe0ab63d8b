"""Products along a split K: pairs of warps share a sub-tile of the output, and each multiplies one half of K.

With half as many sub-tiles each is twice as large, so that all warps together read fewer bytes of the operands from
shared memory, which bounds a product with few rows and columns and a deep K. In return the two warps exchange one half
of their partial sums through shared memory; several products that follow each other into one accumulator do so once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.ops import CopyOp, GemmOp
from ..layout import Instruction, WarpPartition, halves_of_k
from .analysis import FRAGMENT, GLOBAL, SHARED, KernelView, Scope, Site, dtype_bits, static_shape
from .decisions import read_instruction, read_pipeline
from .resources import SharedUse, live_span, shared_peak

__all__ = ["Depth", "split_depth", "why_not_along_k"]

#: Operand bytes saved for each byte exchanged that make up for the exchange and its barrier.
WORTH = 2
#: Bytes left free for reductions across warps and conversions of row vectors.
OTHER_SCRATCH = 4096


@dataclass(frozen=True)
class Depth:
    """A partition along K, the product's place among those that share the exchange, and what it gains."""

    partition: WarpPartition
    place: str | None
    why: str


def split_depth(kernel: KernelView, site: Site, part: WarpPartition, instruction: Instruction, hw) -> Depth | None:
    """How to split a product along K too; None where that cannot be done or gains nothing.

    Parameters
    ----------
    kernel, site : KernelView, Site
        The product.
    part : WarpPartition
        The policy's split along M and N.
    instruction : Instruction
        What multiplies.
    hw : GPU
        The machine.
    """
    if part.policy != "Square" or kernel.split:
        return None  # other policies and roles say which rows and columns a warp has
    chain = _chain(kernel, site)
    if chain is None or any(s.op.clear_accum for s in chain[1:]):
        return None
    if any(why_not_along_k(s, read_instruction(s.op.annotations)) or not _alike(s, site) for s in chain):
        return None
    if any(_keeps_rows(s.op) for s in kernel.sites if isinstance(s.op, GemmOp)):
        return None
    deep = halves_of_k(part, instruction)
    if deep is None:
        return None
    bits = instruction.operand_bits
    saved = sum(part.operand_bytes(s.op.k, bits, bits) - deep.operand_bytes(s.op.k, bits, bits) for s in chain)
    scratch = part.M * part.N * 4
    exchanged = 2 * scratch
    if saved < WORTH * exchanged or scratch + OTHER_SCRATCH > hw.shared_per_block - _peak(kernel):
        return None
    names = ["first", *["middle"] * (len(chain) - 2), "last"] if len(chain) > 1 else [None]
    place = names[next(n for n, s in enumerate(chain) if s is site)]
    return Depth(deep, place, f"halves of K read {saved} bytes less of shared memory and exchange {exchanged}")


def _chain(kernel: KernelView, site: Site) -> list[Site] | None:
    """The products into an accumulator, where they follow each other directly; None where they do not."""
    target = kernel.base(site.op.c.buffer)
    chain = [s for s in kernel.sites if isinstance(s.op, GemmOp) and kernel.base(s.op.c.buffer).same_as(target)]
    places = [n for n, s in enumerate(kernel.sites) if any(s is c for c in chain)]
    together = places[-1] - places[0] + 1 == len(places) and all(s.path == site.path for s in chain)
    return chain if together and not any(_by_hand(scope) for scope in site.path) else None


def _by_hand(scope: Scope) -> bool:
    """Whether a loop's statements are ordered by its author, who may put products into different iterations."""
    notes = scope.annotations
    return "tile.order" in notes or "tile.stage" in notes or "stage" in (read_pipeline(notes) or {})


def why_not_along_k(site: Site, instruction: Instruction | None) -> str | None:
    """Why warps cannot share a product along K; None where they can."""
    op: GemmOp = site.op
    if instruction is None or instruction.warps != 1:
        return "only products of single warps are split along K"
    if instruction.c_dtype != "float32":
        return f"the accumulator is {instruction.c_dtype}, and partial sums are float32"
    if op.k % (2 * instruction.k):
        return f"K = {op.k} has no two halves of whole k = {instruction.k}"
    if op.a.scope != SHARED:
        return f"A ({op.a.buffer.name}) is in registers"
    if op.mask is not None:
        return "a tile mask merges the accumulator"
    if static_shape(op.c.buffer) != (op.m, op.n):
        return f"C is a slice of {op.c.buffer.name}"
    return None


def _alike(site: Site, asked: Site) -> bool:
    """Whether a product of the chain is split over warps like the one asked for."""
    one, other = read_instruction(site.op.annotations), read_instruction(asked.op.annotations)
    notes = site.op.annotations
    decided = "tile.partition" in notes and "tile.partial" not in notes  # by the author or by tuning
    return (
        not decided
        and (one.m, one.n, one.operand_bits) == (other.m, other.n, other.operand_bits)
        and (site.op.m, site.op.n, site.op.policy) == (asked.op.m, asked.op.n, asked.op.policy)
        and site.threads == asked.threads
    )


def _keeps_rows(op: GemmOp) -> bool:
    """Whether a product may want the accumulator as its A operand, or is moved over others by the rotation of loops."""
    instruction = read_instruction(op.annotations)
    return op.a.scope == FRAGMENT or (instruction is not None and instruction.warps != 1)


def _peak(kernel: KernelView) -> int:
    """Bytes of shared tiles that are live together, if every pipelined loop gets the copies that it asks for."""
    uses = []
    for buffer in kernel.buffers(SHARED):
        span = live_span(kernel, buffer)
        if span is None:
            continue
        size, copies = dtype_bits(str(buffer.ty.dtype)), 1
        for extent in static_shape(buffer):
            size *= extent
        for user, access in kernel.uses(buffer):
            if access.write and isinstance(user.op, CopyOp) and user.op.src.scope == GLOBAL:
                copies = max([copies, *(int(s.annotations.get("tile.num_stages", 1)) for s in user.path)])
        uses.append(SharedUse(buffer.name, -(-size // 8 // 1024) * 1024, copies, *span))
    return shared_peak(uses)
