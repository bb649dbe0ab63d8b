"""Row sums that a loop only accumulates: their combination across threads waits until the loop is over.

``reduce_sum(s, r)`` followed by ``x = x * a + r`` is linear in ``r``: each thread may add up its own part of the row in
``x`` and the parts are combined once, after the loop, instead of in every iteration. Annotation ``tile.deferred`` =
name of ``x`` on the reduce block.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad, Var

from ..errors import TileShapeError
from ..ir.ops import FillOp, ParallelOp, ReduceOp
from ..ir.visit import same_variables, walk
from .analysis import FRAGMENT, KernelView, Site
from .decisions import read_fragments
from .rule import Decision, NotApplicable, Rule, TileSchedule

__all__ = ["deferred_sums"]


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel, site in sch.sites(ReduceOp):
        given = sch.given(site, "tile.deferred")
        if given is None and (site.op.kind != "sum" or not site.op.clear):
            continue
        found = _accumulation(kernel, site) if site.op.kind == "sum" and site.op.clear else "it is no sum of its own"
        if given is not None and (isinstance(found, str) or given != found.name):
            why = found if isinstance(found, str) else f"{found.name} accumulates it"
            raise TileShapeError(f"{site.name} cannot be combined late in {given}: {why}", site.location)
        if isinstance(found, str):
            answers.append(NotApplicable(f"combined in every iteration: {found}", kernel.name, site.name))
            continue
        sch.annotate(site, "tile.deferred", found.name)
        text = f"threads add their parts of {found.name} in the loop and combine them after it"
        answers.append(Decision(kernel.name, site.name, text, "the loop only scales and adds the sum"))
    return answers or NotApplicable("no sum that a loop accumulates")


def _accumulation(kernel: KernelView, site: Site) -> Var | str:
    """The fragment that accumulates a sum, or why its combination cannot wait."""
    loops = [s for s in site.path if s.kind == "loop"]
    if not loops:
        return "it stands in no loop"
    loop, target = loops[-1], site.op.dst.buffer
    if site.op.dst.scope != FRAGMENT or not site.op.dst.whole or site.op.src.scope != FRAGMENT:
        return "it is not from fragment to fragment"
    users = [s for s, _ in kernel.uses(target) if s is not site]
    users = [s for n, s in enumerate(users) if all(s is not o for o in users[:n])]
    if len(users) != 1 or users[0].path != site.path or users[0].position < site.position:
        return f"{target.name} is used elsewhere too"
    adder = users[0]
    total = _linear_update(adder, target)
    if total is None:
        return f"{adder.name} does more than scale and add"
    layouts = read_fragments(kernel.info.block)
    if layouts.get(total.name) != layouts.get(target.name):
        return f"{total.name} and {target.name} are laid out differently"
    for other, access in kernel.uses(total):
        if other is adder:
            continue
        if loop in other.path:
            return f"{other.name} needs {total.name} inside the loop"
        if other.position < loop.position and access.write and not _clears(other):
            return f"{total.name} does not start at zero"
    # each time that the loop begins: a loop around it would go on with sums that are combined already
    outside = site.path[: next(n for n, scope in enumerate(site.path) if scope is loop)]
    clears = [s for s, a in kernel.uses(total) if a.write and _clears(s) and s.position < loop.position]
    if not any(s.path == outside for s in clears):
        return f"{total.name} is not cleared right before the loop"
    return total


def _clears(site: Site) -> bool:
    op = site.op
    number = op.value if isinstance(op, FillOp) else None
    return isinstance(number, tirx.FloatImm | tirx.IntImm) and float(number.value) == 0 and op.dst.whole


def _linear_update(site: Site, addend: Var) -> Var | None:
    """The fragment ``x`` of an operation ``x[i] = x[i] * a + addend[i]`` (or without ``a``), else None."""
    op = site.op
    if not isinstance(op, ParallelOp) or not isinstance(op.body, tirx.BufferStore):
        return None
    store, value = op.body, op.body.value
    if not isinstance(value, tirx.Add) or str(store.buffer.ty.storage_scope) != FRAGMENT:
        return None
    left, right = value.a, value.b
    if _is_load(left, addend):
        left, right = right, left
    if not _is_load(right, addend) or not same_variables(store.indices, right.indices):
        return None
    factors = [left.a, left.b] if isinstance(left, tirx.Mul) else [left]
    own = [f for f in factors if _is_load(f, store.buffer) and same_variables(store.indices, f.indices)]
    others = [f for f in factors if all(f is not o for o in own)]
    if len(own) != 1 or any(_reads(f, store.buffer) or _reads(f, addend) for f in others):
        return None
    return store.buffer


def _is_load(expr, buffer: Var) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(buffer)


def _reads(expr, buffer: Var) -> bool:
    hit: list = []
    walk(expr, (TensorLoad, lambda load: hit.append(load) if load.source.same_as(buffer) else None))
    return bool(hit)


deferred_sums = Rule("deferred_sums", _apply)
