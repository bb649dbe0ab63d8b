"""Software pipelines: which copies of a ``T.Pipelined`` loop are issued ahead, and into how many copies of their tiles.

Annotation ``tile.pipeline`` on the loop, see :class:`~tvm_tile.schedule.decisions.PipelineDecision`.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.tirx import BufferStore, is_buffer_var

from ..errors import TileShapeError
from ..ir.ops import CopyOp, GemmOp
from ..ir.visit import walk
from .analysis import GLOBAL, KernelView, Scope, Site, dtype_bits, scope_of, static_shape
from .decisions import PipelineDecision, read_copy, read_pipeline
from .manual_pipeline import plan_manual
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["Producer", "balance", "find_producers", "pipeline"]


@dataclass
class Producer:
    """A copy that can be issued ahead of its iteration, or why it cannot (``reason``)."""

    site: Site
    reason: str | None = None


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        for path, scope in kernel.loops:
            if "tile.num_stages" in scope.annotations:
                answers.append(_decide(sch, kernel, path, scope, hw))
    return answers or NotApplicable("no T.Pipelined")


def _decide(sch: TileSchedule, kernel: KernelView, path, scope: Scope, hw):
    notes = scope.annotations
    name = f"loop {scope.node.loop_var.name}"
    inside = [s for s in kernel.sites if scope in s.path]
    if not inside:
        return NotApplicable("the loop has no tile operation", kernel.name, name)
    producers = find_producers(kernel, path, scope, inside)
    ready = [p.site for p in producers if p.reason is None]
    given = read_pipeline(notes)
    if given is not None and "stage" not in given:
        _check_given(kernel, scope, given, producers)
    if "tile.order" in notes or "tile.stage" in notes:
        plan = plan_manual(kernel, scope, inside, ready)
        why = "the author's order and stage, checked against the loop's dependences"
        return _finish(sch, kernel, scope, name, plan, why, False)
    stages = int(notes["tile.num_stages"])
    if stages < 2:
        return NotApplicable(f"num_stages={stages}: copies and work alternate", kernel.name, name)
    blocked = "; ".join(
        f"{p.site.name} ({p.site.op.dst.buffer.name}) not ahead: {p.reason}" for p in producers if p.reason
    )
    if not ready:
        return NotApplicable(blocked or "no copy from global memory to a shared tile", kernel.name, name)
    plan = PipelineDecision(stages, {s.op.dst.buffer.name: stages for s in ready}, tuple(s.name for s in ready))
    why = balance(kernel, scope, inside, ready, stages, hw)
    return _finish(sch, kernel, scope, name, plan, f"{why}; {blocked}" if blocked else why, bool(blocked))


def _finish(
    sch: TileSchedule, kernel: KernelView, scope: Scope, name: str, plan: PipelineDecision, why: str, warning: bool
):
    given = read_pipeline(scope.annotations)
    if given is None:
        sch.annotate_loop(kernel, scope, "tile.pipeline", plan)
    elif given != plan.to_json():
        plan = PipelineDecision(
            int(given["stages"]),
            given.get("buffers", {}),
            tuple(given.get("producers", ())),
            given.get("order"),
            given.get("stage"),
        )
        why = GIVEN
    ahead = ", ".join(plan.producers) or "nothing"
    copies = ", ".join(f"{b} x {n}" for b, n in plan.buffers.items()) or "none"
    text = f"{plan.stages} stages; issued ahead: {ahead}; copies of tiles: {copies}"
    if plan.stage is not None:
        text += f"; order {list(plan.order)}, stage {list(plan.stage)}"
    return Decision(kernel.name, name, text, why, warning)


def _check_given(kernel: KernelView, scope: Scope, given: dict, producers: list[Producer]) -> None:
    """A given plan issues only copies ahead that can be, into tiles with as many copies as there are stages."""
    known = {p.site.name: p for p in producers}
    stages, buffers = int(given.get("stages", 1)), given.get("buffers", {})
    for name in given.get("producers", ()):
        producer = known.get(name)
        reason = "it is no copy from a tensor to a shared tile of the loop" if producer is None else producer.reason
        if reason is None and int(buffers.get(producer.site.op.dst.buffer.name, 1)) < stages:
            reason = f"{producer.site.op.dst.buffer.name} has {buffers.get(producer.site.op.dst.buffer.name, 1)} copies"
        if reason:
            raise TileShapeError(
                f"T.Pipelined: the given plan issues {name} ahead in {stages} stages, but {reason}", scope.location
            )
    filled = {known[n].site.op.dst.buffer.name for n in given.get("producers", ())}
    wrong = sorted(set(buffers) - filled)
    if wrong:
        raise TileShapeError(
            f"T.Pipelined: the given plan has copies of {', '.join(wrong)}, which no copy that it issues ahead fills",
            scope.location,
        )


# ---- which copies can be issued ahead


def find_producers(kernel: KernelView, path, scope: Scope, inside: list[Site]) -> list[Producer]:
    """The copies from tensors to shared tiles of a loop, each with what keeps it from being issued ahead, if any."""
    copies = [s for s in inside if s.is_load]
    found = [Producer(s, _why_not(kernel, path, scope, inside, s)) for s in copies]
    # copies that fill one tile together stand or fall together
    for producer in found:
        if producer.reason is None:
            others = [
                p for p in found if p.site.op.dst.buffer.same_as(producer.site.op.dst.buffer) and p.reason is not None
            ]
            if others:
                producer.reason = f"{others[0].site.name} fills the same tile and cannot be issued ahead"
    return found


def _why_not(kernel: KernelView, path, scope: Scope, inside: list[Site], site: Site) -> str | None:
    op: CopyOp = site.op
    buffer = op.dst.buffer
    plan = read_copy(op.annotations)
    if plan is None or plan.kind not in ("cp.async", "tma"):
        return "it is no asynchronous copy"
    between = site.path[site.path.index(scope) + 1 :]
    if any(s.kind != "if" for s in between):
        return "it stands in an inner loop"
    if kernel.views(kernel.base(buffer)):
        return f"{buffer.name} is viewed under another shape"
    if any(buffer.same_as(b) for b in kernel.uniform_reads):
        return f"a uniform statement or condition reads {buffer.name}"
    reason = _why_not_whole(inside, site)
    if reason:
        return reason
    reason = _why_not_private(kernel, path, scope, site, between)
    if reason:
        return reason
    if any(op.src.buffer.same_as(w) for w in kernel.written_globals):
        return f"the kernel writes {op.src.buffer.name}"
    expressions = [*op.src.mins, *op.dst.mins, *(s.node.condition for s in between)]
    expressions += [g for g in (op.src_guard, op.dst_guard) if g is not None]
    for expression in expressions:
        reason = _why_not_early(kernel, scope, expression)
        if reason:
            return reason
    return None


def _why_not_whole(inside: list[Site], site: Site) -> str | None:
    """Each iteration has to fill the whole tile, by copies of one branch, before anything else touches it."""
    buffer = site.op.dst.buffer
    total = 1
    for extent in static_shape(buffer):
        total *= extent
    fillers, seen_use = [], None
    for other in inside:
        for access in other.accesses:
            if not access.buffer.same_as(buffer):
                continue
            fills = (
                isinstance(other.op, CopyOp)
                and access.write
                and other.op.src.scope == GLOBAL
                and other.path == site.path
            )
            if fills and seen_use is None:
                fillers.append(other)
            elif fills:
                return f"{seen_use} uses {buffer.name} before it is filled"
            else:
                seen_use = seen_use or other.name
    if site not in fillers:
        return f"{seen_use} uses {buffer.name} before it is filled"
    boxes = [_box(f) for f in fillers]
    if any(b is None for b in boxes):
        return f"part of {buffer.name} is filled at a run-time index"
    if len(boxes) > 1 and any(_meet(a, b) for i, a in enumerate(boxes) for b in boxes[:i]):
        return f"several copies write one part of {buffer.name}"
    covered = sum(_volume(b) for b in boxes)
    if covered != total or any(f.op.dst_guard is not None for f in fillers):
        return f"an iteration fills {covered} of the {total} elements of {buffer.name}"
    return None


def _box(site: Site) -> list[tuple[int, int]] | None:
    box = []
    for start, extent in zip(site.op.dst.mins, site.op.dst.extents, strict=True):
        start, extent = tirx.convert(start), tirx.convert(extent)
        if not isinstance(start, tirx.IntImm) or not isinstance(extent, tirx.IntImm):
            return None
        box.append((int(start.value), int(start.value) + int(extent.value)))
    return box


def _meet(a, b) -> bool:
    return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a, b, strict=True))


def _volume(box) -> int:
    out = 1
    for low, high in box:
        out *= high - low
    return out


def _why_not_private(kernel: KernelView, path, scope: Scope, site: Site, between) -> str | None:
    """All uses see the tile of their own iteration: in the copy's branch, or after the loop beside it."""
    buffer = site.op.dst.buffer
    branch = site.path
    for user, _ in kernel.uses(buffer):
        if scope in user.path:
            if user.path[: len(branch)] != branch:
                return f"{user.name} uses {buffer.name} outside of the branch that fills it"
            continue
        if _fills_first(kernel, user, buffer):
            continue
        after = user.position > scope.position and user.path[: len(path)] == path
        if not after:
            return f"{user.name} uses {buffer.name} before the loop"
        if between:
            return f"{user.name} reads {buffer.name} after the loop, and an iteration may skip filling it"
    return None


