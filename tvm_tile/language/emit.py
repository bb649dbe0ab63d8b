"""How tile operations enter the IR: one loop nest with one annotated SBlock each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as B

from .context import FunctionContext

__all__ = ["block", "nest"]


@contextmanager
def block(context: FunctionContext, op: str, attrs: dict | None = None, axes: int = 0) -> Iterator[None]:
    """An SBlock annotated as the tile operation ``op``."""
    with B.sblock(context.unique(op)):
        annotations = {"tile.op": op, "tile.axes": axes, **(attrs or {})}
        if context.pipeline_statement is not None:
            annotations["tile.stmt"] = context.pipeline_statement
        B.sblock_attr(annotations)
        yield


@contextmanager
def nest(
    context: FunctionContext, op: str, extents: Sequence, attrs: dict | None = None, kinds: str | None = None
) -> Iterator[list]:
    """Loops over ``extents`` around one SBlock; yields the block's axis variables.

    Parameters
    ----------
    context : FunctionContext
        The function being parsed.
    op : str
        Name of the tile operation.
    extents : sequence
        Loop extents; none makes a block without axes.
    attrs : dict, optional
        Further ``tile.*`` annotations.
    kinds : str, optional
        ``"S"`` (spatial) or ``"R"`` (reduction) for each extent; all spatial by default.
    """
    kinds = kinds or "S" * len(extents)
    with ExitStack() as stack:
        loops = []
        if extents:
            loops = stack.enter_context(B.grid(*extents))
            loops = list(loops) if len(extents) > 1 else [loops]
            for n, loop in enumerate(loops):
                IRBuilder.name(f"ax{n}", loop)
        stack.enter_context(block(context, op, attrs, len(extents)))
        make = {"S": B.axis.spatial, "R": B.axis.reduce}
        axes = [make[kind](extent, loop) for kind, extent, loop in zip(kinds, extents, loops, strict=False)]
        for n, axis in enumerate(axes):
            IRBuilder.name(f"v{n}", axis)
        yield axes
