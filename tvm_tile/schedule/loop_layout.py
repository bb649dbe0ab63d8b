"""In which layout element-wise work, fills, reductions and prints visit their tiles: ``tile.loop`` on their blocks."""

from __future__ import annotations

from ..ir.ops import AssertOp, CumsumOp, FillOp, ParallelOp, PrintOp, ReduceOp
from .analysis import FRAGMENT, GLOBAL, SHARED, KernelView, Site
from .copy_instruction import annotate_loop
from .decisions import read_fragments, read_loop, read_shared
from .inference import reduce_loop
from .loops import LoopChoice, check_loop, choose_loop, result_at_hand
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule
from .vectors import VectorProver, body_width

__all__ = ["loop_layout"]

_KINDS = (ParallelOp, FillOp, ReduceOp, PrintOp, AssertOp, CumsumOp)


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        prover = VectorProver(kernel.info, sch.function)
        for site in kernel.sites:
            if isinstance(site.op, _KINDS):
                answers.append(_decide(sch, kernel, site, prover))
    return answers or NotApplicable("no element-wise work")


def _decide(sch: TileSchedule, kernel: KernelView, site: Site, prover: VectorProver):
    fragments, shared = read_fragments(kernel.info.block), read_shared(kernel.info.block)
    if isinstance(site.op, CumsumOp):
        return NotApplicable("a scan goes through shared memory line by line", kernel.name, site.name)

    def layout_of(buffer):
        return fragments.get(buffer.name)

    width = body_width(prover, site, lambda b: shared.get(b.name))
    bits = max([a.bits for a in site.accesses if a.scope in (GLOBAL, SHARED)], default=32)
    width = min(width, max(1, 128 // bits))
    choice = _choose(site, layout_of, bits, width)
    layout = choice.layout
    given = read_loop(site.op.annotations)
    if given is not None and given != layout:
        check_loop(site, layout_of, given)
        return Decision(kernel.name, site.name, f"{given!r}"[1:-1], GIVEN)
    vector = (
        1
        if choice.window is not None or layout.ndim == 0
        else min(width, layout.vector_width(layout.ndim - 1, 1, width))
    )
    if given is None:
        annotate_loop(sch, site, choice, vector)
    # a fragment's own layout is printed once, where it was decided
    text = choice.why if choice.why.endswith(" lies") else f"{layout!r}"[1:-1]
    why = "its elements are used where they are" if choice.why.endswith(" lies") else choice.why
    if choice.chunks:
        text += f", axes {choice.chunks} chunk by chunk"
    if choice.convert:
        text += f"; {', '.join(sorted({b.name for b in choice.convert}))} through shared memory"
    return Decision(kernel.name, site.name, text, why, warning=bool(choice.convert))


def _choose(site: Site, layout_of, bits: int, width: int) -> LoopChoice:
    op = site.op
    if not isinstance(op, ReduceOp):
        return choose_loop(site, layout_of, bits, width)
    # the source decides; the result follows, or is converted
    if op.src.scope == FRAGMENT:
        choice = choose_loop(site, lambda b: layout_of(b) if b.same_as(op.src.buffer) else None)
    else:
        choice = LoopChoice(reduce_loop(site), "coalesced over the source")
    if op.dst.scope == FRAGMENT and (choice.window is not None or not result_at_hand(site, layout_of, choice.layout)):
        choice.convert = [*(choice.convert or []), op.dst.buffer]
    return choice


loop_layout = Rule("loop_layout", _apply)
