"""``T.copy`` between global memory, shared tiles and fragments, as the copy rule decided.

Element-wise forms (``vector``, ``scalar``, ``registers``) walk the copy's loop and move vectors through a few
registers, where they are converted; ``cp.async`` hands 4, 8 or 16 bytes to the asynchronous copy unit, which fills
with zeros what a guard excludes; ``ldmatrix`` and ``stmatrix`` move 8x8 matrices (:mod:`.matrix`); ``staged`` goes
through a shared scratch tile; ``tma`` stores boxes of a fragment by the copy engine (:mod:`.tma_store`).
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx import BufferStore, IfThenElse

from ...errors import InternalError
from ...ir.ops import CopyOp, Region
from ...ir.visit import substitute
from ...layout import Fragment, choose, default_fragment
from ...schedule.decisions import CopyPlan, read_convert, read_copy, read_loop, read_window
from .build import const, evaluate, seq, unrolled, when
from .convert import cast, convert_run
from .elementwise import emit_body, lower_every_thread, lower_once
from .loops import ElementLoop
from .matrix import load_matrices, store_matrices
from .program import Access, CommitNode, MicroNode, OpNode, WaitNode
from .space import accesses, axis_values, expr, fresh, is_zero
from .storage import SharedTile, Storage, dtype_bits
from .tma_store import lower_tma_store
from .vectors import joined_access, row_vector

__all__ = ["lower_copy"]


def lower_copy(storage: Storage, node: OpNode, hw) -> list:
    """Steps of a copy.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`CopyOp` with its decisions.
    hw : GPU
        The target machine.
    """
    op: CopyOp = node.op
    if not op.axes:
        return lower_once(storage, node, hw)
    if op.dst.buffer in storage.locals:
        return lower_every_thread(storage, node, hw)
    plan = read_copy(op.annotations)
    if plan is None:
        raise InternalError(f"copy {op.name} was not decided", op.location)
    if plan.kind == "cp.async":
        return _asynchronous(storage, node, plan)
    if plan.kind == "staged":
        return _staged(storage, node, plan, hw)
    if plan.kind in ("ldmatrix", "stmatrix"):
        return _matrices(storage, node, plan, hw)
    if plan.kind == "tma":
        return lower_tma_store(storage, node, plan.vector, hw)
    if plan.kind in ("vector", "scalar", "registers"):
        return _element_wise(storage, node, plan, hw)
    raise InternalError(f"no lowering for copies by {plan.kind}", op.location)


# ---- element-wise


def _element_wise(storage: Storage, node: OpNode, plan: CopyPlan, hw) -> list[MicroNode]:
    op: CopyOp = node.op
    space = ElementLoop(storage, node)
    away = [r for r in (op.src, op.dst) if r.buffer in storage.fragments and not _at_hand(space, r)]
    if away or read_convert(op.annotations):
        return _staged(storage, node, plan, hw)
    reads, writes = accesses(storage, node.versions, [op.body])

    def emit():
        vector = _vector(space, plan.vector, op)
        if vector == 1:
            return emit_body(storage, space, space.prepare(fresh(op.body)), hw)
        return _in_vectors(storage, node, space, vector, hw)

    return [MicroNode(reads, writes, emit, f"copy {op.name} ({plan.kind})")]


def _at_hand(space: ElementLoop, region: Region) -> bool:
    """Whether a side that is a fragment needs no communication in the copy's loop."""
    indices = _indices(region, [a.var for a in space.op.axes])
    probe = space.prepare(tirx.BufferLoad(region.buffer, indices))
    return space.at_hand(region.buffer, probe.indices)


def _indices(region: Region, values: list) -> list:
    """Indices of a region at axis values."""
    out = []
    for low, axis in zip(region.mins, region.axes, strict=True):
        if axis is None:
            out.append(expr(low))
        else:
            out.append(values[axis] if is_zero(low) else expr(low) + values[axis])
    return out


