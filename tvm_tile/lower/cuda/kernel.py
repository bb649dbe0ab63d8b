"""From one annotated kernel to thread-level TIR: tree, pipelines, steps, shared memory, barriers, code."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Range, Var
from tvm.script import tirx as T
from tvm.tirx import AllocBuffer, AttrStmt, Bind, For, ForKind, IterVar, is_buffer_var
from tvm.tirx.stmt import DeclBuffer

from ...errors import InternalError, SourceLocation, TileTargetError
from ...ir.kernels import KernelInfo
from ...ir.visit import substitute, walk
from ...schedule.decisions import read_fragments, read_pipeline, read_raster, read_shared
from .build import const, evaluate, seq
from .gemm import lower_gemm
from .memory import place_tiles
from .ops import lower_op
from .pipeline import PipelinePlan, expand_pipelines
from .program import (
    CommitNode,
    CondNode,
    GroupNode,
    LoopNode,
    MicroNode,
    Node,
    OpNode,
    RawNode,
    WaitNode,
    WhileNode,
    read_body,
    walk_nodes,
)
from .storage import Storage
from .sync import BarrierNode, insert_barriers

__all__ = ["lower_kernel"]


def lower_kernel(info: KernelInfo, hw, func: tirx.PrimFunc):
    """Thread-level code of one kernel.

    Parameters
    ----------
    info : KernelInfo
        A kernel with its decisions.
    hw : GPU
        The target.
    func : PrimFunc
        The function it belongs to (its parameters).

    Returns
    -------
    Stmt
        ``launch_thread`` attributes around the code.
    """
    return _Lowering(info, hw, func).run()


class _Lowering:
    def __init__(self, info: KernelInfo, hw, func) -> None:
        self.info, self.hw, self.func = info, hw, func
        self.storage = Storage(info.threads, tx=Var("threadIdx_x", "int32"), base=Var("smem_base", "uint32"))
        self.location = SourceLocation.from_span(info.block.span)
        self.scratch: set[Var] = set()

    def run(self):
        nodes = read_body(self.info.block.body)
        self._refuse_groups(nodes)
        plans = self._plans(nodes)
        self._make_storage(nodes, plans)
        nodes = expand_pipelines(nodes, lambda loop: plans.get(id(loop)))
        declared = set(self.storage.tiles)
        nodes = self._steps(nodes)
        self.scratch = {b for b in self.storage.tiles if b not in declared}
        placement = place_tiles(self.storage, nodes, self.hw.shared_per_block, self.scratch, self.location)
        written = _written_globals(nodes)

        def shared(buffer):
            return buffer in self.storage.tiles or any(buffer.same_as(w) for w in written)

        nodes = insert_barriers(nodes, shared, lambda a, b: placement.overlap(self.storage, a, b))
        if placement.bytes:
            self.storage.pool = tirx.decl_buffer(
                (placement.bytes,), "uint8", "smem", scope="shared.dyn", data_alignment=1024, layout=None
            )
        body = seq([self._emit(node) for node in nodes])
        return self._launch(body)

    # ---- storage

    def _refuse_groups(self, nodes: list[Node]) -> None:
        if any(isinstance(n, GroupNode) for n in walk_nodes(nodes)):
            raise TileTargetError(
                "T.ws is not available on CUDA targets yet",
                self.location,
                "remove the T.ws blocks: their bodies then run one after another on all warps",
            )

    def _plans(self, nodes: list[Node]) -> dict[int, PipelinePlan]:
        by_name = {b.name: b for b in self.info.buffers}
        plans = {}
        for node in walk_nodes(nodes):
            if isinstance(node, LoopNode):
                data = read_pipeline(node.annotations)
                if data:
                    plans[id(node)] = PipelinePlan(data, by_name)
        return plans

    def _make_storage(self, nodes: list[Node], plans) -> None:
        storage, info = self.storage, self.info
        fragments, shared = read_fragments(info.block), read_shared(info.block)
        copies: dict[Var, int] = {}
        for plan in plans.values():
            if plan.overlaps:
                for buffer, count in plan.buffers.items():
                    copies[buffer] = max(copies.get(buffer, 1), count)
        for buffer in info.buffers:
            scope = str(buffer.ty.storage_scope)
            if scope == "local.fragment":
                if buffer.name in fragments:
                    storage.new_fragment(buffer, fragments[buffer.name])
            elif scope == "shared":
                if buffer.name in shared:
                    storage.new_tile(buffer, shared[buffer.name], copies.get(buffer, 1))
            else:
                storage.locals[buffer] = storage.new_local(buffer.ty.shape, str(buffer.ty.dtype), buffer.name)
        self._make_views(nodes, fragments, shared)
        for param in self.func.params:
            if is_buffer_var(param) and _may_be_wide(param):
                storage.wide.add(param)

    def _make_views(self, nodes: list[Node], fragments, shared) -> None:
        """Views (T.reshape, T.view) share their base buffer's registers or bytes."""
        storage = self.storage
        for node in walk_nodes(nodes):
            if not (isinstance(node, RawNode) and isinstance(node.stmt, DeclBuffer)):
                continue
            view = node.stmt.buffer
            base = next((b for b in self.info.buffers if _same_data(node.stmt, b)), None)
            if base is None:
                raise InternalError(f"view {view.name} of an unknown buffer", self.location)
            if base in storage.fragments:
                held = storage.fragments[base]
                made = type(held)(view, fragments[view.name], held.local, held.words)
                storage.fragments[view] = made
            elif base in storage.tiles:
                raise TileTargetError(
                    f"T.view / T.reshape of shared tile {base.name} is not available on CUDA targets yet",
                    self.location,
                    "allocate the tile with the shape you index",
                )
            else:
                storage.locals[view] = view

    # ---- steps

    def _steps(self, nodes: list[Node]) -> list[Node]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, OpNode):
                if type(node.op).__name__ == "GemmOp":
                    out += lower_gemm(self.storage, node, self.hw)
                elif type(node.op).__name__ == "SyncOp":
                    out.append(BarrierNode())
                else:
                    out += lower_op(self.storage, node, self.hw)
            elif isinstance(node, CondNode):
                out.append(CondNode(node.condition, self._steps(node.then), self._steps(node.orelse)))
            elif hasattr(node, "body"):
                node.body = self._steps(node.body)
                out.append(node)
            else:
                out.append(node)
        return out

    # ---- code

    def _emit(self, node: Node):
        storage = self.storage
        if isinstance(node, MicroNode):
            return node.emit()
        if isinstance(node, BarrierNode):
            return evaluate(T.cuda.cta_sync())
        if isinstance(node, CommitNode):
            return evaluate(T.ptx.cp.async_.commit_group())
        if isinstance(node, WaitNode):
            return evaluate(T.ptx.cp.async_.wait_group(node.pending))
        if isinstance(node, RawNode):
            if isinstance(node.stmt, DeclBuffer):
                base = next((b for b in self.storage.locals if _same_data(node.stmt, b)), None)
                return None if base is None else DeclBuffer(node.stmt.buffer)
            return storage.rewrite(node.stmt)
        if isinstance(node, LoopNode):
            kind = ForKind.UNROLLED if node.unroll else ForKind.SERIAL
            body = seq([self._emit(n) for n in node.body])
            return For(
                node.var,
                _expr(storage.rewrite(_expr(node.start))),
                _expr(storage.rewrite(_expr(node.extent))),
                kind,
                body,
            )
        if isinstance(node, CondNode):
            then = seq([self._emit(n) for n in node.then])
            orelse = seq([self._emit(n) for n in node.orelse]) if node.orelse else None
            return tirx.IfThenElse(storage.rewrite(node.condition), then, orelse)
        if isinstance(node, WhileNode):
            return tirx.While(storage.rewrite(node.condition), seq([self._emit(n) for n in node.body]))
        raise InternalError(f"{type(node).__name__} reached code generation", self.location)

    def _launch(self, body):
        """Launch attributes, rasterised CTA coordinates, allocations."""
        info, storage = self.info, self.storage
        blocks = [Var(f"blockIdx_{d}", "int32") for d in "xyz"[: len(info.axes)]]
        grid = info.grid
        bound, coords = _rasterise(blocks, grid, read_raster(info.block))
        stmts = [*bound]
        if storage.pool is not None:
            stmts.append(AllocBuffer(storage.pool))
            stmts.append(Bind(storage.base, T.cuda.cvta_generic_to_shared(tirx.buffer_data(storage.pool))))
            stmts += [DeclBuffer(t.view) for t in storage.tiles.values() if t.view is not None]
        stmts += [AllocBuffer(b) for b in storage.allocations]
        stmts += [DeclBuffer(f.words) for f in storage.fragments.values() if f.words is not None]
        inner = seq([*stmts, substitute(body, dict(zip(info.axes, coords)))])
        inner = _thread(storage.tx, const(info.threads), "threadIdx.x", inner)
        for var, extent, name in reversed(list(zip(blocks, grid, ("blockIdx.x", "blockIdx.y", "blockIdx.z")))):
            inner = _thread(var, extent, name, inner)
        return inner


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
    linear = blocks[1] * gx + blocks[0]
    names = [Var(n, "int32") for n in ("cta", "panel", "in_panel", "panel_rows", "cta_x", "cta_y")]
    cta, number, inside, rows, cx, cy = names
    area = across * panel
    first = tirx.floordiv(inside, rows)
    second = number * panel + tirx.floormod(inside, rows)
    x, y = (first, second) if order == "row" else (second, first)
    stmts = [
        Bind(cta, linear),
        Bind(number, tirx.floordiv(cta, area)),
        Bind(inside, cta - number * area),
        Bind(rows, tirx.min(along - number * panel, const(panel))),
        Bind(cx, x),
        Bind(cy, y),
    ]
    return stmts, [cx, cy, *blocks[2:]]


def _may_be_wide(buffer: Var) -> bool:
    """Whether element offsets may exceed 31 bits: large static tensors, and symbolic ones of unknown size."""
    total = 1
    for extent in buffer.ty.shape:
        if not isinstance(extent, tirx.IntImm):
            return True
        total *= int(extent.value)
    if buffer.ty.strides:
        return True
    return total > 2**31 - 1


def _same_data(stmt: DeclBuffer, buffer: Var) -> bool:
    data = getattr(stmt, "data", None)
    if data is None:
        return False
    hit: list = []
    walk(data, (Var, lambda v: hit.append(v) if v.same_as(buffer) else None))
    return bool(hit)


def _written_globals(nodes: list[Node]) -> list[Var]:
    """Global tensors that the kernel writes: reads of them need barriers too."""
    out: list[Var] = []
    for node in walk_nodes(nodes):
        if isinstance(node, MicroNode):
            for access in node.writes:
                buffer = access.buffer
                if str(buffer.ty.storage_scope) == "global" and all(not buffer.same_as(o) for o in out):
                    out.append(buffer)
    return out
