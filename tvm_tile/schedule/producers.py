"""When a warpgroup of its own may issue a kernel's loads: it runs ahead of the rest and sees none of its results."""

from __future__ import annotations

import tvm
from tvm.ir import TensorLoad, Var
from tvm.tirx import is_buffer_var

from ..ir.visit import walk
from .analysis import GLOBAL, KernelView, Scope, Site, scope_of

__all__ = ["why_not_ahead", "why_not_ring"]


def why_not_ahead(kernel: KernelView, copy: Site) -> str | None:
    """What a producer would need of the other warps in order to issue a copy, or None.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    copy : Site
        A load from a tensor to a shared tile.
    """
    op = copy.op
    expressions = [*op.src.mins, *op.dst.mins]
    expressions += [g for g in (op.src_guard, op.dst_guard) if g is not None]
    for scope in copy.path:
        if scope.kind == "loop":
            expressions += [scope.node.min, scope.node.extent]
        elif scope.kind == "if":
            expressions.append(scope.node.condition)
    return next((why for e in expressions if (why := _why_not_known(kernel, e)) is not None), None)


def _why_not_known(kernel: KernelView, expression) -> str | None:
    loads: list[TensorLoad] = []
    variables: list[Var] = []
    calls: list = []
    walk(expression, (TensorLoad, loads.append), (Var, variables.append), (tvm.ir.Call, calls.append))
    for load in loads:
        if not is_buffer_var(load.source) or scope_of(load.source) != GLOBAL:
            return f"depends on {load.source.name}, which the other warps compute"
        if any(load.source.same_as(w) for w in kernel.written_globals):
            return f"depends on {load.source.name}, which the kernel writes"
    if any(str(getattr(call.op, "name", "")).startswith("tirx.call_extern") for call in calls):
        return "depends on a call with side effects"
    values = (kernel.bound[v][0] for v in variables if v in kernel.bound)
    return next((why for v in values if (why := _why_not_known(kernel, v)) is not None), None)


def why_not_ring(kernel: KernelView, loop: Scope, copy: Site, taken: list[Var]) -> str | None:
    """Why a ring of slots cannot stand for the tile of a loop's copy, or None.

    Parameters
    ----------
    kernel : KernelView
        The kernel.
    loop : Scope
        The pipelined loop.
    copy : Site
        The load.
    taken : list of Var
        Tiles that have a ring already.
    """
    buffer = copy.op.dst.buffer
    if any(buffer.same_as(t) for t in taken):
        return f"{buffer.name} is filled by several copies"
    outside = next((s for s, _ in kernel.uses(buffer) if loop not in s.path), None)
    return None if outside is None else f"{outside.name} uses {buffer.name} outside of the loop that fills it"