def _vector(space: ElementLoop, wanted: int, op: CopyOp) -> int:
    """Elements that the loop really has side by side: the decision, or fewer where digits or tile rows are shorter."""
    layout = space.layout
    for region in (op.src, op.dst):
        if region.buffer in space.storage.tiles:
            wanted = row_vector(space.storage.tiles[region.buffer].layout, wanted)
    if wanted <= 1 or layout is None or not layout.reg_digits or not op.axes:
        return 1
    last = layout.reg_digits[-1]
    if last.stride != 1 or last.dim != layout.ndim - 1 or last.weight != 1:
        return 1
    if space.window is not None:
        region_axis = space.window[2][-1]
        if region_axis != len(op.axes) - 1 or not isinstance(expr(space.window[1][-1]), tirx.IntImm):
            return 1
    while wanted > 1 and (last.size % wanted or layout.shape[-1] % wanted or not _window_divides(space, op, wanted)):
        wanted //= 2
    return wanted


def _window_divides(space: ElementLoop, op: CopyOp, vector: int) -> bool:
    if space.window is None:
        return True
    low, extent = int(expr(space.window[1][-1])), int(op.axes[-1].extent)
    return low % vector == 0 and extent % vector == 0


def _in_vectors(storage: Storage, node: OpNode, space: ElementLoop, vector: int, hw):
    """The copy's loop, ``vector`` elements a step: memory to registers, conversion, registers to memory."""
    op: CopyOp = node.op
    source, target = op.src.dtype, op.dst.dtype
    inside = storage.new_local((vector,), source, f"{op.src.buffer.name}_lanes")
    outside = inside if source == target else storage.new_local((vector,), target, f"{op.dst.buffer.name}_lanes")
    replicated = op.dst.buffer not in storage.fragments and space.layout.replication > 1

    def one(reg, values):
        stmts = [_load_run(storage, node, space, reg, values, inside, vector, hw)]
        if outside is not inside:
            stmts.append(convert_run(outside, const(0), inside, const(0), vector, hw))
        stmts.append(_store_run(storage, node, space, reg, values, outside, vector, hw))
        return seq(stmts)

    return space.visit(one, vector=vector, primary=replicated)


def _place(storage: Storage, node: OpNode, expression, values: list):
    """An expression over axes and tile-level buffers at axis values."""
    placed = storage.rewrite(expression, versions=node.versions)
    return substitute(placed, axis_values(node.op.axes, values))


def _load_run(storage: Storage, node: OpNode, space: ElementLoop, reg, values, local, vector: int, hw):
    op: CopyOp = node.op
    region = op.src
    if region.buffer in storage.fragments:
        return unrolled(vector, lambda k: BufferStore(local, _register(storage, space, region, reg + k), [k]), "lane")
    axes = [a.var for a in op.axes]
    at = [_place_axes(node, i, values) for i in _indices(region, axes)]
    load = joined_access(storage, region.buffer, at, local, vector, True, node.versions)
    if op.src_guard is None:
        return load
    safe = cast(tirx.const(op.safe_value, "float32" if "float" in region.dtype else region.dtype), region.dtype, hw)
    fill = unrolled(vector, lambda k: BufferStore(local, safe, [k]), "lane")
    return IfThenElse(_place(storage, node, op.src_guard, values), load, fill)


def _place_axes(node: OpNode, index, values: list):
    return substitute(expr(index), axis_values(node.op.axes, values))


def _store_run(storage: Storage, node: OpNode, space: ElementLoop, reg, values, local, vector: int, hw):
    op: CopyOp = node.op
    region = op.dst
    if region.buffer in storage.fragments:
        held = storage.fragments[region.buffer]
        return unrolled(
            vector,
            lambda k: BufferStore(held.local, local[k], [_register_index(storage, space, region, reg + k)]),
            "lane",
        )
    axes = [a.var for a in op.axes]
    at = [_place_axes(node, i, values) for i in _indices(region, axes)]
    store = joined_access(storage, region.buffer, at, local, vector, False, node.versions)
    return store if op.dst_guard is None else when(_place(storage, node, op.dst_guard, values), store)


