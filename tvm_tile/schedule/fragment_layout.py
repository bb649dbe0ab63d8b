"""Where fragments lie in registers: ``tile.fragments`` on the kernel block, inferred over the whole kernel."""

from __future__ import annotations

from tvm.ir import Var

from ..errors import TileShapeError, TileTargetError
from ..ir.ops import GemmOp, Region
from ..layout import (
    REG,
    THREAD,
    Digit,
    Fragment,
    LayoutError,
    a_fragment,
    accumulator_fragment,
    default_fragment,
)
from .analysis import FRAGMENT, KernelView, Site, static_shape
from .decisions import read_fragments, read_instruction, read_partition
from .inference import FragmentTable, infer
from .rule import GIVEN, Decision, NotApplicable, Rule, TileSchedule, shape_error

__all__ = ["a_layout", "accumulator_layout", "fma_fragment", "fragment_layout"]


def fma_fragment(shape: tuple[int, int], threads: int) -> Fragment:
    """Accumulator of a product on the CUDA cores: threads in a grid over the tile, a block of rows by vectors each.

    A square block of results a thread reads least of the operands; 32 or fewer threads along a row keep row reductions
    inside a warp.
    """
    m, n = shape
    vector = next((v for v in (4, 2) if n % v == 0 and m * n // v >= threads), 1)
    best: tuple[float, Fragment] | None = None
    along_n = 1
    while along_n <= min(threads, 32):
        along_m = threads // along_n
        if along_n * along_m == threads and along_n * vector <= max(n, vector):
            rows, cols = -(-m // along_m), -(-n // (along_n * vector))
            # operand elements read a step of k, padding included, and unused threads count against a split
            cost = (rows + cols * vector) * (1 + (rows * along_m * cols * along_n * vector - m * n) / (m * n))
            row_digits = (Digit(rows, REG, cols * vector), Digit(along_m, THREAD, along_n))
            col_digits = (Digit(cols, REG, vector), Digit(along_n, THREAD, 1), Digit(vector, REG, 1))
            if best is None or cost < best[0]:
                best = (cost, Fragment((m, n), (row_digits, col_digits), (), threads))
        along_n *= 2
    return best[1] if best is not None else default_fragment(shape, threads, 32)


def accumulator_layout(site: Site) -> tuple[Fragment, str]:
    """Layout that a product requires of the fragment behind C, and which instruction says so.

    A slice of a larger fragment repeats the layout over the fragment, in new registers.

    Raises
    ------
    TileShapeError
        For a slice that starts at a run-time index or cuts the fragment unevenly.
    """
    op: GemmOp = site.op
    instruction = read_instruction(op.annotations)
    if instruction is None:
        tile, what = fma_fragment((op.m, op.n), site.threads), "accumulator of the CUDA cores"
    else:
        part = read_partition(op.annotations)
        try:
            tile = accumulator_fragment(instruction, part, site.threads)
        except LayoutError as err:
            raise shape_error(err, "T.gemm", op.location) from err
        what = f"accumulator of {instruction.family} in {site.name}"
    return _embedded(tile, op.c, op), what


def _embedded(tile: Fragment, region: Region, op: GemmOp) -> Fragment:
    """The layout of a whole buffer one box of which is laid out as ``tile``."""
    shape = static_shape(region.buffer)
    lead = len(shape) - 2
    for dim, (start, extent) in enumerate(zip(region.mins, [1] * lead + [op.m, op.n], strict=True)):
        if extent == shape[dim]:
            continue
        start = getattr(start, "value", start)
        if not isinstance(start, int) or start % extent or shape[dim] % extent:
            raise TileShapeError(
                f"T.gemm: C is a slice of {region.buffer.name} {shape} that starts at {start} in dimension {dim}; "
                f"slices of an accumulator divide it evenly and start at compile-time multiples of their extent "
                f"({extent})",
                op.location,
                "use one fragment for each product",
            )
    try:
        for dim in (0, 1):
            extent = shape[lead + dim]
            if extent != tile.shape[dim]:
                tile = tile.repeat(dim, extent // tile.shape[dim])
    except LayoutError as err:
        raise shape_error(err, f"T.gemm: C is a slice of {region.buffer.name} {shape}", op.location) from err
    for extent in reversed(shape[:lead]):
        tile = tile.expand(0, extent)
    return tile


def a_layout(site: Site) -> tuple[Fragment, str] | None:
    """Layout that a product requires of the fragment behind A; None where A is shared or the CUDA cores multiply."""
    op: GemmOp = site.op
    instruction = read_instruction(op.annotations)
    if op.a.scope != FRAGMENT or instruction is None:
        return None
    shape = static_shape(op.a.buffer)
    if len(shape) != 2 or shape[0] != op.m:
        raise TileTargetError(
            f"T.gemm: A is a slice of rows of fragment {op.a.buffer.name} {shape}; tensor cores read all "
            "rows of a fragment",
            op.location,
            "use one fragment for each product",
        )
    try:
        layout = a_fragment(instruction, read_partition(op.annotations), shape[1], site.threads)
    except LayoutError as err:
        raise shape_error(err, "T.gemm", op.location) from err
    return layout, f"A operand of {instruction.family} in {site.name}"


def _apply(sch: TileSchedule, hw):
    answers = []
    for kernel in sch.kernels:
        buffers = kernel.buffers(FRAGMENT)
        if not buffers:
            answers.append(NotApplicable("no fragments", kernel.name))
            continue
        table = FragmentTable(kernel)
        _take_given(table, read_fragments(kernel.info.block), GIVEN)
        _take_given(
            table,
            {n: Fragment.from_json(v) for n, v in kernel.info.layouts.items() if _is_fragment(kernel, n)},
            "T.annotate_layout",
        )
        needed = _require(table)
        infer(table)
        layouts = {}
        for buffer in buffers:
            if buffer not in table.layouts:
                continue  # never used
            layouts[buffer.name] = table.layouts[buffer].to_json()
            for view in kernel.views(buffer):
                layouts[view.name] = table.get(view).to_json()
            answers.append(Decision(kernel.name, buffer.name, repr(table.layouts[buffer])[1:-1], table.reasons[buffer]))
        if layouts:
            sch.annotate_kernel(kernel, "tile.fragments", layouts)
        _convert_operands(sch, kernel, table, needed)
    return answers


def _is_fragment(kernel: KernelView, name: str) -> bool:
    buffer = kernel.names.get(name)
    return buffer is not None and str(buffer.ty.storage_scope) == FRAGMENT


def _take_given(table: FragmentTable, layouts: dict[str, Fragment], why: str) -> None:
    for name, layout in layouts.items():
        buffer = table.kernel.names.get(name)
        if buffer is None or buffer in table.layouts or not table.kernel.base(buffer).same_as(buffer):
            continue
        # the front's warps hold its fragments, not all of the kernel's
        threads = max((site.threads for site, _ in table.kernel.uses(buffer)), default=table.kernel.threads)
        if layout.shape != static_shape(buffer) or layout.threads > threads:
            raise TileShapeError(
                f"the layout given for {name} is {layout}, but {name} is {static_shape(buffer)} in a kernel of "
                f"{threads} threads",
                table.kernel.location,
            )
        table.layouts[buffer], table.reasons[buffer] = layout.with_threads(threads), why


def _require(table: FragmentTable) -> list[tuple[Site, Var, Fragment]]:
    """Fix what products require; returns the operands (site, fragment, layout) that a product reads."""
    kernel = table.kernel
    gemms = [s for s in kernel.sites if isinstance(s.op, GemmOp)]
    for site in gemms:
        layout, what = accumulator_layout(site)
        _fix(table, site, site.op.c.buffer, layout, what)
    operands: list[tuple[Site, Var, Fragment]] = []
    for site in gemms:
        wanted = []
        if (required := a_layout(site)) is not None:
            wanted.append((site.op.a.buffer, *required))
        mask = site.op.mask
        if mask is not None and mask.scope == FRAGMENT:
            c = table.get(site.op.c.buffer)
            if static_shape(mask.buffer) == c.shape and mask.whole:
                wanted.append((mask.buffer, c, f"mask of {site.name}"))
            else:
                operands.append((site, mask.buffer, c))
        for buffer, layout, what in wanted:
            if table.get(buffer) is None:
                table.set(buffer, layout, what)
            operands.append((site, buffer, layout))
        if site.op.a.scope == FRAGMENT and not wanted:
            # CUDA cores read A at arbitrary elements: from shared memory
            operands.append((site, site.op.a.buffer, None))
    return operands


def _fix(table: FragmentTable, site: Site, buffer: Var, layout: Fragment, what: str) -> None:
    known = table.get(buffer)
    if known is None:
        table.set(buffer, layout, what)
        return
    cores = read_instruction(site.op.annotations) is None
    if known.digits == layout.digits and known.replicate == layout.replicate or (cores and known.replication == 1):
        return
    why = table.reasons[table.kernel.base(buffer)]
    raise TileShapeError(
        f"T.gemm: the accumulator {buffer.name} cannot be laid out for this product:\n"
        f"  required here: {layout} ({what})\n  laid out as:   {known} ({why})",
        site.location,
        "let T.annotate_layout give what the instruction writes, or leave it out"
        if "annotate" in why or "given" in why
        else "use the same warp policy for all products into one accumulator, or add two accumulators",
    )


def _convert_operands(sch: TileSchedule, kernel: KernelView, table: FragmentTable, operands) -> None:
    """Note operands whose fragment ended up in another layout than the product reads."""
    moved: dict[str, tuple[Site, list[str]]] = {}
    for site, buffer, layout in operands:
        held = table.get(buffer)
        if layout is None or held.digits != layout.digits or held.replicate != layout.replicate:
            moved.setdefault(site.name, (site, []))[1].append(buffer.name)
    for site, names in moved.values():
        sch.annotate(site, "tile.convert", sorted(set(names)))


fragment_layout = Rule("fragment_layout", _apply)