def _fills_first(kernel: KernelView, user: Site, buffer: Var) -> bool:
    """Whether another loop fills the tile anew in each of its iterations, so that nothing flows between the loops."""
    for loop in user.path:
        if loop.kind != "loop":
            continue
        inside = [s for s in kernel.sites if loop in s.path]
        filler = next((s for s in inside if isinstance(s.op, CopyOp) and s.op.dst.buffer.same_as(buffer)), None)
        if (
            filler is not None
            and _why_not_whole(inside, filler) is None
            and user.path[: len(filler.path)] == filler.path
        ):
            return True
    return False


def _why_not_early(kernel: KernelView, scope: Scope, expression) -> str | None:
    """Whether an expression of a later iteration has its value already now."""
    loads: list[TensorLoad] = []
    variables: list[Var] = []
    calls: list = []
    walk(expression, (TensorLoad, loads.append), (Var, variables.append), (tvm.ir.Call, calls.append))
    for load in loads:
        if not is_buffer_var(load.source) or (scope_of(load.source) != GLOBAL and _changes(kernel, scope, load.source)):
            return f"its place depends on {load.source.name}, which an earlier iteration may still change"
        if any(load.source.same_as(w) for w in kernel.written_globals):
            return f"its place depends on {load.source.name}, which the kernel writes"
    for call in calls:
        if str(getattr(call.op, "name", "")).startswith("tirx.call_extern"):
            return "its place depends on a call with side effects"
    for var in variables:
        if var in kernel.bound:
            value, raw = kernel.bound[var]
            if scope in raw.path and (reason := _why_not_early(kernel, scope, value)):
                return reason
    return None


