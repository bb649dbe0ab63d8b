"""What the primitives need to know about the kernel being parsed: scopes, names, source position.

A parser owns one :class:`FunctionContext` for the function at hand; primitives reach it through :func:`current`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

from tvm.ir import Var

from ..errors import TileSyntaxError

__all__ = ["FunctionContext", "KernelContext", "current", "inside_kernel", "tile_op"]

_STACK: list[FunctionContext] = []


@dataclass
class KernelContext:
    """State of one ``with T.Kernel(...)``."""

    threads: int
    grid: tuple
    annotations: dict = field(default_factory=dict)
    layouts: dict[str, list] = field(default_factory=dict)


@dataclass
class FunctionContext:
    """State of one function being parsed.

    ``scopes`` lists the enclosing constructs, outermost first: ``"kernel"``, ``"loop"``, ``"pipeline"``,
    ``"parallel"``, ``"if"``, ``"ws"``. ``roots`` maps an alias (T.reshape, T.view) to the buffer that owns the memory,
    ``elements`` a macro's parameter to the element it was given. ``bound`` has every name that was bound anywhere in
    the function, ``macro_scopes`` the depth of ``scopes`` at each macro call around.
    """

    name: str
    parser: object
    scopes: list[str] = field(default_factory=list)
    kernel: KernelContext | None = None
    kernels: int = 0
    names: dict[str, int] = field(default_factory=dict)
    function_frame: int = 0
    macro_scopes: list[int] = field(default_factory=list)
    pipeline_statement: int | None = None
    roots: dict[Var, Var] = field(default_factory=dict)
    elements: dict[Var, object] = field(default_factory=dict)
    named: set[Var] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)

    def unique(self, base: str) -> str:
        """A block or buffer name that no other one of the function has: schedules and annotations go by name."""
        name = base
        while name in self.names:
            self.names[base] += 1
            name = f"{base}_{self.names[base] - 1}"
        self.names.setdefault(base, 1)
        self.names.setdefault(name, 1)
        return name

    @contextmanager
    def scope(self, kind: str):
        """Enter a construct for the duration of the ``with``."""
        self.scopes.append(kind)
        try:
            yield
        finally:
            self.scopes.pop()

    @property
    def in_parallel(self) -> bool:
        """Whether the statement at hand runs once for each element of a ``T.Parallel``."""
        return "parallel" in self.scopes


def push(context: FunctionContext) -> None:
    """Make ``context`` the current one."""
    _STACK.append(context)


def pop() -> None:
    """Return to the context before."""
    _STACK.pop()


def current(what: str) -> FunctionContext:
    """The function being parsed; an error that names ``what`` where there is none."""
    if not _STACK:
        raise TileSyntaxError(
            f"{what} is only meaningful inside a function decorated with @T.prim_func",
            advice="decorate the kernel with @T.prim_func from tvm_tile.language",
        )
    return _STACK[-1]


def active() -> FunctionContext | None:
    """The function being parsed, or None."""
    return _STACK[-1] if _STACK else None


def inside_kernel(what: str) -> FunctionContext:
    """The current context, which must be inside ``with T.Kernel(...)``."""
    context = current(what)
    if context.kernel is None:
        raise TileSyntaxError(
            f"{what} must stand inside `with T.Kernel(...)`",
            advice="open the kernel first: `with T.Kernel(grid_x, threads=128) as bx:`",
        )
    return context


def tile_op(what: str) -> FunctionContext:
    """The current context for an operation of the whole CTA: inside a kernel and not inside ``T.Parallel``."""
    context = inside_kernel(what)
    if context.in_parallel:
        raise TileSyntaxError(
            f"{what} works on whole tiles with all threads and cannot be called once per element inside T.Parallel",
            advice=f"move {what} out of the T.Parallel loop, or write the element-wise assignment instead",
        )
    return context
