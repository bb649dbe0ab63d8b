"""What ``T.ws`` asks of registers: fragments and variables belong to one warpgroup, or to all threads."""

from __future__ import annotations

from tvm.ir import Var

from ..errors import SourceLocation, TileTargetError
from ..ir.visit import mentions
from .analysis import SHARED, KernelView, Scope, scope_of

__all__ = ["check_groups"]


def check_groups(kernels: list[KernelView]) -> None:
    """Refuse what one warpgroup holds in registers and others would need.

    Parameters
    ----------
    kernels : list of KernelView
        The analysed kernels of a function.

    Raises
    ------
    TileTargetError
        For a fragment or a variable that is used in a ``T.ws`` block and outside of it, or in those of two warpgroups.
    """
    for kernel in kernels:
        if not any(s.kind == "group" for site in [*kernel.sites, *kernel.raw] for s in site.path):
            continue
        for buffer in kernel.info.buffers:
            if scope_of(buffer) != SHARED:
                _check(kernel, buffer)


def _check(kernel: KernelView, buffer: Var) -> None:
    users: dict[int | None, SourceLocation | None] = {}
    for site in kernel.sites:
        if any(kernel.base(a.buffer).same_as(buffer) for a in site.accesses):
            users.setdefault(_group(site.path), site.location)
    for raw in kernel.raw:
        if mentions(raw.stmt, buffer):
            users.setdefault(_group(raw.path), SourceLocation.from_span(raw.stmt.span))
    for path, scope in _conditions(kernel):
        parts = [scope.node.condition] if scope.kind in ("if", "while") else [scope.node.min, scope.node.extent]
        if any(mentions(part, buffer) for part in parts):
            users.setdefault(_group(path), scope.location)
    if len(users) > 1:
        inside = next(g for g in users if g is not None)
        raise TileTargetError(
            f"{buffer.name} is used by warpgroup {inside} (T.ws({inside})) and by other threads, but a warpgroup's "
            f"registers are its own",
            users[inside],
            "pass the values through a shared tile, or declare one for each warpgroup",
        )


def _group(path: tuple[Scope, ...]) -> int | None:
    return next((s.group for s in path if s.kind == "group"), None)


def _conditions(kernel: KernelView):
    """(path outside, scope) of every loop and branch."""
    seen: set[int] = set()
    for site in [*kernel.sites, *kernel.raw]:
        for depth, scope in enumerate(site.path):
            if scope.kind in ("if", "while", "loop") and id(scope) not in seen:
                seen.add(id(scope))
                yield site.path[:depth], scope
