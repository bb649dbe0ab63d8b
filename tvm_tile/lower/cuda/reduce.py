"""Reductions: registers first, butterfly shuffles inside a warp, shared memory across warps (layout.lanes_for_reduce).

Narrow types accumulate in 32 bits. Every thread of a replicated result ends with the same value; with ``clear=False``
the old value is combined once, where the result is stored. Maximum and minimum propagate NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import Bind, BufferStore, ForKind

from ...ir.ops import ReduceOp
from ...layout import (
    BROADCAST,
    THREAD,
    Digit,
    Fragment,
    ReducePlan,
    contains,
    lanes_for_reduce,
    register_in,
    replicated_fragment,
)
from ...schedule.decisions import read_deferred
from .build import const, loop, seq, unrolled, when
from .chains import chains_of
from .convert import NARROW, cast
from .loops import ElementLoop
from .program import Access, MicroNode, OpNode, SumNode
from .space import accesses, expr, visit
from .storage import SharedTile, Storage

__all__ = ["accumulator_dtype", "combine", "complete_sum", "identity", "lower_reduce"]

_FULL = 0xFFFFFFFF
_WARP = 32
_RANKS_UNROLLED = 8
_DEVICE = "__device__ __forceinline__"


def accumulator_dtype(dtype: str) -> str:
    """The dtype in which values of ``dtype`` are combined."""
    if dtype in NARROW:
        return "float32"
    return {"int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32", "bool": "int32"}.get(dtype, dtype)


def identity(kind: str, dtype: str):
    """The value that changes nothing when it is combined, in an accumulator's dtype."""
    if kind in ("max", "min"):
        if dtype.startswith("float"):
            return tirx.const(float("-inf") if kind == "max" else float("inf"), dtype)
        return tirx.min_value(dtype) if kind == "max" else tirx.max_value(dtype)
    return tirx.const(1 if kind == "all" else 0, dtype)


def combine(kind: str, a, b):
    """Two partial results combined."""
    dtype = str(a.ty.dtype)
    if kind in ("sum", "abssum"):
        return a + b
    if kind in ("any", "all"):
        return a | b if kind == "any" else a & b
    name = "min" if kind == "min" else "max"
    if dtype == "float32":
        helper = f"tile_{name}_nan"
        source = (
            f"{_DEVICE} float {helper}(float a, float b) {{ float d; "
            f'asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }}'
        )
        return T.cuda.func_call(helper, a, b, source_code=source, return_type="float32")
    better = a < b if kind == "min" else a > b
    if dtype == "float64":
        better = tirx.Or(better, tirx.isnan(a))
    return tirx.Select(better, a, b)


def lower_reduce(storage: Storage, node: OpNode, hw) -> list[MicroNode]:
    """Steps of a reduction.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        A :class:`ReduceOp` with the layout in which its source is visited.
    hw : GPU
        The target machine.
    """
    return _Reduction(storage, node, hw).steps()


def complete_sum(storage: Storage, node: SumNode, hw) -> list[MicroNode]:
    """Steps that combine the threads' parts of a deferred sum.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : SumNode
        The accumulated fragment and the reduction that fed it.
    hw : GPU
        The target machine.
    """
    return _Reduction(storage, node.reduce, hw).complete(node.buffer)


@dataclass
class _Result:
    """Layout of the result in the accumulators and which axis each of its dimensions is."""

    layout: Fragment
    axes: list[int | None]


