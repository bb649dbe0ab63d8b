"""Warp specialisation: a producer warpgroup that loads by TMA, consumer warpgroups that work (``tile.roles``).

Copies of pipelined loops become rings of as many slots as the loop has stages; copies that are needed together share a
ring. Tiles that are loaded once before the loops become rings of one slot, so that their loads overlap the first loads
of the loops.
"""

from __future__ import annotations

from ..ir.ops import GemmOp, SyncOp
from .analysis import GLOBAL, SHARED, KernelView, Site, scope_of
from .decisions import (
    BACK_REGISTERS,
    FRONT_REGISTERS,
    FRONT_THREADS,
    PRODUCER_REGISTERS,
    encode,
    read_convert,
    read_instruction,
    read_partition,
    read_pipeline,
    read_ring_loads,
    read_shared,
)
from .producers import why_not_ahead, why_not_ring
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule
from .split_memory import exchanged, exchanges, fitted, signal_slots
from .tma import why_not_tma

__all__ = ["PRODUCER_THREADS", "largest_n", "roles"]

#: Threads of the producer: a whole warpgroup, because registers change hands between warpgroups.
PRODUCER_THREADS = 128

#: Registers a thread of (producer, consumer) by number of consumer warpgroups. A CTA starts with 65536 / threads
#: registers a thread, in units of 8; what the producer gives up its consumers get. One consumer warpgroup has 255.
REGISTERS = {1: None, 2: (24, 240), 3: (32, 160)}
#: Registers that ptxas needs beside an instruction's accumulator; it counts what a thread is launched with, before
#: registers change hands (ptxas 13.0: 154 for an accumulator of 128).
INSTRUCTION_REGISTERS = 26


def largest_n(hw, threads: int) -> int:
    """Largest n of a wgmma whose accumulator ptxas accepts beside a producer: M = 64 rows take n / 2 registers.

    Parameters
    ----------
    hw : GPU
        The machine.
    threads : int
        Consumer threads.
    """
    launched = hw.registers_per_block // (threads + PRODUCER_THREADS) // 8 * 8
    return 2 * (launched - INSTRUCTION_REGISTERS)


def _apply(sch: TileSchedule, hw):
    sch.refresh()  # the loops' plans were annotated after the analysis
    answers = []
    for kernel in sch.kernels:
        answers.append(_decide(sch, kernel, hw))
        answers += _loads(kernel)
    return answers or NotApplicable("no kernels")