def _register(storage: Storage, space: ElementLoop, region: Region, reg):
    return storage.fragments[region.buffer].local[_register_index(storage, space, region, reg)]


def _register_index(storage: Storage, space: ElementLoop, region: Region, reg):
    """Register of a fragment side at one register of the copy's loop."""
    probe = space.prepare(tirx.BufferLoad(region.buffer, _indices(region, [a.var for a in space.op.axes])))
    return storage.rewrite(probe, space.layout, reg, space.dims).indices[0]


# ---- cp.async


def _asynchronous(storage: Storage, node: OpNode, plan: CopyPlan) -> list:
    op: CopyOp = node.op
    tile = storage.tile_of(op.dst.buffer)
    size = plan.vector * dtype_bits(op.src.dtype) // 8
    if size not in (4, 8, 16) or op.src.dtype != op.dst.dtype or op.dst_guard is not None or op.safe_value != 0:
        raise InternalError(f"copy {op.name} cannot be a cp.async of {size} bytes", op.location)
    space = ElementLoop(storage, node)
    reads, _ = accesses(storage, node.versions, [op.body])
    writes = [Access(op.dst.buffer, node.versions.get(op.dst.buffer), "cp.async")]

    def one(_, values):
        axes = [a.var for a in op.axes]
        source = [_place_axes(node, i, values) for i in _indices(op.src, axes)]
        target = [_place_axes(node, i, values) for i in _indices(op.dst, axes)]
        element = storage.element(tile, [storage.rewrite(i, versions=node.versions) for i in target],
                                  node.versions.get(op.dst.buffer))  # fmt: skip
        address = storage.address(tile, element)
        return _cp_async(storage, node, address, source, size, values)

    def emit():
        vector = _vector(space, plan.vector, op)
        if vector != plan.vector:
            raise InternalError(f"vectors of {plan.vector} elements do not fit {space.layout}", op.location)
        return space.visit(one, vector=vector, primary=space.layout.replication > 1)

    steps: list = [MicroNode(reads, writes, emit, f"copy {op.name} (cp.async {size})")]
    if op.dst.buffer not in node.versions:
        steps += [CommitNode(), WaitNode(0)]
    return steps


def _cp_async(storage: Storage, node: OpNode, address, source: list, size: int, values: list):
    op: CopyOp = node.op
    name = "cp.async.cg.shared.global" if size == 16 else "cp.async.ca.shared.global"
    if op.src_guard is None:
        pointer = tirx.address_of(_global(storage, node, op.src, source))
        return evaluate(T.ptx[name](address, pointer, size))
    inside = _place(storage, node, op.src_guard, values)
    # an address outside of the tensor may not even be formed: excluded lanes read nothing at its start
    clamped = [tirx.Select(inside, i, tirx.const(0, i.ty.dtype)) for i in source]
    pointer = tirx.address_of(_global(storage, node, op.src, clamped))
    return evaluate(T.ptx[name](address, pointer, size, tirx.Select(inside, const(size, "uint32"), const(0, "uint32"))))


def _global(storage: Storage, node: OpNode, region: Region, at: list):
    return storage.rewrite(tirx.BufferLoad(region.buffer, at), versions=node.versions)


# ---- ldmatrix, stmatrix


def _matrices(storage: Storage, node: OpNode, plan: CopyPlan, hw) -> list[MicroNode]:
    op: CopyOp = node.op
    load = plan.kind == "ldmatrix"
    region = op.src if load else op.dst
    access = Access(region.buffer, node.versions.get(region.buffer))

    def emit():
        made = load_matrices(storage, node) if load else store_matrices(storage, node, hw)
        return made

    label = f"copy {op.name} ({plan.kind})"
    return [MicroNode([access], [], emit, label) if load else MicroNode([], [access], emit, label)]


# ---- staged


def _staged(storage: Storage, node: OpNode, plan: CopyPlan, hw) -> list:
    """Through a scratch tile of the copy's own shape: source to scratch in the source's layout, then to the target."""
    if node.op.src.buffer in storage.fragments:
        return _through_scratch(storage, node, plan, hw)
    # memory to a fragment that the copy's loop does not hold: read in the fragment's own layout
    return _from_memory(storage, node, plan, hw)