def _changes(kernel: KernelView, scope: Scope, buffer: Var) -> bool:
    """Whether on-chip memory that an index reads may change while the loop runs; only variables are known not to."""
    if scope_of(buffer) not in ("local", "local.var"):
        return True
    stores = [r.stmt for r in kernel.raw if scope in r.path and isinstance(r.stmt, BufferStore)]
    return any(s.buffer.same_as(buffer) for s in stores) or any(
        access.write and scope in site.path for site, access in kernel.uses(buffer)
    )


# ---- what it gains


def balance(kernel: KernelView, scope: Scope, inside: list[Site], producers: list[Site], stages: int, hw) -> str:
    """Roofline of one iteration on one SM: bytes, copy time, product time, and what that says about num_stages."""
    moved = sum(_bytes(s) for s in producers)
    copy = moved / (hw.memory_bandwidth / hw.sms)
    work = sum(_seconds(s, hw) for s in inside if isinstance(s.op, GemmOp))
    trips = scope.node.extent
    text = f"{trips} iterations, " if isinstance(trips, tirx.IntImm) else ""
    text += f"{moved} bytes each: copy {copy * 1e6:.2f} us from memory, products {work * 1e6:.2f} us an SM"
    if isinstance(trips, tirx.IntImm) and int(trips.value) < stages:
        return f"{text}; fewer iterations than stages: num_stages={max(1, int(trips.value))} is enough"
    if isinstance(trips, tirx.IntImm) and int(trips.value) < 10:
        text += "; fewer than 10 iterations: filling the pipeline shows"
    if work == 0:
        return f"{text}; bound by memory"
    if copy > work:
        return f"{text}; bound by memory unless the tiles come from L2, a larger tile reuses them more"
    if copy * (stages - 1) < 0.5e-6:
        return f"{text}; a copy takes about 1 us to arrive: try num_stages={min(stages + 1, 4)}" if stages < 4 else text
    return f"{text}; copies hide behind the products"


def _bytes(site: Site) -> int:
    size = dtype_bits(site.op.dst.dtype) // 8
    for extent in site.extents:
        size *= extent or 1
    return size


def _seconds(site: Site, hw) -> float:
    op: GemmOp = site.op
    dtype = "tf32" if op.precision == "tf32" else op.a.dtype
    rate = hw.tensor_flops.get(dtype, hw.fp32_flops)
    return 2 * op.m * op.n * op.k / (rate / hw.sms)


pipeline = Rule("pipeline", _apply)
