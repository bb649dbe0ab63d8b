"""Two roles of consumer warps for a chain of products: a *front* makes an operand, the *back* accumulates.

In a pipelined loop whose products all have the rows of one instruction (MLA decode: 64 query heads), several warpgroups
cannot work on rows of their own: they split the columns, exchange row maxima, and all wait for each other several times
an iteration. Here one more warpgroup, the front, takes everything up to the final product's operand, the others keep
the final product and what touches its accumulator; while they multiply, the front is an iteration ahead. What crosses
goes through shared memory. The assignment follows from what each operation touches.

The function is rewritten before the other rules run, as tile IR that means the same: operations get ``tile.role``, and
a fragment that crosses is copied through a shared tile into one of the back's own, where it is more than an operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import Bind, For, SeqStmt

from ..ir.normalize import rebuild_block
from ..ir.ops import GemmOp, match_op
from ..ir.visit import rewrite, substitute
from .analysis import (
    FRAGMENT,
    GLOBAL,
    SHARED,
    KernelView,
    Scope,
    Site,
    dtype_bits,
    kernel_views,
    scope_of,
    static_shape,
)
from .decisions import BACK, BACK_REGISTERS, FRONT, FRONT_REGISTERS, FRONT_THREADS
from .gemm_instruction import why_not_wgmma
from .kept_operand import OTHERS, copy_of, kept_columns, split_load, split_product
from .new_buffers import new_buffer, with_buffers

__all__ = ["split_roles"]

#: Consumer threads as the kernel was written: two warpgroups, each with half of the accumulator's columns.
BACK_THREADS = 256
#: How much more of the products the front may have than the back: it is one warpgroup beside two.
MOST_WORK = 1.5


@dataclass
class _Crossing:
    """A fragment of the front that the back reads, in the loop or behind it."""

    buffer: Var
    readers: list[Site]
    channel: Var = None
    received: Var = None

    @property
    def is_operand(self) -> bool:
        """Whether the back only multiplies with it: wgmma takes it from shared memory."""
        op = self.readers[0].op
        return len(self.readers) == 1 and isinstance(op, GemmOp) and op.a.buffer.same_as(self.buffer)


@dataclass
class _Plan:
    kernel: KernelView
    loop: Scope
    roles: dict[str, str] = field(default_factory=dict)
    kept: tuple[Site, int] | None = None  # the product whose first columns of A stay in registers
    crossings: list[_Crossing] = field(default_factory=list)


def split_roles(func: tirx.PrimFunc, hw) -> tuple[tirx.PrimFunc | None, dict[str, str]]:
    """The function with front and back roles: (function or None, kernel -> why it has none).

    Parameters
    ----------
    func : PrimFunc
        Tile IR that no rule has seen.
    hw : GPU
        The machine.
    """
    reasons: dict[str, str] = {}
    changed = False
    for kernel in kernel_views(func):
        if kernel.split:  # decided before
            continue
        plan = _plan(kernel, hw)
        if isinstance(plan, str):
            reasons[kernel.name] = plan
        else:
            func = _rewritten(func, plan)
            changed = True
    return (func if changed else None), reasons


# ------------------------------------------------------------------------------------------------ the assignment


def _plan(kernel: KernelView, hw) -> _Plan | str:
    gemms = [s for s in kernel.sites if isinstance(s.op, GemmOp)]
    reason = _why_not_shape(kernel, gemms, hw)
    if reason:
        return reason
    loop = gemms[0].path[-1]
    final = gemms[-1]
    plan = _Plan(kernel, loop, _assign(kernel, final))
    if any(plan.roles[g.name] == BACK for g in gemms[:-1]):
        return "an earlier product touches the accumulator of the final one"
    work = {role: sum(g.op.m * g.op.n * g.op.k for g in gemms if plan.roles[g.name] == role) for role in (FRONT, BACK)}
    if work[FRONT] > MOST_WORK * work[BACK]:
        return f"the front would have {work[FRONT] / work[BACK]:.1f} times the products of the back"
    reason = _why_not_tiles(kernel, plan, loop) or _cross(kernel, plan, loop)
    if reason:
        return reason
    taken, room = _tile_registers(kernel, plan, FRONT), FRONT_REGISTERS - OTHERS
    if taken > room:
        return f"the front's tiles would take {taken} registers a thread, of {room} that it can spare"
    back, room = _tile_registers(kernel, plan, BACK), BACK_REGISTERS - OTHERS
    if back > room:
        return f"the back's tiles would take {back} registers a thread, of {room} that it can spare"
    choices = [(kept_columns(kernel, loop, g, FRONT_THREADS, taken), g) for g in gemms[:-1]]
    columns, product = max(choices, key=lambda c: c[0])
    if columns:
        plan.kept = (product, columns)
    return plan


def _tile_registers(kernel: KernelView, plan: _Plan, role: str) -> int:
    """Registers a thread that a role's fragments of two dimensions take."""
    total, threads = 0, FRONT_THREADS if role == FRONT else BACK_THREADS
    for buffer in kernel.buffers(FRAGMENT):
        shape = static_shape(buffer)
        if len(shape) > 1 and any(plan.roles.get(s.name) == role for s, _ in kernel.uses(buffer)):
            total += math.prod(shape) * dtype_bits(str(buffer.ty.dtype)) // 32 // threads
    return total


