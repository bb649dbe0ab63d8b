"""Where shared tiles lie: ``tile.shared`` on the kernel block, swizzled where matrix or vector accesses profit."""

from __future__ import annotations

from tvm.ir import Var

from ..errors import TileShapeError
from ..ir.ops import CopyOp, GemmOp
from ..layout import WGMMA, LayoutError, SharedLayout, choose, crosses, why_not_swizzled
from .analysis import GLOBAL, SHARED, KernelView, dtype_bits, static_shape
from .decisions import read_instruction, read_partition, read_shared
from .gemm_instruction import operand_starts
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule, shape_error

__all__ = ["shared_layout"]


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        buffers = kernel.buffers(SHARED)
        if not buffers:
            answers.append(NotApplicable("no shared tiles", kernel.name))
            continue
        given = {name: (layout, GIVEN) for name, layout in read_shared(kernel.info.block).items()}
        for name, data in kernel.info.layouts.items():
            buffer = kernel.names.get(name)
            if buffer is not None and str(buffer.ty.storage_scope) == SHARED:
                given.setdefault(name, (_annotated(kernel, name, data), "T.annotate_layout"))
        layouts = {}
        for buffer in buffers:
            if buffer.name in given:
                layout, why = given[buffer.name]
                _check(kernel, buffer, layout)
                warning = False
            else:
                layout, why, warning = _choose(kernel, buffer)
            layouts[buffer.name] = layout.to_json()
            answers.append(
                Decision(kernel.name, buffer.name, repr(layout)[1:-1].removeprefix("SharedLayout "), why, warning)
            )
            for view in kernel.views(buffer):
                plain = SharedLayout.row_major(static_shape(view), dtype_bits(str(view.ty.dtype)))
                layouts[view.name] = plain.to_json()
        sch.annotate_kernel(kernel, "tile.shared", layouts)
    return answers


def _annotated(kernel: KernelView, name: str, data) -> SharedLayout:
    try:
        return SharedLayout.from_json(data)
    except (LayoutError, TypeError, ValueError) as err:
        raise TileShapeError(
            f"T.annotate_layout: {name} is a shared tile, and the layout given is none of one: {err}",
            kernel.location,
            "use tvm_tile.layout.SharedLayout",
        ) from err


def _check(kernel: KernelView, buffer: Var, layout: SharedLayout) -> None:
    if layout.shape != static_shape(buffer) or layout.dtype_bits != dtype_bits(str(buffer.ty.dtype)):
        raise TileShapeError(
            f"the layout given for {buffer.name} is {layout}, but {buffer.name} is {static_shape(buffer)} of "
            f"{buffer.ty.dtype}",
            kernel.location,
        )
    starts = _starts(kernel, buffer)
    if layout.span and crosses(starts, layout.dtype_bits, layout.span):
        raise TileShapeError(
            f"the layout given for {buffer.name} is {layout}, but wgmma reads its columns in parts that start inside "
            f"of a swizzle block ({', '.join(str(s) for s, _ in starts)})",
            kernel.location,
            "use a narrower swizzle",
        )
    if kernel.views(buffer) and (layout.span or layout.pad):
        raise TileShapeError(
            f"{buffer.name} has the layout {layout}, but T.view / T.reshape sees its rows back to back",
            kernel.location,
            "leave the layout out, or copy the tile instead of viewing it",
        )


def _choose(kernel: KernelView, buffer: Var) -> tuple[SharedLayout, str, bool]:
    """(layout, why, whether to warn)."""
    shape, bits = static_shape(buffer), dtype_bits(str(buffer.ty.dtype))
    plain = SharedLayout.row_major(shape, bits)
    if kernel.views(buffer):
        return plain, "it has views, which see its rows back to back", False
    accesses = _kinds(kernel, buffer)
    if not accesses & {"ldmatrix", "wgmma", "vector"}:
        return plain, "accessed element by element only", False
    if len(shape) < 2:
        return plain, "one row", False
    try:
        choice = choose(shape, bits, accesses, _starts(kernel, buffer))
    except LayoutError as err:
        raise shape_error(err, f"shared tile {buffer.name}", kernel.location) from err
    users = " and ".join(sorted(accesses))
    if choice.swizzled:
        return choice.layout, f"{choice.reason}; for {users} accesses", False
    asked = kernel.info.swizzle is not None and "ldmatrix" in accesses
    return choice.layout, choice.reason + (" (T.use_swizzle is in effect)" if asked else ""), asked


def _starts(kernel: KernelView, buffer: Var) -> list[tuple[int, int]]:
    """First column and columns of each wgmma operand that lies along the rows of a tile."""
    found: list[tuple[int, int]] = []
    for site, access in kernel.uses(buffer):
        if not isinstance(site.op, GemmOp):
            continue
        instruction, part = read_instruction(site.op.annotations), read_partition(site.op.annotations)
        if instruction is not None and part is not None and instruction.family == WGMMA:
            found += operand_starts(site.op, part, access.buffer)
    return found


def _kinds(kernel: KernelView, buffer: Var) -> set[str]:
    found: set[str] = set()
    for site, access in kernel.uses(buffer):
        if isinstance(site.op, GemmOp):
            mask = site.op.mask is not None and access.buffer.same_as(site.op.mask.buffer)
            instruction = read_instruction(site.op.annotations)
            if mask:
                found.add("word")
            elif instruction is None:
                found.add("vector")  # rows of K read side by side: the swizzle spreads them over the banks
            else:
                found.add("ldmatrix" if instruction.family == "mma" else "wgmma")
        elif isinstance(site.op, CopyOp):
            other = site.op.src if access.write else site.op.dst
            found.add(
                "vector"
                if other.scope in (GLOBAL, SHARED) or why_not_swizzled(static_shape(buffer), access.bits) is None
                else "word"
            )
        else:
            found.add("word")
    return found


shared_layout = Rule("shared_layout", _apply)
