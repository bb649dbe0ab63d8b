"""The kernel's frame: launch attributes, CTA coordinates, allocations."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range, Var
from tvm.script import tirx as T
from tvm.tirx import AllocBuffer, AttrStmt, Bind, IterVar
from tvm.tirx.stmt import DeclBuffer

from ...ir.kernels import KernelInfo
from ...ir.visit import mentions, substitute
from ...schedule.decisions import read_raster
from .build import const, seq
from .restrict import mark_exchange
from .storage import Storage

__all__ = ["launch", "tile_coordinates"]


def launch(info: KernelInfo, storage: Storage, body, threads: int, host: list, bounded: bool, tiles=None):
    """Launch attributes around a kernel's code.

    Parameters
    ----------
    info : KernelInfo
        Grid, coordinates, rasterisation.
    storage : Storage
        What to allocate.
    body : Stmt
        The code of one thread.
    threads : int
        Threads of a CTA, producers included.
    host : list of Stmt
        Host code that must run before the launch.
    bounded : bool
        Promise that one CTA runs on an SM, so that registers may be moved between warpgroups.
    tiles : PersistentGrid, optional
        The launch grid where the body visits several tiles.
    """
    if tiles is None:
        blocks, grid = [Var(f"blockIdx_{d}", "int32") for d in "xyz"[: len(info.axes)]], info.grid
        stmts, coords = _rasterise(blocks, info.grid, read_raster(info.block))
    else:
        blocks, grid, stmts, coords = [tiles.block], [tiles.ctas], [], info.axes
    if storage.pool is not None:
        stmts.append(AllocBuffer(storage.pool))
        stmts.append(Bind(storage.base, T.cuda.cvta_generic_to_shared(tirx.buffer_data(storage.pool))))
        pool = tirx.buffer_data(storage.pool)
        stmts += [DeclBuffer(t.view, data=pool) for t in storage.tiles.values() if t.view is not None]
    # the same in all lanes: lets the compiler keep what depends on it in uniform registers
    if mentions(body, storage.warpgroup):
        group = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), tirx.floordiv(storage.tx, 128), 0, 32)
        stmts.append(Bind(storage.warpgroup, group))
    stmts += [AllocBuffer(b) for b in storage.allocations]
    stmts += [DeclBuffer(f.words, data=tirx.buffer_data(f.local)) for f in _unique_words(storage)]
    inner = seq([*stmts, substitute(body, {a: _as(c, a) for a, c in zip(info.axes, coords, strict=True)})])
    inner = mark_exchange(info, inner)
    if bounded:
        inner = AttrStmt(const(0), "tirx.launch_bounds_min_blocks_per_sm", const(1), inner)
    inner = _thread(storage.tx, const(threads), "threadIdx.x", inner)
    tags = ("blockIdx.x", "blockIdx.y", "blockIdx.z")[: len(blocks)]
    for var, extent, tag in reversed(list(zip(blocks, grid, tags, strict=True))):
        inner = _thread(var, extent, tag, inner)
    return seq([*host, inner])


def _unique_words(storage: Storage) -> list:
    seen: dict[str, object] = {}
    for held in storage.fragments.values():
        if held.words is not None:
            seen.setdefault(held.words.name, held)
    return list(seen.values())


def _expr(value):
    """A grid extent; the hardware's are below 2^31, whatever the dtype of the sizes that it is computed from."""
    if isinstance(value, int):
        return const(value)
    return value if str(value.ty.dtype) == "int32" else tirx.Cast("int32", value)


def _as(coordinate, axis: Var):
    """A coordinate in the dtype of the kernel's variable."""
    dtype = str(axis.ty.dtype)
    return coordinate if dtype == "int32" else tirx.Cast(dtype, coordinate)


def _thread(var: Var, extent, tag: str, body):
    axis = IterVar(Range(0, _expr(extent)), var, IterVar.ThreadIndex, tag)
    return AttrStmt(axis, "thread_extent", _expr(extent), body)


def _rasterise(blocks: list[Var], grid: list, raster):
    """CTA coordinates in launch order, or in panels (``T.use_swizzle``): (Bind statements, coordinates)."""
    if raster is None or len(blocks) < 2:
        return [], list(blocks)
    cta = Var("cta", "int32")
    stmts, coords = _panels(cta, grid, raster)
    return [Bind(cta, blocks[1] * _expr(grid[0]) + blocks[0]), *stmts], [*coords, *blocks[2:]]


def tile_coordinates(tile: Var, grid: list, raster):
    """Coordinates of a tile from its number: (Bind statements, coordinates).

    Parameters
    ----------
    tile : Var
        Number of the tile, counted along x first, or panel by panel.
    grid : list
        Extents x, y, z.
    raster : (int, str) or None
        Panels of the first two dimensions.
    """
    if len(grid) == 1:
        return [], [tile]
    gx, gy = (_expr(g) for g in grid[:2])
    stmts, layer, rest = [], [], tile
    if len(grid) == 3:
        rest = Var("tile_in_layer", "int32")
        layer = [tirx.floordiv(tile, gx * gy)]
        stmts.append(Bind(rest, tirx.floormod(tile, gx * gy)))
    if raster is None:
        return stmts, [tirx.floormod(rest, gx), tirx.floordiv(rest, gx), *layer]
    panels, coords = _panels(rest, grid, raster)
    return [*stmts, *panels], [*coords, *layer]


def _panels(cta: Var, grid: list, raster):
    """(Bind statements, x and y) of CTA number ``cta`` where the grid is visited panel by panel."""
    panel, order = raster
    gx, gy = (_expr(g) for g in grid[:2])
    across, along = (gx, gy) if order == "row" else (gy, gx)
    number, inside, rows, cx, cy = (Var(n, "int32") for n in ("panel", "in_panel", "panel_rows", "cta_x", "cta_y"))
    area = across * panel
    first = tirx.floordiv(inside, rows)
    second = number * panel + tirx.floormod(inside, rows)
    x, y = (first, second) if order == "row" else (second, first)
    stmts = [
        Bind(number, tirx.floordiv(cta, area)),
        Bind(inside, cta - number * area),
        Bind(rows, tirx.min(along - number * panel, const(panel))),
        Bind(cx, x),
        Bind(cy, y),
    ]
    return stmts, [cx, cy]
