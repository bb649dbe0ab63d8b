"""How each copy moves its elements: ``tile.copy``, ``tile.loop`` and what goes with them on copy blocks."""

from __future__ import annotations

from ..errors import TileTargetError
from ..ir.ops import CopyOp
from ..layout import REG, THREAD, Fragment, SharedLayout, copy_fragment
from .analysis import FRAGMENT, GLOBAL, SHARED, KernelView, Site, dtype_bits
from .decisions import COPY_KINDS, CopyPlan, read_fragments, read_shared
from .loops import LoopChoice, at_hand, choose_loop, default_loop, plain_dims
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule
from .vectors import MAX_VECTOR_BITS, VectorProver

__all__ = ["copy_instruction"]

#: cp.async moves 4, 8 or 16 bytes.
CP_ASYNC_BYTES = (4, 8, 16)
#: Bytes of a memory sector: shorter runs waste bandwidth.
SECTOR_BYTES = 32


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        sites = [s for s in kernel.sites if isinstance(s.op, CopyOp)]
        if not sites:
            answers.append(NotApplicable("no T.copy", kernel.name))
            continue
        planner = _Planner(kernel, sch, hw)
        answers += [planner.decide(site) for site in sites]
    return answers


class _Planner:
    def __init__(self, kernel: KernelView, sch: TileSchedule, hw) -> None:
        self.kernel, self.sch, self.hw = kernel, sch, hw
        self.prover = VectorProver(kernel.info, sch.function)
        self.fragments = read_fragments(kernel.info.block)
        self.shared = read_shared(kernel.info.block)

    def decide(self, site: Site) -> Decision:
        given = self.sch.given(site, "tile.copy")
        plan, loop, why = self._plan(site)
        if given is not None and given["kind"] == "tma" and _is_store(site.op) and self.hw.supports("tma"):
            # decided by the rule tma_store in the place of this plan: see there
            return Decision(self.kernel.name, site.name, self._text(site, plan), why)
        if given is not None:
            wanted = CopyPlan(str(given["kind"]), int(given.get("vector", 1)))
            self._check(site, wanted, plan)
            if wanted.kind not in ("staged", plan.kind):
                loop = self._loop(site, wanted.vector)
            plan, why = wanted, GIVEN
        self.sch.annotate(site, "tile.copy", plan)
        if "tile.loop" not in site.op.annotations:
            annotate_loop(self.sch, site, loop, plan.vector)
        return Decision(self.kernel.name, site.name, self._text(site, plan), why)

    def _text(self, site: Site, plan: CopyPlan) -> str:
        op: CopyOp = site.op
        size = f", {plan.vector * _memory_bits(op) // 8} bytes an access"
        return (
            f"{op.src.buffer.name} -> {op.dst.buffer.name} by {plan.kind}"
            f"{'' if plan.kind in ('registers', 'ldmatrix', 'stmatrix') else size}"
        )

    def _check(self, site: Site, wanted: CopyPlan, plan: CopyPlan) -> None:
        """A given plan is one that is right: no stronger than what was proven."""
        op: CopyOp = site.op
        proven = {plan.kind, "scalar", "vector"}
        if FRAGMENT in (op.src.scope, op.dst.scope):
            proven.add("staged")
        if op.src.scope == op.dst.scope == FRAGMENT:
            proven = {plan.kind, "staged"}
        limit = max(plan.vector, self._width(site)[0])
        if wanted.kind not in COPY_KINDS or wanted.kind not in proven or wanted.vector > limit or limit % wanted.vector:
            raise TileTargetError(
                f"T.copy: the given copy instruction {wanted.kind} of {wanted.vector} elements does not fit "
                f"{op.src.buffer.name} -> {op.dst.buffer.name} on {self.hw.name}",
                site.location,
                f"possible here: {', '.join(sorted(proven))} of up to {limit} elements",
            )

    # ---- the plan

    def _plan(self, site: Site) -> tuple[CopyPlan, LoopChoice, str]:
        op: CopyOp = site.op
        src, dst = op.src.scope, op.dst.scope
        if "local" in (src, dst) or "local.var" in (src, dst):
            loop = self._loop(site, 1)
            return (
                CopyPlan("staged" if loop.convert else "scalar"),
                loop,
                "per-thread memory: every thread copies all of it",
            )
        if src == dst == FRAGMENT:
            return self._between_fragments(site)
        width, limits = self._width(site)
        if (src, dst) == (GLOBAL, SHARED):
            return self._to_shared(site, width, limits)
        if FRAGMENT in (src, dst):
            return self._with_fragment(site, width, limits)
        loop = self._loop(site, width)
        vector = self._vector(site, loop, width)
        return self._by_width(vector), loop, self._why(vector, width, limits)

    @staticmethod
    def _by_width(vector: int) -> CopyPlan:
        return CopyPlan("vector", vector) if vector > 1 else CopyPlan("scalar")

    def _width(self, site: Site) -> tuple[int, str]:
        """(elements that memory lets an access join, what limits them)."""
        op: CopyOp = site.op
        axis = len(op.axes) - 1
        if axis < 0:
            return 1, "a single element"
        bits = _memory_bits(op)
        width, reason = MAX_VECTOR_BITS // bits, "16 bytes are the widest access"
        for access in site.accesses:
            if access.scope not in (GLOBAL, SHARED):
                continue
            found = self.prover.access_width(site, access, axis, self._shared(access.buffer))
            found = 1 if found is None else found
            if found < width:
                width, reason = found, f"rows or starts of {access.buffer.name} are multiples of {found} elements only"
        guards = [g for g in (op.src_guard, op.dst_guard) if g is not None]
        found = self.prover.guard_width(site, axis, guards, width)
        if found < width:
            width, reason = found, f"the bounds are multiples of {found} elements only"
        return width, reason

    def _shared(self, buffer) -> SharedLayout | None:
        return self.shared.get(buffer.name)

    def _layout(self, buffer) -> Fragment | None:
        return self.fragments.get(buffer.name)

    def _loop(self, site: Site, width: int) -> LoopChoice:
        op: CopyOp = site.op
        bits = _memory_bits(op)
        base = None
        for region in (op.dst, op.src):
            layout = self._shared(region.buffer) if region.scope == SHARED else None
            if layout is not None and tuple(site.extents) == layout.shape and region.whole:
                base = copy_fragment(layout, site.threads, bits * width)
                break
        return choose_loop(site, self._layout, bits, width, base)

    def _vector(self, site: Site, loop: LoopChoice, width: int) -> int:
        """Elements an access moves: what memory allows and the loop's layout has side by side."""
        layout = loop.layout
        if layout.ndim == 0:
            return 1
        if loop.window is not None:
            access = next(a for a in site.accesses if a.buffer.same_as(loop.window))
            last = access.terms[-1]
            if last.axis != len(site.op.axes) - 1:
                return 1
            while width > 1 and not self.prover.multiple(last.start, width):
                width //= 2
        return min(width, layout.vector_width(layout.ndim - 1, 1, width))

    @staticmethod
    def _why(vector: int, width: int, limits: str) -> str:
        return limits if vector == width else f"{vector} elements keep all threads busy; {limits}"

    def _to_shared(self, site: Site, width: int, limits: str) -> tuple[CopyPlan, LoopChoice, str]:
        op: CopyOp = site.op
        loop = self._loop(site, width)
        vector = self._vector(site, loop, width)
        size = vector * dtype_bits(op.src.dtype) // 8
        why_not = None
        if not self.hw.supports("cp_async"):
            why_not = f"{self.hw.name} has no cp.async"
        elif op.src.dtype != op.dst.dtype:
            why_not = f"cp.async does not convert {op.src.dtype} to {op.dst.dtype}"
        elif op.src_guard is not None and op.safe_value != 0:
            why_not = f"cp.async fills with zero, and the safe value is {op.safe_value}"
        elif op.dst_guard is not None:
            why_not = "the store is guarded"
        elif size not in CP_ASYNC_BYTES:
            why_not = f"cp.async moves at least 4 bytes, and {limits}"
        if why_not is None:
            return CopyPlan("cp.async", vector), loop, self._why(vector, width, limits)
        return self._by_width(vector), loop, why_not

    def _between_fragments(self, site: Site) -> tuple[CopyPlan, LoopChoice, str]:
        op: CopyOp = site.op
        source = self._access(site, False)
        loop = choose_loop(site, lambda b: self._layout(b) if b.same_as(op.dst.buffer) else None)
        held = self._layout(op.src.buffer)
        if loop.window is None:
            dims = plain_dims(site, source) if None not in site.extents else None
            if dims is not None and at_hand(held, loop.layout, dims):
                return CopyPlan("registers"), loop, "each thread holds what it needs"
            why = "the layouts differ: through shared memory" if dims is not None else "a slice: through shared memory"
        else:
            both = choose_loop(site, self._layout)
            if both.window is not None and not both.convert:
                return CopyPlan("registers"), both, "equal slices of equal layouts"
            why = "a slice: through shared memory"
        return CopyPlan("staged"), LoopChoice(loop.layout, loop.why, loop.window), why

    @staticmethod
    def _access(site: Site, write: bool):
        return next(a for a in site.accesses if a.write == write)

    def _with_fragment(self, site: Site, width: int, limits: str) -> tuple[CopyPlan, LoopChoice, str]:
        op: CopyOp = site.op
        store = op.src.scope == FRAGMENT
        fragment, memory = (op.src, op.dst) if store else (op.dst, op.src)
        loop = self._loop(site, width)
        vector = self._vector(site, loop, width)
        if loop.convert:
            staged, chunks = default_loop(site, dtype_bits(memory.dtype), width)
            choice = LoopChoice(staged, "coalesced", chunks=chunks)
            return (
                CopyPlan("staged", self._vector(site, choice, width)),
                choice,
                "the slice is not at hand in any layout",
            )
        if memory.scope == SHARED and loop.window is None:
            why_not = self._why_not_matrix(site, store, fragment, memory)
            if why_not is None:
                kind = "stmatrix" if store else "ldmatrix"
                return CopyPlan(kind, 8), loop, f"{fragment.buffer.name} is made of the instruction's 8 x 8 matrices"
        if memory.scope == GLOBAL and store:
            staged = self._staged_store(site, loop, vector, width)
            if staged is not None:
                return staged
        if vector < width:
            limits = f"{fragment.buffer.name} has {vector} element{'s' if vector > 1 else ''} of a row side by side"
        return self._by_width(vector), loop, limits

    def _why_not_matrix(self, site: Site, store: bool, fragment, memory) -> str | None:
        """Why ldmatrix or stmatrix cannot move a fragment."""
        if not self.hw.supports("stmatrix" if store else "ldmatrix"):
            return "no such instruction"
        if dtype_bits(memory.dtype) != 16 or (not store and fragment.dtype != memory.dtype):
            return "16-bit elements only"
        layout, held = self._layout(fragment.buffer), self._shared(memory.buffer)
        if (
            layout.ndim != 2
            or layout.is_padded
            or layout.used_threads % 32
            or layout.threads % 32
            or not fragment.whole
        ):
            return "not a whole matrix on whole warps"
        if site.op.src_guard is not None or site.op.dst_guard is not None:
            return "guarded"
        rows, cols = layout.digits
        tile = len(cols) >= 2 and cols[-1] == (2, REG, 1) and cols[-2].place == THREAD and cols[-2].stride == 1
        if (
            not tile
            or cols[-2].size != 4
            or not rows
            or rows[-1].place != THREAD
            or rows[-1].stride != 4
            or rows[-1].size != 8
        ):
            return "not made of 8 x 8 matrices"
        access = next(a for a in site.accesses if a.buffer.same_as(memory.buffer))
        if self.prover.access_width(site, access, 1, held) != 8:
            return "rows are no whole 16-byte chunks"
        return None

    def _staged_store(self, site: Site, loop: LoopChoice, vector: int, width: int):
        """A store to global memory through shared scratch, where direct stores would leave sectors half written."""
        op: CopyOp = site.op
        bits = dtype_bits(op.dst.dtype)
        if loop.window is not None or None in site.extents or len(site.extents) < 2:
            return None
        run = _row_run(loop.layout) * bits // 8
        if vector * bits // 8 >= 16 or run >= SECTOR_BYTES or width * bits // 8 < 16:
            return None
        if site.extents[-1] * bits // 8 <= run:
            return None
        scratch = bits // 8
        for extent in site.extents:
            scratch *= extent
        room = self.hw.shared_per_block - self._live_shared(site)
        if scratch > room:
            return None
        layout, chunks = default_loop(site, bits, width)
        choice = LoopChoice(layout, "coalesced", chunks=chunks)
        stored = self._vector(site, choice, width)
        if stored <= vector:
            return None
        return (
            CopyPlan("staged", stored),
            choice,
            (
                f"{op.src.buffer.name} has {run} bytes of a row side by side, less than a sector of "
                f"{SECTOR_BYTES}: through shared memory"
            ),
        )

    def _live_shared(self, site: Site) -> int:
        """Bytes of shared tiles that may still be needed at or after an operation."""
        total = 0
        outer = site.loops[0] if site.loops else None
        for buffer in self.kernel.buffers(SHARED):
            layout = self._shared(buffer)
            later = any(
                user.position >= site.position or (outer is not None and outer in user.path)
                for user, _ in self.kernel.uses(buffer)
            )
            total += layout.bytes * max(1, _stages(self.kernel, buffer)) if later and layout is not None else 0
        return total


