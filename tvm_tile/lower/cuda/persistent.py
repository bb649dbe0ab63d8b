"""Persistent kernels: a CTA visits tile after tile of the grid; the tree gets a loop over tiles around it."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var
from tvm.tirx import Bind

from ...ir.kernels import KernelInfo
from .build import const
from .launch import tile_coordinates
from .program import LoopNode, Node, RawNode, clone

__all__ = ["PersistentGrid", "persistent_tree"]


@dataclass(frozen=True)
class PersistentGrid:
    """The launch grid of a persistent kernel: ``ctas`` along ``block`` (blockIdx.x)."""

    block: Var
    ctas: object


def persistent_tree(info: KernelInfo, nodes: list[Node], ctas: int, raster) -> tuple[list[Node], PersistentGrid]:
    """A kernel's tree inside a loop over the tiles of one CTA: number ``block``, ``block + ctas``, ...

    Parameters
    ----------
    info : KernelInfo
        Grid and coordinates.
    nodes : list
        The tree of one tile.
    ctas : int
        CTAs to launch at most.
    raster : (int, str) or None
        Order of the tiles.
    """
    tiles = const(1)
    for extent in info.grid:
        tiles = tiles * (const(extent) if isinstance(extent, int) else extent)
    block, wave, tile = (Var(name, "int32") for name in ("blockIdx_x", "wave", "tile"))
    count = tirx.min(tiles, const(ctas))
    binds, coordinates = tile_coordinates(tile, info.grid, raster)
    names = [Var(f"tile_{d}", "int32") for d in "xyz"[: len(info.axes)]]
    stmts = [Bind(tile, block + wave * count), *binds]
    stmts += [Bind(name, value) for name, value in zip(names, coordinates, strict=True)]
    body = [RawNode(s) for s in stmts] + clone(nodes, dict(zip(info.axes, names, strict=True)))
    waves = tirx.floordiv(tiles - block + (count - 1), count)
    return [LoopNode(wave, const(0), waves, body)], PersistentGrid(block, count)
