"""Kernels of a function: launch grid, threads, buffers, annotations of the kernel block."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import For

from .visit import rewrite, walk

__all__ = ["KernelInfo", "const_int", "is_tile_function", "kernels_of"]


def const_int(value) -> int | None:
    """The Python int behind an integer constant or a number, else None."""
    return int(value) if isinstance(value, int | tirx.IntImm) else None


@dataclass
class KernelInfo:
    """One ``T.Kernel`` of a function.

    Attributes
    ----------
    block, realize : SBlock, SBlockRealize
        The kernel block, annotated ``tile.kernel``.
    loops : list of For
        The blockIdx loops, outermost (z) first.
    axes : list of Var
        The block's axes: CTA coordinates x, y, z.
    grid : list of expression
        Extents x, y, z.
    threads : int
        Threads of a CTA.
    swizzle : (int, str) or None
        Panel size and order of ``T.use_swizzle``.
    layouts : dict
        Buffer name -> layout (JSON form) of ``T.annotate_layout``.
    buffers : list of Var
        On-chip buffers that the kernel allocates.
    """

    block: SBlock
    realize: SBlockRealize
    loops: list[For]
    axes: list[Var]
    grid: list
    threads: int
    swizzle: tuple[int, str] | None = None
    layouts: dict = field(default_factory=dict)
    buffers: list[Var] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the kernel block."""
        return str(self.block.name_hint)


def is_tile_function(func) -> bool:
    """Whether a function is tile IR: a PrimFunc with a block annotated ``tile.kernel``."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    found = []
    walk(func.body, (SBlock, lambda b: found.append(b) if "tile.kernel" in b.annotations else None))
    return bool(found)


def kernels_of(func: tirx.PrimFunc) -> list[KernelInfo]:
    """The kernels of a function, in order of execution.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.
    """
    out: list[KernelInfo] = []
    loops: list[For] = []

    def on_for(loop, mutator):
        loops.append(loop)
        try:
            return mutator.default_mutate(loop)
        finally:
            loops.pop()

    def on_realize(realize, mutator):
        if "tile.kernel" in realize.block.annotations:
            out.append(_info(realize, list(loops)))
            return realize
        return mutator.default_mutate(realize)

    rewrite(func.body, [(For, on_for), (SBlockRealize, on_realize)])
    return out


def _info(realize: SBlockRealize, loops: list[For]) -> KernelInfo:
    block = realize.block
    notes = block.annotations
    swizzle = notes.get("tile.swizzle")
    return KernelInfo(
        block=block,
        realize=realize,
        loops=loops,
        axes=[axis.var for axis in block.iter_vars],
        grid=[axis.dom.extent for axis in block.iter_vars],
        threads=int(notes["tile.threads"]),
        swizzle=None if swizzle is None else (int(swizzle[0]), str(swizzle[1])),
        layouts=plain(notes.get("tile.layouts", {})),
        buffers=list(block.alloc_buffers),
    )


def plain(value):
    """An annotation as plain Python data (ints, floats, strings, lists, dicts)."""
    if isinstance(value, tirx.IntImm):
        return bool(value.value) if str(value.ty.dtype) == "bool" else int(value.value)
    if isinstance(value, tirx.FloatImm):
        return float(value.value)
    if hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool | int | float) or value is None:
        return value
    if hasattr(value, "value") and isinstance(value.value, str):
        return value.value
    return [plain(v) for v in value]