class _Reduction:
    def __init__(self, storage: Storage, node: OpNode, hw) -> None:
        self.storage, self.node, self.hw = storage, node, hw
        self.op: ReduceOp = node.op
        self.vote = self.op.kind in ("any", "all")
        self.space = ElementLoop(storage, node)
        self.dtype = accumulator_dtype(self.op.dst.dtype)
        self.plan, self.result = self._plan()
        self.registers = max(1, self.result.layout.registers)
        self.acc = storage.new_local((self.registers,), self.dtype, f"{self.op.dst.buffer.name}_acc")
        self.chains = chains_of(self.space, self.plan.dim, self.registers, self.vote, storage.tx)
        self.parts = self.acc
        if self.chains.width > 1:
            count = self.registers * self.chains.width
            self.parts = storage.new_local((count,), self.dtype, f"{self.op.dst.buffer.name}_parts")

    def _plan(self) -> tuple[ReducePlan, _Result]:
        layout, threads = self.space.layout, self.storage.threads
        warp = _WARP if threads % _WARP == 0 else 1  # a last warp that is not whole takes no part in shuffles
        if layout is None:
            layout = Fragment((threads,), ((Digit(threads, THREAD, 1),),), (), threads)
        if self.vote:
            digits = tuple(d for dim in layout.digits for d in dim)
            size = 1
            for extent in layout.padded_shape:
                size *= extent
            flat = Fragment((size,), (digits,), layout.replicate, layout.threads)
            plan = lanes_for_reduce(flat, 0, warp)
            return plan, _Result(plan.result, [])
        last = len(self.op.axes) - 1
        window = self.space.window
        axes: list[int | None] = list(range(layout.ndim)) if window is None else list(window[2])
        dim = axes.index(last)
        plan = lanes_for_reduce(layout, dim, warp)
        return plan, _Result(plan.result, axes[:dim] + axes[dim + 1 :])

    # ---- steps

    def complete(self, total: Var) -> list[MicroNode]:
        """Steps that combine across threads what ``total`` holds in parts."""
        if not self.deferred:
            return []  # the sum was combined where it was made
        held = self.storage.fragments[total]
        label = f"complete {total.name}"

        def take():
            return unrolled(self.registers, lambda r: BufferStore(self.acc, held.local[r], [r]), "r")

        def give():
            return unrolled(self.registers, lambda r: BufferStore(held.local, self.acc[r], [r]), "r")

        if not self.plan.needs_shared:
            return [MicroNode([], [], lambda: seq([take(), self._butterfly(), give()]), label)]
        across = self._scratch(total.name)
        first = MicroNode(
            [], [Access(across.buffer)], lambda: seq([take(), self._butterfly(), self._hand_over(across)]), label
        )
        return [first, MicroNode([Access(across.buffer)], [], lambda: seq([self._collect(across), give()]), label)]

    def _scratch(self, name: str) -> SharedTile:
        size = self.registers * self.plan.ranks * self.plan.groups
        return self.storage.new_scratch((size,), self.dtype, f"{name}_partial")

    @property
    def deferred(self) -> bool:
        """Whether the threads' parts are combined after the loop (:func:`complete_sum`)."""
        if read_deferred(self.op.annotations) is None or self.dtype != self.op.dst.dtype:
            return False
        held = self.storage.fragments[self.op.dst.buffer].layout
        return held.digits == self.result.layout.digits and held.replicate == self.result.layout.replicate

    def steps(self) -> list[MicroNode]:
        op, storage = self.op, self.storage
        reads, _ = accesses(storage, self.node.versions, [op.body])
        reads = [a for a in reads if not a.buffer.same_as(op.dst.buffer)]
        label = f"reduce {op.name}"
        across = None
        if self.plan.needs_shared and not self.deferred:
            across = self._scratch(op.dst.buffer.name)
        finish_reads, finish_writes, finish, tail = self._finish()
        if across is None:
            first = MicroNode([*reads, *finish_reads], finish_writes, lambda: seq([self._partial(), finish()]), label)
            return [first, *tail]
        partial = MicroNode(
            reads,
            [Access(across.buffer)],
            lambda: seq([self._partial(), self._hand_over(across)]),
            f"{label} in a warp",
        )
        total = MicroNode(
            [Access(across.buffer), *finish_reads], finish_writes, lambda: seq([self._collect(across), finish()]),
            f"{label} across warps",
        )  # fmt: skip
        return [partial, total, *tail]

    # ---- partial results

    def _partial(self):
        rest = None
        chains = self.chains
        if chains.begins is None:
            nothing = identity(self.op.kind, self.dtype)
            start = unrolled(self.registers * chains.width, lambda r: BufferStore(self.parts, nothing, [r]), "r")
        else:
            start = self.space.visit(lambda reg, values: self._element(reg, values, begin=True))
        if chains.begins is None or chains.begun(const(0)) is not None:
            rest = self.space.visit(self._element)
        across = None if self.deferred else self._butterfly()
        return seq([start, rest, self._join_chains(), across])

    def _join_chains(self):
        width = self.chains.width
        if width == 1:
            return None

        def one(r):
            terms = [self.parts[r * width + p] for p in range(width)]
            joined = self.chains.joined(terms, lambda a, b: combine(self.op.kind, a, b))
            return BufferStore(self.acc, joined, [r])

        return unrolled(self.registers, one, "r")

    def _element(self, reg, values: list, begin: bool = False):
        op = self.op
        indices = []
        for low, axis in zip(op.src.mins, op.src.axes, strict=True):
            indices.append(expr(low) if axis is None else op.axes[axis].var + expr(low))
        load = self.space.prepare(_simplified(self.space, tirx.BufferLoad(op.src.buffer, indices)))
        value = self._transform(self.space.place(load, reg, values))
        at = self._accumulator(reg)
        if self.chains.width > 1:
            at = at * self.chains.width + self.chains.number(expr(reg))
        combined = BufferStore(self.parts, combine(op.kind, self.parts[at], value), [at])
        if self.chains.begins is None:
            return combined
        begun = self.chains.begun(reg)
        if begin:
            return when(True if begun is None else tirx.Not(begun), BufferStore(self.parts, value, [at]))
        return when(begun, combined)

    def _accumulator(self, reg):
        if self.vote or self.space.layout is None:
            return const(0)
        dims = [d for d in range(self.space.layout.ndim) if d != self.plan.dim]
        return expr(register_in(self.result.layout, self.space.layout, self.storage.tx, reg, dims))

    def _transform(self, value):
        op, hw = self.op, self.hw
        if self.vote:
            truth = value if str(value.ty.dtype) == "bool" else tirx.NE(value, tirx.const(0, value.ty.dtype))
            return tirx.Cast(self.dtype, truth)
        target = op.dst.dtype
        if not target.startswith(("float", "bfloat")):
            value = cast(value, target, hw)  # the serial meaning: elements wrap to the result's dtype
        else:
            value = cast(value, self.dtype, hw)
        if op.kind in ("absmax", "abssum") and not target.startswith("u"):
            value = cast(tirx.abs(cast(value, self.dtype, hw)), target if target.startswith("int") else self.dtype, hw)
        return cast(value, self.dtype, hw)

    def _butterfly(self):
        def step(mask: int):
            def one(r):
                # bound first: inside a conditional expression some lanes would not take part
                other = Var("other", self.dtype)
                moved = getattr(T.cuda, "__shfl_xor_sync")(T.uint32(_FULL), self.acc[r], mask, _WARP)
                return [Bind(other, moved), BufferStore(self.acc, combine(self.op.kind, self.acc[r], other), [r])]

            return unrolled(self.registers, one, "r")

        return seq([step(mask) for mask in self.plan.lane_masks])

    # ---- across warps

    def _slot(self, r, rank):
        plan = self.plan
        return (r * plan.ranks + rank) * plan.groups + expr(plan.group(self.storage.tx))

    def _hand_over(self, scratch: SharedTile):
        view, plan, tx = self.storage.view(scratch), self.plan, self.storage.tx
        body = unrolled(
            self.registers, lambda r: BufferStore(view, self.acc[r], [self._slot(r, expr(plan.rank(tx)))]), "r"
        )
        return when(plan.writes(tx), body)

    def _collect(self, scratch: SharedTile):
        view, plan = self.storage.view(scratch), self.plan
        kind = ForKind.UNROLLED if plan.ranks <= _RANKS_UNROLLED else ForKind.SERIAL

        def one(r):
            start = BufferStore(self.acc, view[self._slot(r, const(0))], [r])
            rest = loop(
                plan.ranks - 1,
                lambda k: BufferStore(self.acc, combine(self.op.kind, self.acc[r], view[self._slot(r, k + 1)]), [r]),
                "rank",
                kind,
            )
            return seq([start, rest])

        return when(plan.source.active(self.storage.tx), unrolled(self.registers, one, "r"))

    # ---- the result

    def _finish(self):
        """(reads, writes, emit, further steps) of storing the result."""
        dst, storage = self.op.dst, self.storage
        if dst.buffer in storage.tiles:
            access = Access(dst.buffer, self.node.versions.get(dst.buffer))
            return [access] if not self.op.clear else [], [access], self._to_shared, []
        holder = self._holder()
        if holder is not None:
            return [], [], holder, []
        shape = [int(a.extent) for a in self._kept()] or [1]
        scratch = storage.new_scratch(shape, self.dtype, f"{dst.buffer.name}_result")

        def give():
            def one(r, coords):
                values, conditions = self._kept_values(coords)
                at = storage.element(scratch, values or [const(0)])
                return when(conditions, BufferStore(storage.view(scratch), self.acc[r], [at]))

            return visit(self.result.layout, storage.tx, one, primary=True)

        take = MicroNode(
            [Access(scratch.buffer)], [], lambda: self._from_scratch(scratch), f"reduce {self.op.name} result"
        )
        return [], [Access(scratch.buffer)], give, [take]

    def _kept(self) -> list:
        return [] if self.vote else self.op.axes[:-1]

    def _kept_values(self, coords: list):
        """(values of the kept axes, condition to be inside the source's slice) at coordinates of the result."""
        window = self.space.window
        values: list = [None] * len(self._kept())
        condition = True
        if self.vote:
            return values, condition
        dims = [d for d in range(self.space.layout.ndim) if d != self.plan.dim]
        for position, dim in enumerate(dims):
            axis = self.result.axes[position]
            here = coords[position]
            low = const(0) if window is None else self.storage.rewrite(expr(window[1][dim]))
            if axis is None:
                inside = tirx.EQ(here, low) if self.result.layout.shape[position] > 1 else True
            else:
                values[axis] = here if window is None else here - low
                extent = self.op.axes[axis].extent
                inside = True
                if window is not None:
                    inside = tirx.And(values[axis] >= 0, values[axis] < expr(extent))
            condition = inside if condition is True else condition if inside is True else tirx.And(condition, inside)
        return values, condition

    def _stored(self, old, value):
        """What is stored over ``old``."""
        op, hw = self.op, self.hw
        if not op.clear:
            value = combine(op.kind, cast(old, self.dtype, hw), value)
        return tirx.NE(value, tirx.const(0, self.dtype)) if self.vote else cast(value, op.dst.dtype, hw)

    def _target_dims(self) -> list[int] | None:
        """For each dimension of the result the target's dimension, BROADCAST for a dropped one; None if a slice."""
        dst = self.op.dst
        if self.space.window is not None or not dst.whole:
            return None
        dims = []
        for position, axis in enumerate(self.result.axes):
            if axis in dst.axes:
                dims.append(dst.axes.index(axis))
            elif self.result.layout.shape[position] == 1:
                dims.append(BROADCAST)
            else:
                return None
        return dims

    def _holder(self):
        """Emitter of the result where every thread that needs it holds it in its accumulators, else None."""
        dst, storage, result = self.op.dst, self.storage, self.result.layout
        dims = self._target_dims()
        if dims is None:
            return None
        if dst.buffer in storage.fragments:
            held = storage.fragments[dst.buffer]
            target, local = held.layout, held.local
        elif dst.buffer in storage.locals:
            target, local = replicated_fragment(dst.shape, storage.threads), storage.locals[dst.buffer]
        else:
            return None
        shape = tuple(1 if d == BROADCAST else target.shape[d] for d in dims)
        if shape != result.shape or not contains(result, target, dims):
            return None

        def emit():
            def one(reg, coords):
                at = [reg] if dst.buffer in storage.fragments else coords
                value = self.acc[expr(register_in(result, target, storage.tx, reg, dims))]
                return BufferStore(local, self._stored(local[tuple(at)], value), at)

            # padding registers may be set, but nothing put an old value there to be combined with
            combines = not self.op.clear
            return visit(target, storage.tx, one, in_bounds=combines or dst.buffer not in storage.fragments)

        return emit

    def _to_shared(self):
        storage, dst = self.storage, self.op.dst
        tile = storage.tile_of(dst.buffer)

        def one(r, coords):
            values, condition = self._kept_values(coords)
            at = storage.element(tile, self._target_at(values), self.node.versions.get(dst.buffer))
            view = storage.view(tile)
            return when(condition, BufferStore(view, self._stored(view[at], self.acc[r]), [at]))

        return visit(self.result.layout, storage.tx, one, primary=True)

    def _target_at(self, values: list) -> list:
        out = []
        for low, axis in zip(self.op.dst.mins, self.op.dst.axes, strict=True):
            low = self.storage.rewrite(expr(low), versions=self.node.versions)
            out.append(low if axis is None else values[axis] + low)
        return out

    def _from_scratch(self, scratch: SharedTile):
        storage, dst = self.storage, self.op.dst
        view = storage.view(scratch)
        if dst.buffer in storage.fragments:
            held = storage.fragments[dst.buffer]
            kept = ElementLoop(
                storage, _only_axes(self.node, self._kept()), held.layout, (dst.buffer, dst.mins, dst.axes)
            )

            def one(reg, values):
                value = view[storage.element(scratch, values or [const(0)])]
                return BufferStore(held.local, self._stored(held.local[reg], value), [reg])

            return kept.visit(one)
        local = storage.locals[dst.buffer]

        def nest(values: list, rest: list):
            if not rest:
                at = self._target_at(values)
                value = view[storage.element(scratch, values or [const(0)])]
                return BufferStore(local, self._stored(local[tuple(at)], value), at)
            return unrolled(int(rest[0].extent), lambda v: nest([*values, v], rest[1:]), "k")

        return nest([], list(self._kept()))


def _only_axes(node: OpNode, axes: list) -> OpNode:
    """The operation with only its kept axes, to walk a target by them."""
    return OpNode(replace(node.op, axes=list(axes)), node.versions)


def _simplified(space: ElementLoop, load):
    return tirx.BufferLoad(load.source, [space.analyzer.simplify(i) for i in load.indices])
