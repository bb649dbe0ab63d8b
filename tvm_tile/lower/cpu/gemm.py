"""Tile matrix products: which unit computes them, what has to be packed, converted or padded first."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Var

from ...ir import GemmOp, Region
from . import amx, fma
from .builder import const_int
from .context import KernelContext
from .convert import compute_dtype
from .expression import Evaluator
from .pack import MatrixView, PanelLayout, emit_convert, emit_pack, round_up
from .statements import Elementwise, emit_elementwise
from .target import CpuFeatures


@dataclass(frozen=True)
class GemmPlan:
    """How a product runs: on AMX (``amx``) or on the vector unit, in which types, with which packed right operand."""

    amx: amx.AmxType | None
    compute: str
    panel: PanelLayout


def plan_gemm(features: CpuFeatures, op: GemmOp) -> GemmPlan:
    """Choose the unit for a product and the layout of its right operand."""
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    kind = amx.amx_type(a, b)
    usable = features.amx_bf16 if a == "bfloat16" else features.amx_int8
    if kind is not None and usable and c == kind.accumulator:
        return GemmPlan(kind, c, PanelLayout(op.k, op.n, b, kind.pack, 16))
    compute = compute_dtype(c)
    lanes = features.vector.lanes(compute)
    # the operands are widened to the type that accumulates: int8 to int32, narrow floats to float32
    width = fma.panel_width(features.vector, compute)
    return GemmPlan(None, compute, PanelLayout(op.k, op.n, b, 0, lanes, compute, width))


def emit_gemm(ev: Evaluator, kernel: KernelContext, op: GemmOp) -> None:
    """Write a tile product."""
    if op.mask is not None:
        _masked(ev, kernel, op)
        return
    c = matrix_of(ev, op.c, 0, 1)
    _product(ev, kernel, op, c, op.clear_accum)


def _masked(ev: Evaluator, kernel: KernelContext, op: GemmOp) -> None:
    """The product in scratch memory, then an element-wise choice."""
    name = f"{op.c.buffer.name}_product"
    product = tirx.decl_buffer((op.m, op.n), op.c.dtype, name=name, scope="local.fragment")
    storage = kernel.scratch_storage(product, f"product_{op.m}_{op.n}")
    view = MatrixView(storage.flat, op.c.dtype, 0, storage.strides[0], 1)
    _product(ev, kernel, op, view, True)
    (i, j) = (axis.var for axis in op.axes[:2])
    store = op.body
    choice = store.value
    old = tirx.const(0, op.c.dtype) if op.clear_accum else tirx.BufferLoad(store.buffer, list(store.indices))
    other = op.mask_value if op.mask_value is not None else old
    value = tirx.Select(choice.condition, old + tirx.BufferLoad(product, [i, j]), other)
    body = tirx.BufferStore(store.buffer, value, store.indices)
    emit_elementwise(ev, kernel.features.vector, Elementwise([(i, op.m), (j, op.n)], body))


def matrix_of(ev: Evaluator, region: Region, row_axis: int, column_axis: int) -> MatrixView:
    """A region of a storage as a matrix over two axes of the operation."""
    storage = ev.storages(region.buffer)
    strides = {axis: storage.strides[dim] for dim, axis in enumerate(region.axes) if axis is not None}
    offset = ev.scalar(storage.flat_index(list(region.mins)))
    rows, columns = (strides.get(axis, 0) for axis in (row_axis, column_axis))
    return MatrixView(storage.flat, storage.dtype, offset, rows, columns, storage.wide)


def _product(ev: Evaluator, kernel: KernelContext, op: GemmOp, c: MatrixView, clear: bool) -> None:
    plan = plan_gemm(kernel.features, op)
    packed = _packed_right(ev, kernel, op, plan)
    a = matrix_of(ev, op.a, 0, 2)
    if plan.amx is not None:
        _product_amx(ev, kernel, op, plan, a, packed, c, clear)
    else:
        _product_fma(ev, kernel, op, plan, a, packed, c, clear)


def _packed_right(ev: Evaluator, kernel: KernelContext, op: GemmOp, plan: GemmPlan) -> Var:
    storage = ev.storages(op.b.buffer)
    if storage.panel is not None:
        return storage.flat
    source = matrix_of(ev, op.b, 2, 1)
    layout = plan.panel
    packed = kernel.scratch(f"packed_{layout}", layout.flat_dtype, layout.count, zero=layout.ragged)
    emit_pack(ev.b, kernel.features.vector, source, layout, packed)
    return packed


def _product_amx(
    ev, kernel: KernelContext, op: GemmOp, plan: GemmPlan, a: MatrixView, packed: Var, c: MatrixView, clear: bool
) -> None:
    b, unit = ev.b, kernel.features.vector
    kernel.uses_amx = True
    m, n, k = round_up(op.m, 16), plan.panel.columns, plan.panel.k_padded
    if const_int(a.columns) != 1 or const_int(a.rows) is None or (m, k) != (op.m, op.k):
        padded = kernel.scratch(f"left_{op.m}_{op.k}_{a.dtype}", a.flat.dtype, m * k, zero=(m, k) != (op.m, op.k))
        target = MatrixView(padded, a.dtype, 0, k, 1)
        emit_convert(b, unit, a, target, op.m, op.k)
        a = target
    accumulator = c
    direct = const_int(c.columns) == 1 and const_int(c.rows) is not None and (m, n) == (op.m, op.n)
    if not direct:
        scratch = kernel.scratch(f"sums_{op.m}_{op.n}_{c.dtype}", c.flat.dtype, m * n, zero=True)
        accumulator = MatrixView(scratch, c.dtype, 0, n, 1)
        if not clear:
            emit_convert(b, unit, c, accumulator, op.m, op.n)
    amx.emit_gemm(
        b,
        plan.amx,
        a.flat,
        a.offset,
        int(a.rows),
        packed,
        accumulator.flat,
        accumulator.offset,
        int(accumulator.rows),
        m,
        n,
        k,
        clear,
    )
    if not direct:
        emit_convert(b, unit, accumulator, c, op.m, op.n)


def _product_fma(
    ev, kernel: KernelContext, op: GemmOp, plan: GemmPlan, a: MatrixView, packed: Var, c: MatrixView, clear: bool
) -> None:
    b, unit = ev.b, kernel.features.vector
    if a.dtype != plan.compute:
        rows = const_int(a.columns) == 1
        scratch = kernel.scratch(f"left_{op.m}_{op.k}_{plan.compute}", plan.compute, op.m * op.k)
        target = MatrixView(scratch, plan.compute, 0, op.k if rows else 1, 1 if rows else op.m)
        emit_convert(b, unit, a, target, op.m, op.k)
        a = target
    n = plan.panel.columns
    accumulator = c
    direct = c.dtype == plan.compute and const_int(c.columns) == 1 and n == op.n
    if not direct:
        scratch = kernel.scratch(f"sums_{op.m}_{op.n}_{plan.compute}", plan.compute, op.m * n)
        accumulator = MatrixView(scratch, plan.compute, 0, n, 1)
        if not clear:
            emit_convert(b, unit, c, accumulator, op.m, op.n)
    fma.emit_gemm(
        b,
        unit,
        plan.compute,
        fma.Matrix(a.flat, a.offset, a.rows, a.columns),
        packed,
        fma.Matrix(accumulator.flat, accumulator.offset, accumulator.rows),
        op.m,
        op.n,
        op.k,
        clear,
    )
    if not direct:
        emit_convert(b, unit, accumulator, c, op.m, op.n)