def _why_not_shape(kernel: KernelView, gemms: list[Site], hw) -> str | None:
    if not all(hw.supports(feature) for feature in ("wgmma", "tma", "mbarrier", "setmaxnreg")):
        return f"{hw.name} has no wgmma and TMA"
    if len(gemms) < 2:
        return "no chain of products"
    if kernel.threads != BACK_THREADS:
        return f"{kernel.threads} threads are not two warpgroups"
    if any(key in kernel.info.block.annotations for key in ("tile.roles", "tile.fragments")):
        return "layouts or roles are given"
    if kernel.bases or kernel.info.layouts:
        return "views and given layouts keep all warps in one role"
    if any(s.kind in ("group", "while") for site in kernel.sites for s in site.path):
        return "T.ws and while loops keep all threads in one role"
    loop = gemms[0].path[-1] if gemms[0].path else None
    if loop is None or loop.kind != "loop" or any(g.path != (loop,) for g in gemms):
        return "the products do not stand together in one loop"
    if int(loop.annotations.get("tile.num_stages", 0) or 0) < 1 or len(kernel.loops) != 1:
        return "the products' loop is not the only one, or not pipelined"
    if any(key in loop.annotations for key in ("tile.order", "tile.stage")):
        return "a manual order or stage fixes the schedule"
    for gemm in gemms:
        if gemm.op.m != 64:
            return f"{gemm.name} has {gemm.op.m} rows, so that warpgroups have rows of their own"
        reason = why_not_wgmma(gemm.op, FRONT_THREADS, hw)
        if reason:
            return f"{gemm.name}: {reason}"
    if any(not isinstance(raw.stmt, Bind) for raw in kernel.raw):
        return "variables are assigned, and each role would need its own"
    if any(scope_of(b) in (SHARED, FRAGMENT) for b in kernel.uniform_reads):
        return "a condition or bound depends on an on-chip buffer"
    if any(b.same_as(w) for b in kernel.uniform_reads for w in kernel.written_globals):
        return "a condition, bound or value depends on memory that the kernel writes"
    if any(a.scope not in (GLOBAL, SHARED, FRAGMENT) for site in kernel.sites for a in site.accesses):
        return "operations use per-thread memory"
    return None


