"""Walking and rewriting IR: thin layers over ``tvm_ffi``'s structural visitors.

An exception raised in a callback crosses C++ on its way out and may change its type and text there; these functions
hand the original exception on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm.ir import Var

from ..errors import SourceLocation

__all__ = ["mentions", "rewrite", "same_variables", "source_location", "substitute", "walk"]


class _Keeper:
    """Remembers the exception that a callback raised first."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def one(self, function: Callable) -> Callable:
        """A callback of one argument (walks)."""

        def call(node):
            try:
                function(node)  # its value would be taken for an instruction to the walker
            except BaseException as err:
                self.keep(err)
                raise

        return call

    def two(self, function: Callable) -> Callable:
        """A callback of two arguments (rewrites); the arity tells tvm_ffi what to pass."""

        def call(node, mutator):
            try:
                return function(node, mutator)
            except BaseException as err:
                self.keep(err)
                raise

        return call

    def keep(self, err: BaseException) -> None:
        """Remember the first exception: the later ones are its echoes from outer callbacks."""
        if self.error is None:
            self.error = err


def rewrite(node, handlers: Sequence[tuple[type, Callable]]):
    """Rebuild a function, statement or expression.

    Parameters
    ----------
    node : Object
        What to rewrite.
    handlers : sequence of (type, callback)
        ``callback(node, mutator)`` returns the new node; ``mutator.mutate(child)`` and ``mutator.default_mutate(node)``
        recurse.
    """
    keeper = _Keeper()
    try:
        return tvm_ffi.structural_mutate(node, [(kind, keeper.two(function)) for kind, function in handlers])
    except BaseException:
        if keeper.error is not None:
            raise keeper.error from keeper.error.__cause__
        raise


def walk(node, *handlers: tuple[type, Callable]) -> None:
    """Call ``callback(node)`` for every node of the given types.

    Parameters
    ----------
    node : Object
        Where to start.
    *handlers : (type, callback)
        What to call.
    """
    keeper = _Keeper()
    try:
        tvm_ffi.structural_walk(node, [(kind, keeper.one(function)) for kind, function in handlers])
    except BaseException:
        if keeper.error is not None:
            raise keeper.error from keeper.error.__cause__
        raise


def substitute(node, mapping: dict):
    """Replace variables in a statement or expression.

    Parameters
    ----------
    node : Stmt or Expr
        What to rewrite.
    mapping : dict
        Var -> expression.
    """
    return tvm_ffi.structural_map(node, (Var, lambda v: mapping.get(v, v)))


def source_location(span) -> SourceLocation | None:
    """Where the user wrote what a span covers; inside a macro the macro's line, not the call's.

    Parameters
    ----------
    span : Span, SequentialSpan or None
        The span of a statement or block.
    """
    parts = getattr(span, "spans", None)
    if parts is not None:
        # the call of a macro comes first, the statement in it last
        places = [place for place in map(source_location, parts) if place is not None]
        return places[-1] if places else None
    return SourceLocation.from_span(span)


def same_variables(left, right) -> bool:
    """Whether two lists of indices are the same variables, one by one."""
    return len(left) == len(right) and all(
        isinstance(a, Var) and isinstance(b, Var) and a.same_as(b) for a, b in zip(left, right, strict=True)
    )


def mentions(expr, var: Var) -> bool:
    """Whether a variable occurs in a statement or expression."""
    hit: list = []
    tvm_ffi.structural_walk(expr, (Var, lambda v: hit.append(v) if v.same_as(var) else None))
    return bool(hit)