def _decide(sch: TileSchedule, kernel: KernelView, hw):
    given = sch.given_kernel(kernel, "tile.roles")
    if given is not None:
        return Decision(kernel.name, "roles", _text(kernel, given), GIVEN)
    reason = _why_not(kernel, hw)
    if reason:
        return NotApplicable(f"not specialised: {reason}", kernel.name, "roles")
    layouts = read_shared(kernel.info.block)
    rings: list[dict] = []
    taken: set[str] = set()
    tiles: list = []
    for loop, plan, group in _pipelined(kernel):
        for copy in group:
            why = why_not_tma(copy.op, layouts[copy.op.dst.buffer.name])
            if why:
                return NotApplicable(f"not specialised: {copy.name} cannot be a TMA load: {why}", kernel.name, "roles")
            why = why_not_ahead(kernel, copy) or why_not_ring(kernel, loop, copy, tiles)
            if why:
                return NotApplicable(f"not specialised: {copy.name}: {why}", kernel.name, "roles")
            tiles.append(copy.op.dst.buffer)
        taken |= {c.name for c in group}
        name = f"ring_{group[0].op.dst.buffer.name}"
        rings.append({"name": name, "copies": [c.name for c in group], "slots": int(plan["stages"])})
    for site in _once(kernel, taken):
        if why_not_tma(site.op, layouts[site.op.dst.buffer.name]) is None:
            rings.append({"name": f"load_{site.op.dst.buffer.name}", "copies": [site.name], "slots": 1})
    if kernel.split:
        known = {c for ring in rings for c in ring["copies"]}
        left = next((s for s in kernel.sites if s.role is None and s.name not in known), None)
        if left is not None:
            why = "no TMA load that can be issued ahead, and neither the front nor the back has it"
            return NotApplicable(f"not specialised: {left.name} is {why}", kernel.name, "roles")
    value = {"rings": rings, "registers": REGISTERS[kernel.threads // 128], "turns": int(_independent(kernel))}
    if kernel.split:
        value |= {"registers": [PRODUCER_REGISTERS, BACK_REGISTERS, FRONT_REGISTERS], "turns": 0}
        value = exchanged(kernel, hw, fitted(kernel, hw, {**value, "exchanges": exchanges(kernel)}))
        value["signal"] = signal_slots(kernel, value)
    sch.annotate_kernel(kernel, "tile.roles", encode(value))
    why = "all loads of the pipelined loops can be issued by TMA ahead of the products"
    return Decision(kernel.name, "roles", _text(kernel, value), why)


def _loads(kernel: KernelView) -> list[Decision]:
    """What the producer loads, in place of what the copy rule chose for threads that load and work."""
    answers, layouts = [], read_shared(kernel.info.block)
    sites = {s.name: s for s in kernel.sites}
    for name, ring in read_ring_loads(kernel.info.block).items():
        op = sites[name].op
        boxes = list(layouts[op.dst.buffer.name].tma_boxes())
        _, _, rows, columns, _ = boxes[0]
        text = (
            f"{op.src.buffer.name} -> {op.dst.buffer.name} by TMA, {len(boxes)} box{'es' if len(boxes) > 1 else ''} of "
            f"{rows} x {columns} into {ring['slots']} slot{'s' if int(ring['slots']) > 1 else ''}"
        )
        answers.append(Decision(kernel.name, name, text, "one thread of the producer issues it ahead"))
    return answers


def _text(kernel: KernelView, value: dict) -> str:
    if not value:
        return "all threads load and work"
    rings = "; ".join(f"{r['name']}: {' + '.join(r['copies'])} x {r['slots']}" for r in value["rings"])
    if not value.get("exchanges"):
        return f"one producer warpgroup, {kernel.threads // 128} consumer warpgroups; {rings}"
    crossing = "; ".join(
        f"{e['name']}: {' + '.join(e['tiles'])} x {e['slots']}"
        + (f" ({e['over']['tile']} in the slots of {e['over']['ring']})" if "over" in e else "")
        for e in value["exchanges"]
    )
    return (
        f"one producer warpgroup, one front warpgroup, {kernel.threads // 128} back warpgroups; {rings}; from front to "
        f"back {crossing}"
    )


def _why_not(kernel: KernelView, hw) -> str | None:
    if not (hw.supports("tma") and hw.supports("mbarrier") and hw.supports("setmaxnreg")):
        return f"{hw.name} has no TMA"
    if kernel.threads % 128 or kernel.threads // 128 not in REGISTERS:
        return f"{kernel.threads} threads are not one to three warpgroups of 128"
    if any(s.kind in ("group", "while") for site in kernel.sites for s in site.path):
        return "T.ws and while loops keep all threads in one role"
    gemms = [s for s in kernel.sites if isinstance(s.op, GemmOp)]
    if not any((i := read_instruction(s.op.annotations)) is not None and i.family == "wgmma" for s in gemms):
        return "no product uses wgmma"
    threads = kernel.threads + (FRONT_THREADS if kernel.split else 0)
    for site in gemms:
        part = read_partition(site.op.annotations)
        if part is not None and part.instruction_n > largest_n(hw, threads):
            return (
                f"an instruction of {site.name} accumulates {part.instruction_n // 2} registers, too many beside "
                f"{threads + PRODUCER_THREADS} threads"
            )
    plans = [read_pipeline(scope.annotations) for _, scope in kernel.loops]
    plans = [p for p in plans if p]
    if not any(p.get("producers") for p in plans):
        return "no loop is pipelined"
    if any(p.get("stage") for p in plans):
        return "a manual order or stage fixes the schedule"
    return None


def _independent(kernel: KernelView) -> bool:
    """Whether two consumer warpgroups never need each other's results: they may take turns at the tensor cores."""
    if kernel.threads != 256:
        return False
    parts = [read_partition(s.op.annotations) for s in kernel.sites if isinstance(s.op, GemmOp)]
    if any(p is None or p.n_groups != 1 for p in parts):
        return False
    # what passes through memory in a loop needs barriers of both, at which one may wait for the other's turn
    return not any(_meets(kernel, s) for s in kernel.sites if s.loops and not s.is_load)


def _meets(kernel: KernelView, site: Site) -> bool:
    """Whether warps may have to meet because of what an operation writes."""
    if isinstance(site.op, SyncOp) or read_convert(site.op.annotations):
        return True
    written = [a.buffer for a in site.accesses if a.write and a.scope in (SHARED, GLOBAL)]
    return any(not a.write or scope_of(b) == SHARED for b in written for _, a in kernel.uses(b))


def _pipelined(kernel: KernelView):
    """(loop, plan, copies) of every group of producers that are first needed by the same operation."""
    for _, scope in kernel.loops:
        plan = read_pipeline(scope.annotations)
        if not plan or not plan.get("producers"):
            continue
        names = set(plan["producers"])
        group: list[Site] = []
        need = None
        for site in kernel.sites:
            if site.name not in names or scope not in site.path:
                continue
            first = _first_use(kernel, site)
            if group and (first is not need or site.path != group[-1].path or _between(kernel, group[-1], site)):
                yield scope, plan, group
                group = []
            group.append(site)
            need = first
        if group:
            yield scope, plan, group


def _between(kernel: KernelView, left: Site, right: Site) -> bool:
    """Whether an operation that is not a load stands between two loads."""
    return any(left.position < s.position < right.position and not s.is_load for s in kernel.sites)


def _first_use(kernel: KernelView, copy: Site) -> Site | None:
    buffer = copy.op.dst.buffer
    return next((s for s, a in kernel.uses(buffer) if s.position > copy.position and not a.write), None)


def _once(kernel: KernelView, taken: set[str]):
    """Loads outside of any loop or branch that fill a tile once and for all."""
    for site in kernel.sites:
        if not site.is_load or site.path or site.name in taken:
            continue
        buffer = site.op.dst.buffer
        writers = [s for s, a in kernel.uses(buffer) if a.write]
        readers = [s for s, a in kernel.uses(buffer) if not a.write]
        source_written = any(site.op.src.buffer.same_as(b) for b in kernel.written_globals)
        seen = any(buffer.same_as(b) for b in kernel.uniform_reads)
        if source_written or seen or why_not_ahead(kernel, site):
            continue
        if len(writers) == 1 and readers and all(r.position > site.position for r in readers):
            yield site


def roles() -> Rule:
    """The rule."""
    return Rule("roles", _apply)