def _assign(kernel: KernelView, final: Site) -> dict[str, str]:
    """Role of every operation that is no load: the back has what touches the accumulator, directly or not."""
    mine = {final.op.c.buffer}
    back = {final.name}
    loads = {s.name for s in kernel.sites if s.is_load}
    changed = True
    while changed:
        changed = False
        for site in kernel.sites:
            if site.name in loads:
                continue
            fragments = site.of(FRAGMENT)
            if site.name not in back and (any(a.buffer in mine for a in fragments) or _moves_for(kernel, site, back)):
                back.add(site.name)
                changed = True
            if site.name in back:
                for access in fragments:
                    if access.write and access.buffer not in mine:
                        mine.add(access.buffer)
                        changed = True
    return {s.name: BACK if s.name in back else FRONT for s in kernel.sites if s.name not in loads}


def _moves_for(kernel: KernelView, site: Site, back: set[str]) -> bool:
    """Whether an operation without fragments reads what the back wrote, or writes what the back reads next."""
    if site.of(FRAGMENT):
        return False
    for access in site.of(SHARED):
        others = [(s, a) for s, a in kernel.uses(access.buffer) if s.name != site.name and not s.is_load]
        if not access.write and any(a.write and s.name in back for s, a in others):
            return True
        later = [s for s, a in others if s.position > site.position and not a.write]
        if access.write and later and later[0].name in back:
            return True
    return False


def _why_not_tiles(kernel: KernelView, plan: _Plan, loop: Scope) -> str | None:
    """Whether every shared tile and tensor stays in one role, or goes from the front to the back in the loop."""
    roles = plan.roles
    for buffer in [*kernel.buffers(SHARED), *kernel.written_globals]:
        uses = [(s, a) for s, a in kernel.uses(buffer) if s.name in roles]
        writers = {roles[s.name] for s, a in uses if a.write}
        readers = {roles[s.name] for s, a in uses if not a.write}
        if not writers or len(writers | readers) == 1:
            continue
        if scope_of(buffer) == GLOBAL:
            return f"both roles would use {buffer.name}, which the kernel writes"
        loads = [s for s, _ in kernel.uses(buffer) if s.is_load]
        if loads:
            # a tile of this iteration that is changed behind the front's products: the back changes it for itself
            last_read = max((s.position for s, a in uses if roles[s.name] == FRONT), default=0)
            first_write = min(s.position for s, a in uses if a.write)
            if writers == {BACK} and last_read < first_write and all(s.path == (loop,) for s in loads):
                continue
            return f"both roles would change {buffer.name}"
        if writers != {FRONT} or readers != {BACK} or any(s.path != (loop,) for s, _ in uses):
            return f"{buffer.name} goes from one role to the other in a branch, outside of the loop or backwards"
    if not any(roles[s.name] == FRONT and a.write for s, a in kernel.uses(_final(kernel).op.a.buffer)):
        return "the final product's operand is not made in the loop"
    return None


def _final(kernel: KernelView) -> Site:
    return [s for s in kernel.sites if isinstance(s.op, GemmOp)][-1]


def _cross(kernel: KernelView, plan: _Plan, loop: Scope) -> str | None:
    """Find the fragments that cross; why one cannot."""
    end = max(s.position for s in kernel.sites if loop in s.path)
    for buffer in kernel.buffers(FRAGMENT):
        uses = list(kernel.uses(buffer))
        writes = [s for s, a in uses if a.write]
        if not any(plan.roles[s.name] == FRONT for s in writes):
            continue
        readers = _in_order([s for s, a in uses if plan.roles[s.name] == BACK])
        inside = [s for s in readers if loop in s.path]
        behind = [s for s in readers if s.position > end]
        if len(inside) + len(behind) != len(readers):
            return f"{buffer.name} crosses before the loop"
        for group in (inside, behind):
            if not group:
                continue
            if any(s.path != group[0].path for s in group) or len(group[0].path) > 1:
                return f"{buffer.name} crosses in a branch"
            if any(group[0].position < s.position < group[-1].position for s in writes):
                return f"{buffer.name} changes between the back's uses of it"
            if not any(s.position < group[0].position for s in writes):
                return f"{buffer.name} crosses before it is written"
            plan.crossings.append(_Crossing(buffer, group))
    return None


