"""Right operands stored packed: a shared tile that only copies fill and only products read never exists unpacked."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad, Var

from ...ir import CopyOp, GemmOp, tile_ops
from ...ir.visit import walk
from .affine import always, conjuncts
from .builder import const_int
from .context import KernelContext
from .expression import Evaluator
from .gemm import matrix_of, plan_gemm
from .pack import MatrixView, PanelLayout, emit_pack
from .statements import Elementwise, emit_elementwise
from .target import CpuFeatures


def choose_panels(features: CpuFeatures, block) -> dict[Var, tuple[PanelLayout, bool]]:
    """Shared tiles of a kernel that can be stored packed: their layout, and whether the program holds them transposed.

    A tile qualifies when every write is a copy of the whole tile and every read is a product that takes the whole
    tile as its right operand, all in the same layout.
    """
    reads: dict[Var, int] = {}
    writes: dict[Var, int] = {}
    aliased: set[Var] = set()

    def count(table: dict, buffer) -> None:
        table[buffer] = table.get(buffer, 0) + 1

    walk(
        block.body,
        (TensorLoad, lambda a: count(reads, a.source)),
        (tirx.BufferStore, lambda s: count(writes, s.buffer)),
    )
    walk(block.body, (tirx.DeclBuffer, lambda d: walk(d.data, (Var, aliased.add))))
    copies: dict[Var, int] = {}
    products: dict[Var, list] = {}
    for op in tile_ops(block.body):
        if isinstance(op, CopyOp) and op.dst.whole and op.dst.axes == [0, 1] and op.dst_guard is None:
            count(copies, op.dst.buffer)
        elif isinstance(op, GemmOp) and op.b.whole:
            layout = plan_gemm(features, op).panel
            products.setdefault(op.b.buffer, []).append((layout, op.trans_b))
    chosen = {}
    for buffer, uses in products.items():
        if buffer in aliased or len(buffer.ty.shape) != 2:
            continue
        if copies.get(buffer, 0) != writes.get(buffer, 0) or len(uses) != reads.get(buffer, 0):
            continue
        if all(use == uses[0] for use in uses):
            chosen[buffer] = uses[0]
    return chosen


def emit_panel_copy(ev: Evaluator, kernel: KernelContext, op: CopyOp) -> None:
    """Copy into a packed tile: straight from the source where that is inside, else through a row-major copy."""
    b, unit = ev.b, kernel.features.vector
    packed = ev.storages(op.dst.buffer)
    layout: PanelLayout = packed.panel
    transposed = packed.transposed
    name = f"{op.dst.buffer.name}_rows"

    def direct() -> None:
        source = matrix_of(ev, op.src, 0, 1)
        emit_pack(b, unit, source.transposed if transposed else source, layout, packed.flat)

    def staged() -> None:
        rows = tirx.decl_buffer(op.dst.buffer.ty.shape, op.dst.dtype, name=name, scope="shared")
        storage = kernel.scratch_storage(rows, f"rows_{[int(e) for e in rows.ty.shape]}_{op.dst.dtype}")
        body = _redirect(op.body, rows)
        emit_elementwise(ev, unit, Elementwise([(a.var, a.extent) for a in op.axes], body))
        source = MatrixView(storage.flat, op.dst.dtype, 0, storage.strides[0], 1)
        emit_pack(b, unit, source.transposed if transposed else source, layout, packed.flat)

    inside = _inside(ev, op)
    if op.src.dtype != op.dst.dtype or inside is None:
        staged()
    else:
        b.if_else(inside, direct, staged)


def _redirect(body, rows: Var):
    """An unguarded copy's body with its store going to another buffer of the same shape."""
    return tirx.BufferStore(rows, body.value, body.indices)


def _inside(ev: Evaluator, op: CopyOp):
    """A uniform condition under which no element of the source is outside; None where there is no such condition."""
    axes = [(a.var, a.extent) for a in op.axes]
    result = tirx.const(True, "bool")
    if op.src_guard is None:
        return result
    for term in conjuncts(op.src_guard):
        whole = always(term, axes)
        if whole is None:
            return None
        value = ev.scalar(whole)
        if const_int(value) == 0:
            return value
        result = value if const_int(result) else tirx.And(result, value)
    return result
