"""How the warps of a CTA share the output of a gemm: ``tile.partition`` on tensor-core gemm blocks."""

from __future__ import annotations

from ..errors import TileShapeError
from ..ir.ops import GemmOp
from ..layout import Fragment, Instruction, LayoutError, WarpPartition, partition
from .analysis import SHARED, KernelView, Site, static_shape
from .decisions import FRONT_THREADS, read_instruction
from .depth import split_depth, why_not_along_k
from .layout_check import matching_partition
from .roles import largest_n
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule, shape_error

__all__ = ["split_warps", "warp_policy"]


def split_warps(op: GemmOp, instruction: Instruction, threads: int, most_n: int | None = None) -> WarpPartition:
    """The policy's split of a product over the CTA's warps.

    Sizes that are no multiples of the instruction's (8 query heads, N = 20) are padded inside the tile; a size that the
    instruction divides is never padded to please a policy.

    Raises
    ------
    TileShapeError
        Threads that are no whole warps, or a policy that cannot split this tile.
    """
    if threads % 32:
        raise TileShapeError(
            f"T.gemm: tensor cores work by whole warps, and threads={threads} is no multiple of 32",
            op.location,
            f"launch T.Kernel(..., threads={-(-threads // 32) * 32})",
        )
    pad = bool(op.m % instruction.m or op.n % instruction.valid_n[0])
    try:
        return partition(op.policy, op.m, op.n, threads // 32, instruction, pad=pad, most_n=most_n)
    except LayoutError as err:
        raise shape_error(err, "T.gemm", op.location) from err


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel, site in sch.sites(GemmOp):
        instruction = read_instruction(site.op.annotations)
        if instruction is None:
            answers.append(NotApplicable("the CUDA cores need no split by warps", kernel.name, site.name))
            continue
        answers.append(_decide(sch, kernel, site, instruction, hw))
    return answers or NotApplicable("no T.gemm")


def _decide(sch: TileSchedule, kernel: KernelView, site: Site, instruction: Instruction, hw) -> Decision:
    op: GemmOp = site.op
    given = sch.given(site, "tile.partition")
    if given is not None:
        part = WarpPartition.from_json(given)
        if (part.M, part.N) != (op.m, op.n) or part.warps * 32 != site.threads:
            raise TileShapeError(
                f"T.gemm: the given partition is for {part.M} x {part.N} on {part.warps} warps, but the product is "
                f"{op.m} x {op.n} on {site.threads} threads",
                site.location,
            )
        if part.k_groups > 1 and (reason := why_not_along_k(site, instruction)) is not None:
            raise TileShapeError(f"T.gemm: the given partition splits K, but {reason}", site.location)
        return Decision(kernel.name, site.name, _text(part), GIVEN)
    annotated = _annotated(kernel, op, instruction, site.threads)
    if annotated is not None:
        sch.annotate(site, "tile.partition", annotated)
        return Decision(kernel.name, site.name, _text(annotated), f"T.annotate_layout of {op.c.buffer.name} says so")
    # with a front of its own a CTA has four warpgroups
    most_n = largest_n(hw, kernel.threads + FRONT_THREADS) if kernel.split else None
    part = split_warps(op, instruction, site.threads, most_n)
    why = f"policy {part.policy} for {op.m} x {op.n}"
    if (deep := split_depth(kernel, site, part, instruction, hw)) is not None:
        part = deep.partition
        why += f"; {deep.why}"
        if deep.place is not None:
            sch.annotate(site, "tile.partial", deep.place)
    sch.annotate(site, "tile.partition", part)
    share = op.m * op.n / (part.padded_m * part.padded_n)
    if part.k_groups == 1 and (gain := _square_gain(site, part, instruction)) >= 0.25:
        why += f"; Square would read {gain:.0%} less of shared memory"
    if share < 1:
        why += f", padded to {part.padded_m} x {part.padded_n} ({share:.0%} of the products are used)"
    return Decision(kernel.name, site.name, _text(part), why, warning=share < 0.5)


def _square_gain(site: Site, part: WarpPartition, instruction: Instruction) -> float:
    """Share of the operands' bytes that warps would not read from shared memory under the policy Square."""
    op: GemmOp = site.op
    if instruction.warps != 1 or op.a.scope != SHARED or (part.padded_m, part.padded_n) != (op.m, op.n):
        return 0.0
    bits = instruction.operand_bits
    try:
        square = partition("Square", op.m, op.n, part.warps, instruction)
    except LayoutError:
        return 0.0
    return 1 - square.operand_bytes(op.k, bits, bits) / part.operand_bytes(op.k, bits, bits)


def _annotated(kernel: KernelView, op: GemmOp, instruction: Instruction, threads: int) -> WarpPartition | None:
    """The split that an annotated accumulator layout stands for."""
    data = kernel.info.layouts.get(op.c.buffer.name)
    if data is None or static_shape(op.c.buffer) != (op.m, op.n):
        return None
    return matching_partition(op, Fragment.from_json(data), threads, "C", [instruction])


def _text(part: WarpPartition) -> str:
    text = f"{part.m_warps} x {part.n_warps} warps, each {part.group_m} x {part.group_n}"
    return text if part.k_groups == 1 else text.replace("warps, each", "pairs of warps along K, each pair")


warp_policy = Rule("warp_policy", _apply)