def _in_order(sites: list[Site]) -> list[Site]:
    out: list[Site] = []
    for site in sorted(sites, key=lambda s: s.position):
        if not out or out[-1] is not site:
            out.append(site)
    return out


# ------------------------------------------------------------------------------------------------ the rewriting


def _rewritten(func: tirx.PrimFunc, plan: _Plan) -> tirx.PrimFunc:
    names = {b.name for b in plan.kernel.info.buffers}
    before: dict[str, list] = {}  # operation -> copies in front of it
    renamed: dict[str, dict[Var, Var]] = {}  # operation -> fragments of the front -> the back's own
    made: list[Var] = []
    for crossing in plan.crossings:
        buffer = crossing.buffer
        shape, dtype = static_shape(buffer), str(buffer.ty.dtype)
        crossing.channel = new_buffer(shape, dtype, f"{buffer.name}_channel", SHARED, names)
        made.append(crossing.channel)
        send, receive = ({"tile.role": role} for role in (FRONT, BACK))
        name = crossing.channel.name
        copies = before.setdefault(crossing.readers[0].name, [])
        copies.append(copy_of(buffer, crossing.channel, shape, f"{name}_send", send))
        if crossing.is_operand:
            crossing.received = crossing.channel
        else:
            crossing.received = new_buffer(shape, dtype, f"{buffer.name}_received", FRAGMENT, names)
            made.append(crossing.received)
            copies.append(copy_of(crossing.channel, crossing.received, shape, f"{name}_receive", receive))
        for site in crossing.readers:
            renamed.setdefault(site.name, {})[buffer] = crossing.received

    kept, load, unused = None, "", None
    if plan.kept is not None:
        product, columns = plan.kept
        unused, rows, depth, dtype = product.op.a.buffer, product.op.m, product.op.k, product.op.a.dtype
        load = next(s.name for s, access in plan.kernel.uses(unused) if access.write)
        kept = new_buffer((rows, columns), dtype, f"{unused.name}_kept", FRAGMENT, names)
        passing = new_buffer((rows, columns), dtype, f"{unused.name}_first", SHARED, names)
        rest = new_buffer((rows, depth - columns), dtype, f"{unused.name}_rest", SHARED, names)
        made += [kept, passing, rest]
    inside = [False]

    def on_for(loop, mutator):
        matched = match_op(loop) if inside[0] else None
        if matched is None:
            out = mutator.default_mutate(loop)
            if kept is None or not loop.loop_var.same_as(plan.loop.node.loop_var):
                return out
            return SeqStmt([copy_of(passing, kept, (rows, columns), f"{kept.name}_copy", {"tile.role": FRONT}), out])
        name = str(matched[1].block.name_hint)
        if name == load:
            return split_load(loop, passing, rest, columns)
        if kept is not None and name == product.name:
            loop = split_product(loop, kept, rest, columns)
        return _operation(loop, str(matched[1].block.name_hint), plan, before, renamed)

    def on_realize(realize, mutator):
        name = str(realize.block.name_hint)
        if name == plan.kernel.name and "tile.kernel" in realize.block.annotations:
            inside[0] = True
            try:
                out = mutator.default_mutate(realize)
            finally:
                inside[0] = False
            return with_buffers(out, made, unused)
        if inside[0] and match_op(realize) is not None:
            return _operation(realize, name, plan, before, renamed)
        return mutator.default_mutate(realize)

    return func.with_body(rewrite(func.body, [(For, on_for), (SBlockRealize, on_realize)]))


def _operation(stmt, name: str, plan: _Plan, before: dict, renamed: dict):
    """An operation with its role, its fragments renamed, behind the copies that it needs."""
    if name not in plan.roles:
        return stmt
    if name in renamed:
        stmt = substitute(stmt, renamed[name])

    def on_block(block, mutator):
        return rebuild_block(block, annotations={**block.annotations, "tile.role": plan.roles[name]})

    stmt = rewrite(stmt, [(SBlock, on_block)])
    return SeqStmt([*before[name], stmt]) if name in before else stmt
