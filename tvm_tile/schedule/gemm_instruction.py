"""Which instruction multiplies: mma.sync, wgmma, or the CUDA cores.

Annotation ``tile.instruction`` = [family, A, B, C, m, n, k] on every gemm block.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ..errors import TileShapeError, TileTargetError, TileTypeError
from ..ir.ops import GemmOp
from ..layout import (
    MMA,
    SPANS,
    WGMMA,
    Instruction,
    LayoutError,
    SharedLayout,
    WarpPartition,
    allowed_triples,
    crosses,
    partition,
    supported,
    why_not_swizzled,
)
from .analysis import FRAGMENT, SHARED, KernelView, Site, dtype_bits
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule

__all__ = ["FMA", "choose_instruction", "gemm_instruction", "operand_dtypes", "operand_starts", "why_not_wgmma"]

FMA = "fma"


def operand_dtypes(op: GemmOp) -> tuple[str, str, str]:
    """(A, B, accumulator) dtypes as instructions name them: ``tf32`` for float32 operands of reduced precision."""
    a, b, c = op.a.dtype, op.b.dtype, op.c.dtype
    return ("tf32", "tf32", c) if op.precision == "tf32" else (a, b, c)


def _on_cuda_cores(op: GemmOp) -> str | None:
    """Why a product belongs on the CUDA cores: no tensor core computes it as written. None where one does."""
    a, _, c = operand_dtypes(op)
    if a == "float32":
        return 'IEEE float32 has no tensor-core form (precision="tf32" would allow one)'
    if a == "float64":
        return "float64 runs on the CUDA cores"
    return None


def operand_starts(op: GemmOp, part: WarpPartition, buffer) -> list[tuple[int, int]]:
    """First column and columns of the instructions' operands that lie along the rows of a tile (MN-major).

    Parameters
    ----------
    op : GemmOp
        A product by wgmma.
    part : WarpPartition
        Its split over warpgroups.
    buffer : Var
        The tile behind A or B.
    """
    found: list[tuple[int, int]] = []
    for region, along, groups, repeat, extent in (
        (op.a, op.trans_a, part.m_groups, part.m_repeat, part.instruction_m),
        (op.b, not op.trans_b, part.n_groups, part.n_repeat, part.instruction_n),
    ):
        if along and region.scope == SHARED and region.buffer.same_as(buffer):
            first = region.mins[-1]
            first = int(first) if isinstance(first, int | tirx.IntImm) else 0
            found += [(first + n * extent, extent) for n in range(groups * repeat)]
    return found


def _why_not_apart(op: GemmOp, threads: int, instruction: Instruction) -> str | None:
    """Why no swizzle keeps the operands of all warpgroups in its blocks, or None."""
    try:
        part = partition(op.policy, op.m, op.n, threads // 32, instruction)
    except LayoutError:
        return None  # the policy's own error says more
    for name, region in (("A", op.a), ("B", op.b)):
        starts = operand_starts(op, part, region.buffer)
        bits = dtype_bits(region.dtype)
        spans = [s for s in SPANS if why_not_swizzled(region.shape, bits, s) is None]
        if starts and all(crosses(starts, bits, span) for span in spans):
            return f"{name} ({region.buffer.name}) would cross swizzle blocks where warpgroups share its {op.n} columns"
    return None


def why_not_wgmma(op: GemmOp, threads: int, hw) -> str | None:
    """Why wgmma cannot compute a product, or None where it can."""
    if not supported(WGMMA, hw.sm):
        return f"{hw.name} has no wgmma"
    triple = operand_dtypes(op)
    if triple not in allowed_triples(WGMMA, hw.sm):
        return f"wgmma has no {' x '.join(triple[:2])} -> {triple[2]}"
    if threads % 128:
        return f"{threads} threads are no whole warpgroups of 128"
    if op.m % 64:
        return f"M = {op.m} is no multiple of 64"
    if op.n % 8:
        return f"N = {op.n} is no multiple of 8"
    instruction = next(i for i in supported(WGMMA, hw.sm) if (i.a_dtype, i.b_dtype, i.c_dtype) == triple)
    if op.k % instruction.k:
        return f"K = {op.k} is no multiple of {instruction.k}"
    bits = dtype_bits(op.b.dtype)
    for name, region, k_contiguous in (("A", op.a, not op.trans_a), ("B", op.b, op.trans_b)):
        if region.scope != SHARED:
            continue
        reason = why_not_swizzled(region.shape, bits)
        if reason:
            return f"{name} ({region.buffer.name}) cannot be swizzled: {reason}"
        if bits != 16 and not k_contiguous:
            return f"{name} ({region.buffer.name}) of {bits} bits has K along the rows; wgmma wants K contiguous"
    if op.a.scope == FRAGMENT and op.trans_a:
        return "A in registers cannot be transposed"
    if op.mask is not None:
        return "a tile mask merges the accumulator on the CUDA cores"
    return _why_not_apart(op, threads, instruction)


def choose_instruction(
    op: GemmOp, threads: int, hw, families: Sequence[str] = (MMA,)
) -> tuple[Instruction | None, str]:
    """(instruction or None for the CUDA cores, why).

    Parameters
    ----------
    op : GemmOp
        The product.
    threads : int
        Threads that execute it.
    hw : GPU
        The machine.
    families : sequence of str
        Tensor-core families to consider, best first.

    Raises
    ------
    TileTypeError
        A dtype triple that this machine does not have.
    TileShapeError
        A K that no instruction divides.
    """
    reason = _on_cuda_cores(op)
    if reason:
        return None, reason
    skipped = ""
    if WGMMA in families:
        why = why_not_wgmma(op, threads, hw)
        if why is None:
            triple = operand_dtypes(op)
            found = next(i for i in supported(WGMMA, hw.sm) if (i.a_dtype, i.b_dtype, i.c_dtype) == triple)
            return found, "wgmma reads its operands from shared memory at the full rate"
        skipped = f"; not wgmma: {why}"
    instruction = _mma(op, hw)
    return instruction, f"deepest k of mma.sync that divides K = {op.k}{skipped}"


def _mma(op: GemmOp, hw) -> Instruction:
    a, b, c = triple = operand_dtypes(op)
    fitting = [i for i in supported(MMA, hw.sm) if (i.a_dtype, i.b_dtype, i.c_dtype) == triple]
    if not fitting:
        triples = "; ".join(f"{x} x {y} -> {z}" for x, y, z in allowed_triples(MMA, hw.sm))
        raise TileTypeError(
            f"T.gemm: {hw.name} has no tensor-core product {a} x {b} -> {c}",
            op.location,
            f"possible on {hw.name}: {triples}",
        )
    for instruction in fitting:
        if op.k % instruction.k == 0:
            return instruction
    least = min(i.k for i in fitting)
    raise TileShapeError(
        f"T.gemm: K = {op.k} is no multiple of {least}, the k of mma.sync with {a} operands",
        op.location,
        f"make the tile's K {-(-op.k // least) * least}; T.copy zero-fills what lies beyond the tensor",
    )


def _apply(sch: TileSchedule, hw, families: Sequence[str]):
    answers = [_decide(sch, kernel, site, hw, families) for kernel, site in sch.sites(GemmOp)]
    return answers or NotApplicable("no T.gemm")


def _decide(sch: TileSchedule, kernel: KernelView, site: Site, hw, families) -> Decision:
    op: GemmOp = site.op
    given = sch.given(site, "tile.instruction")
    if given is not None:
        _check(op, site, [str(g) for g in given[:1]] + list(given[1:]), hw)
        return Decision(kernel.name, site.name, _text(given), GIVEN)
    plain = _why_plain(kernel, op) if WGMMA in families else None
    usable = [f for f in families if f != WGMMA] if plain else families
    instruction, why = choose_instruction(op, site.threads, hw, usable)
    why = f"{why}; not wgmma: {plain}" if plain and instruction is not None else why
    if instruction is not None and op.a.scope == FRAGMENT and op.trans_a:
        raise TileTargetError(
            f"T.gemm: A ({op.a.buffer.name}) is a fragment and transposed; tensor cores read A from registers with K "
            "along the rows only",
            op.location,
            f"T.copy {op.a.buffer.name} to a shared tile, or transpose it there",
        )
    value = _value(op, instruction)
    sch.annotate(site, "tile.instruction", value)
    return Decision(kernel.name, site.name, _text(value), why)


def _why_plain(kernel: KernelView, op: GemmOp) -> str | None:
    """Why an operand cannot be swizzled as wgmma wants it, or None: it is viewed, or laid out by the user."""
    for region in (op.a, op.b):
        if region.scope != SHARED:
            continue
        base = kernel.base(region.buffer)
        if kernel.views(base):
            return f"{base.name} has views, which see its rows back to back"
        given = kernel.info.layouts.get(base.name)
        try:
            layout = None if given is None else SharedLayout.from_json(given)
        except (LayoutError, TypeError, ValueError):
            continue  # the layout rule reports it
        if layout is not None and not layout.span:
            return f"the layout given for {base.name} is not swizzled"
    return None


def _value(op: GemmOp, instruction: Instruction | None) -> list:
    if instruction is None:
        return [FMA, op.a.dtype, op.b.dtype, op.c.dtype, 1, 1, 1]
    i = instruction
    return [i.family, i.a_dtype, i.b_dtype, i.c_dtype, i.m, i.n, i.k]


def _check(op: GemmOp, site: Site, given: list, hw) -> None:
    """A given instruction exists, multiplies these dtypes and divides K."""
    if given[0] == FMA:
        return
    family, a, b, c, _, _, k = given
    known = [i for i in supported(family, hw.sm) if (i.a_dtype, i.b_dtype, i.c_dtype) == (a, b, c) and i.k == k]
    if not known or (a, b, c) != operand_dtypes(op):
        raise TileTargetError(
            f"T.gemm: the given instruction {given} does not compute "
            f"{' x '.join(operand_dtypes(op)[:2])} -> {op.c.dtype} on {hw.name}",
            site.location,
        )
    if op.k % k:
        raise TileShapeError(f"T.gemm: K = {op.k} is no multiple of {k}, the k of the given instruction", site.location)


def _text(value) -> str:
    family, a, b, c, m, n, k = value
    return f"CUDA cores, {a} x {b} -> {c}" if family == FMA else f"{family} m{m}n{n}k{k}, {a} x {b} -> {c}"


def gemm_instruction(families: Sequence[str] = (MMA,)) -> Rule:
    """The rule, for the given tensor-core families (best first)."""
    return Rule("gemm_instruction", lambda sch, hw: _apply(sch, hw, families))
