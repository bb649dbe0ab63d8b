"""Layouts given by ``T.annotate_layout``: whether the instructions can read them. The same answer on every target."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Var

from ..errors import TileShapeError
from ..ir.ops import GemmOp
from ..layout import (
    MMA,
    WGMMA,
    Fragment,
    Instruction,
    LayoutError,
    SharedLayout,
    WarpPartition,
    a_fragment,
    accumulator_fragment,
    supported,
)
from .analysis import FRAGMENT, SHARED, KernelView, Site, dtype_bits, kernel_views, static_shape
from .gemm_instruction import operand_dtypes

__all__ = ["check_layouts", "matching_partition", "partitions"]

#: The newest capability: a layout is refused where no target's instruction can read it.
_NEWEST = 90
_CHUNK_BITS = 128


def check_layouts(func: tirx.PrimFunc) -> None:
    """Refuse annotated layouts that no instruction can read.

    A shared operand of a tensor-core product needs rows on whole 16-byte chunks (what ldmatrix and wgmma read); a
    fragment needs the layout of an accumulator or A operand under some split of the CTA's warps. Products of float32
    and float64 in full precision run on scalar units and read anything.

    Parameters
    ----------
    func : PrimFunc
        Tile IR.

    Raises
    ------
    TileShapeError
        Naming the product, the buffer and what it could be.
    """
    for kernel in kernel_views(func):
        given = _given(kernel)
        if not given:
            continue
        for site in kernel.sites:
            if isinstance(site.op, GemmOp):
                _check_product(kernel, site, given)


def _given(kernel: KernelView) -> dict[Var, Fragment | SharedLayout]:
    out = {}
    for name, data in kernel.info.layouts.items():
        buffer = kernel.names.get(name)
        if buffer is None:
            continue
        scope = str(buffer.ty.storage_scope)
        kind = {FRAGMENT: Fragment, SHARED: SharedLayout}[scope]
        try:
            out[buffer] = kind.from_json(data)
        except (LayoutError, TypeError, ValueError, AttributeError) as err:
            raise TileShapeError(
                f"T.annotate_layout: the layout given for {name} is no {kind.__name__}: {err}",
                kernel.location,
                f"{name} is a {'fragment' if kind is Fragment else 'shared tile'}: give it a "
                f"tvm_tile.layout.{kind.__name__}",
            ) from None
    return out


def _instructions(op: GemmOp) -> list[Instruction]:
    triple = operand_dtypes(op)
    return [
        i for family in (MMA, WGMMA) for i in supported(family, _NEWEST) if (i.a_dtype, i.b_dtype, i.c_dtype) == triple
    ]


def _check_product(kernel: KernelView, site: Site, given) -> None:
    op: GemmOp = site.op
    instructions = _instructions(op)
    if not instructions:
        return  # CUDA cores
    for name, region in (("A", op.a), ("B", op.b)):
        layout = given.get(region.buffer)
        if isinstance(layout, SharedLayout):
            _check_shared(site, name, region.buffer, layout)
    for name, region in (("A", op.a), ("C", op.c)):
        layout = given.get(region.buffer)
        if not isinstance(layout, Fragment) or static_shape(region.buffer) != _tile(op, name):
            continue
        if matching_partition(op, layout, site.threads, name, instructions) is None:
            raise TileShapeError(
                f"T.gemm: no tensor-core instruction {'reads A' if name == 'A' else 'accumulates'} in the layout given "
                f"for {region.buffer.name}: {layout}",
                site.location,
                "leave the layout out, or take one from tvm_tile.layout.accumulator_fragment / a_fragment",
            )


def _tile(op: GemmOp, name: str) -> tuple[int, int]:
    return (op.m, op.k) if name == "A" else (op.m, op.n)


def _check_shared(site: Site, name: str, buffer: Var, layout: SharedLayout) -> None:
    if layout.shape != static_shape(buffer) or layout.dtype_bits != dtype_bits(str(buffer.ty.dtype)):
        raise TileShapeError(
            f"T.annotate_layout: the layout given for {buffer.name} is {layout}, but {buffer.name} is "
            f"{static_shape(buffer)} of {buffer.ty.dtype}",
            site.location,
        )
    row = layout.row_stride * layout.dtype_bits
    if row % _CHUNK_BITS:
        step = _CHUNK_BITS // layout.dtype_bits
        raise TileShapeError(
            f"T.gemm: tensor cores cannot read {name} ({buffer.name}) in the layout given for it: its rows are "
            f"{row / 8:g} bytes apart, no multiple of 16",
            site.location,
            f"pad rows by a multiple of {step} elements, or use SharedLayout.swizzled",
        )


def partitions(op: GemmOp, instruction: Instruction, threads: int) -> list[WarpPartition]:
    """Every even split of a product over the CTA's warps, whatever the policy."""
    out = []
    groups = threads // 32 // instruction.warps
    if threads % (32 * instruction.warps):
        return out
    step = instruction.valid_n[0]
    for m_groups in (g for g in range(1, groups + 1) if groups % g == 0):
        n_groups = groups // m_groups
        if op.m % (m_groups * instruction.m) or op.n % (n_groups * step):
            continue
        n = instruction.largest_n(op.n // n_groups)
        out.append(
            WarpPartition(
                "given",
                op.m,
                op.n,
                m_groups * instruction.warps,
                n_groups,
                m_groups,
                n_groups,
                op.m // m_groups // instruction.m,
                op.n // n_groups // n,
                instruction.m,
                n,
            )
        )
    return out


def matching_partition(
    op: GemmOp, layout: Fragment, threads: int, name: str = "C", instructions: list[Instruction] | None = None
) -> WarpPartition | None:
    """The split of warps under which an instruction has A or C in a given layout; None where there is none."""
    for instruction in _instructions(op) if instructions is None else instructions:
        if op.k % instruction.k:
            continue
        for part in partitions(op, instruction, threads):
            try:
                found = (
                    a_fragment(instruction, part, op.k, threads)
                    if name == "A"
                    else accumulator_fragment(instruction, part, threads)
                )
            except LayoutError:
                continue
            if found.digits == layout.digits and found.replicate == layout.replicate:
                return part
    return None
