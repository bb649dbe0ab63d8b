"""The kernel's frame: launch attributes, CTA coordinates, allocations."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range, Var
from tvm.script import tirx as T
from tvm.tirx import AllocBuffer, AttrStmt, Bind, IterVar
from tvm.tirx.stmt import DeclBuffer

from ...ir.kernels import KernelInfo
from ...ir.visit import substitute
from ...schedule.decisions import read_raster
from .build import const, seq
from .storage import Storage

__all__ = ["launch"]


def launch(info: KernelInfo, storage: Storage, body, threads: int, host: list, bounded: bool):
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
    """
    blocks = [Var(f"blockIdx_{d}", "int32") for d in "xyz"[: len(info.axes)]]
    bound, coords = _rasterise(blocks, info.grid, read_raster(info.block))
    stmts = [*bound]
    if storage.pool is not None:
        stmts.append(AllocBuffer(storage.pool))
        stmts.append(Bind(storage.base, T.cuda.cvta_generic_to_shared(tirx.buffer_data(storage.pool))))
        pool = tirx.buffer_data(storage.pool)
        stmts += [DeclBuffer(t.view, data=pool) for t in storage.tiles.values() if t.view is not None]
    # the same in all lanes: lets the compiler keep what depends on it in uniform registers
    group = T.cuda.__shfl_sync(T.uint32(0xFFFFFFFF), tirx.floordiv(storage.tx, 128), 0, 32)
    stmts.append(Bind(storage.warpgroup, group))
    stmts += [AllocBuffer(b) for b in storage.allocations]
    stmts += [DeclBuffer(f.words, data=tirx.buffer_data(f.local)) for f in _unique_words(storage)]
    inner = seq([*stmts, substitute(body, dict(zip(info.axes, coords, strict=True)))])
    if bounded:
        inner = AttrStmt(const(0), "tirx.launch_bounds_min_blocks_per_sm", const(1), inner)
    inner = _thread(storage.tx, const(threads), "threadIdx.x", inner)
    tags = ("blockIdx.x", "blockIdx.y", "blockIdx.z")[: len(blocks)]
    for var, extent, tag in reversed(list(zip(blocks, info.grid, tags, strict=True))):
        inner = _thread(var, extent, tag, inner)
    return seq([*host, inner])


def _unique_words(storage: Storage) -> list:
    seen: dict[str, object] = {}
    for held in storage.fragments.values():
        if held.words is not None:
            seen.setdefault(held.words.name, held)
    return list(seen.values())


def _expr(value):
    return const(value) if isinstance(value, int) else value


def _thread(var: Var, extent, tag: str, body):
    return AttrStmt(IterVar(Range(0, extent), var, IterVar.ThreadIndex, tag), "thread_extent", _expr(extent), body)


def _rasterise(blocks: list[Var], grid: list, raster):
    """CTA coordinates in launch order, or in panels (``T.use_swizzle``): (Bind statements, coordinates)."""
    if raster is None or len(blocks) < 2:
        return [], list(blocks)
    panel, order = raster
    gx, gy = (_expr(g) for g in grid[:2])
    across, along = (gx, gy) if order == "row" else (gy, gx)
    names = [Var(n, "int32") for n in ("cta", "panel", "in_panel", "panel_rows", "cta_x", "cta_y")]
    cta, number, inside, rows, cx, cy = names
    area = across * panel
    first = tirx.floordiv(inside, rows)
    second = number * panel + tirx.floormod(inside, rows)
    x, y = (first, second) if order == "row" else (second, first)
    stmts = [
        Bind(cta, blocks[1] * gx + blocks[0]),
        Bind(number, tirx.floordiv(cta, area)),
        Bind(inside, cta - number * area),
        Bind(rows, tirx.min(along - number * panel, const(panel))),
        Bind(cx, x),
        Bind(cy, y),
    ]
    return stmts, [cx, cy, *blocks[2:]]
