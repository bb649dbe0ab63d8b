"""Products along a split K: pairs of warps share a sub-tile of the output, and each multiplies one half of K.

With half as many sub-tiles each is twice as large, so that all warps together read fewer bytes of the operands from
shared memory, which bounds a product with few rows and columns and a deep K. In return the two warps exchange one half
of their partial sums through shared memory; several products that follow each other into one accumulator do so once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.ops import CopyOp, GemmOp
from ..layout import Instruction, WarpPartition, halves_of_k
from .analysis import FRAGMENT, GLOBAL, SHARED, KernelView, Site, dtype_bits, static_shape
from .decisions import read_instruction
from .resources import SharedUse, live_span, shared_peak

__all__ = ["Depth", "split_depth"]

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
    # other policies say which rows and columns a warp has
    if part.policy != "Square" or instruction.warps != 1 or instruction.c_dtype != "float32":
        return None
    chain = _chain(kernel, site)
    if chain is None or any(s.op.clear_accum for s in chain[1:]) or not all(_alike(s, site, instruction) for s in chain):
        return None
    gemms = [s.op for s in kernel.sites if isinstance(s.op, GemmOp)]
    if any(op.a.scope == FRAGMENT for op in gemms):
        return None  # the accumulator may be on its way into A, whose rows one warp holds
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
    by_hand = any(key in scope.annotations for scope in site.path for key in ("tile.order", "tile.stage"))
    return chain if together and not by_hand else None


def _alike(site: Site, asked: Site, instruction: Instruction) -> bool:
    """Whether a product of the chain can be split like the one asked for."""
    op: GemmOp = site.op
    other = read_instruction(op.annotations)
    decided = "tile.partition" in op.annotations and "tile.partial" not in op.annotations  # by someone else
    return (
        other is not None
        and not decided
        and (other.m, other.n, other.c_dtype) == (instruction.m, instruction.n, instruction.c_dtype)
        and other.operand_bits == instruction.operand_bits
        and (op.m, op.n, op.policy) == (asked.op.m, asked.op.n, asked.op.policy)
        and static_shape(op.c.buffer) == (op.m, op.n)
        and op.k % (2 * other.k) == 0
        and op.mask is None
        and op.a.scope == SHARED
        and site.threads == asked.threads
    )


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