def _from_memory(storage: Storage, node: OpNode, plan: CopyPlan, hw) -> list[MicroNode]:
    op: CopyOp = node.op
    held = storage.fragments[op.dst.buffer]
    space = ElementLoop(storage, node, held.layout, (op.dst.buffer, op.dst.mins, op.dst.axes))
    reads, writes = accesses(storage, node.versions, [op.body])

    def emit():
        vector = _vector(space, plan.vector, op)
        if vector > 1:
            return _in_vectors(storage, node, space, vector, hw)
        return emit_body(storage, space, space.prepare(fresh(op.body)), hw)

    return [MicroNode(reads, writes, emit, f"copy {op.name} (in the target's layout)")]


def _through_scratch(storage: Storage, node: OpNode, plan: CopyPlan, hw) -> list[MicroNode]:
    """From a fragment: its owners convert and write scratch, which is read as memory or the target wants it."""
    op: CopyOp = node.op
    held = storage.fragments[op.src.buffer]
    shape = [int(a.extent) for a in op.axes]
    bits = dtype_bits(op.dst.dtype)
    scratch = storage.new_scratch(shape, op.dst.dtype, f"{op.src.buffer.name}_staged", choose(shape, bits).layout)
    staged = Region(scratch.buffer, [const(0)] * len(shape), shape, list(range(len(shape))))
    moved = OpNode(replace(op, src=staged, src_guard=None), node.versions)
    inner = ElementLoop(storage, node, held.layout, (op.src.buffer, op.src.mins, op.src.axes))
    if op.dst.buffer in storage.fragments:
        target = storage.fragments[op.dst.buffer].layout
        outer, wanted = ElementLoop(storage, moved, target, (op.dst.buffer, op.dst.mins, op.dst.axes)), 128 // bits
    else:
        decided = None if read_window(op.annotations) else read_loop(op.annotations)
        layout = _coalesced(decided, shape, storage.threads, bits, plan.vector)
        outer, wanted = ElementLoop(storage, moved, layout), plan.vector
    guards, writes = accesses(storage, node.versions, [op.body])
    widest = 128 // max(bits, dtype_bits(op.src.dtype))

    def write():
        vector = row_vector(scratch.layout, _vector(inner, widest, replace(op, dst=staged)))
        return _scratch_writes(storage, node, inner, held, scratch, staged, vector, hw)

    def read():
        return _in_vectors(storage, moved, outer, _vector(outer, wanted, moved.op), hw)

    return [
        MicroNode([], [Access(scratch.buffer)], write, f"copy {op.name} to scratch"),
        MicroNode([Access(scratch.buffer), *guards], writes, read, f"copy {op.name} from scratch"),
    ]


def _coalesced(decided: Fragment | None, shape: list[int], threads: int, bits: int, vector: int) -> Fragment:
    """Layout of the second half: the decided loop where it is one over memory, else the coalesced default."""
    if decided is not None and decided.ndim == len(shape) and decided.replication == 1:
        if decided.vector_width(-1, bits) >= vector:
            return decided
    return default_fragment(shape, threads, bits, max(bits, vector * bits))


def _scratch_writes(storage, node: OpNode, space: ElementLoop, held, scratch: SharedTile, staged: Region, vector, hw):
    op: CopyOp = node.op
    narrow = None
    if op.src.dtype != op.dst.dtype:
        narrow = storage.new_local((vector,), op.dst.dtype, f"{op.src.buffer.name}_lanes")

    def one(reg, values):
        at = [_place_axes(node, i, values) for i in _indices(staged, [a.var for a in op.axes])]
        if narrow is None:
            return joined_access(storage, scratch.buffer, at, held.local, vector, False, {}, reg)
        convert = convert_run(narrow, const(0), held.local, reg, vector, hw)
        return seq([convert, joined_access(storage, scratch.buffer, at, narrow, vector, False, {})])

    return space.visit(one, vector=vector, primary=held.layout.replication > 1)