def _is_store(op: CopyOp) -> bool:
    return (op.src.scope, op.dst.scope) == (FRAGMENT, GLOBAL)


def _memory_bits(op: CopyOp) -> int:
    """Bits of the wider element that lies in memory; registers limit no access."""
    return max([dtype_bits(r.dtype) for r in (op.src, op.dst) if r.scope in (GLOBAL, SHARED)], default=32)


def _stages(kernel: KernelView, buffer) -> int:
    """The most copies that a pipeline may give a buffer."""
    counts = [
        scope.annotations.get("tile.num_stages", 1)
        for user, _ in kernel.uses(buffer)
        for scope in user.loops
        if scope.kind == "loop"
    ]
    return max([1, *counts])


def _row_run(layout: Fragment) -> int:
    """Elements of a row that neighbouring registers and threads of a warp hold side by side."""
    run = 1
    for place, digit in enumerate(reversed(layout.digits[-1])):
        side_by_side = (
            digit.stride == 1 if digit.place == REG and place == 0 else digit.place == THREAD and digit.stride < 32
        )
        if not side_by_side:
            break
        run *= digit.size
    return run


def annotate_loop(sch: TileSchedule, site: Site, loop: LoopChoice, vector: int) -> None:
    """Write a loop choice on an operation's block."""
    sch.annotate(site, "tile.loop", loop.layout)
    if loop.window is not None:
        sch.annotate(site, "tile.window", str(loop.window.name))
    if vector > 1:
        sch.annotate(site, "tile.vector", vector)
    if loop.chunks:
        sch.annotate(site, "tile.chunks", list(loop.chunks))
    if loop.convert:
        sch.annotate(site, "tile.convert", sorted({b.name for b in loop.convert}))


copy_instruction = Rule("copy_instruction", _apply)
