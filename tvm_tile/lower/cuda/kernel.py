"""From one annotated kernel to thread-level TIR: tree, pipelines or roles, steps, shared memory, barriers, code."""

from __future__ import annotations

import functools

from tvm import tirx
from tvm.ir import Var
from tvm.script import tirx as T
from tvm.tirx import For, ForKind
from tvm.tirx.stmt import DeclBuffer

from ...errors import InternalError, SourceLocation
from ...ir.kernels import KernelInfo
from ...ir.ops import GemmOp, SyncOp
from ...schedule.decisions import (
    FRONT,
    read_deferred,
    read_instruction,
    read_persistent,
    read_pipeline,
    read_raster,
    read_roles,
)
from ...schedule.roles import PRODUCER_THREADS
from .build import const, evaluate, seq, when
from .float8 import float8_as_bytes
from .gemm import lower_gemm
from .launch import launch
from .liveness import live_across_teams
from .memory import Placement, place_tiles
from .ops import lower_op, lower_raw
from .overlap import TurnNode, overlap_iterations
from .persistent import persistent_tree
from .pipeline import PipelinePlan, expand_pipelines
from .placement import make_storage, viewed_buffer
from .program import (
    CommitNode,
    CondNode,
    GroupNode,
    LoopNode,
    MicroNode,
    Node,
    OpNode,
    RawNode,
    SumNode,
    WaitNode,
    WhileNode,
    clone,
    read_body,
    walk_nodes,
)
from .reduce import complete_sum
from .rings import Rings, make_rings
from .roles import (
    ReleaseNode,
    RingWaitNode,
    SendNode,
    SendWaitNode,
    SignalNode,
    buffers_of,
    consumer_tree,
    front_first,
    gather_products,
    producer_tree,
    set_arrivals,
)
from .split_loops import has_room
from .sync import BarrierNode, insert_barriers
from .teams import Team, group_team, make_teams
from .tma import TensorMaps, clear_rows
from .tma_store import drain_stores
from .wgmma_waits import KeepNode, WgmmaWaitNode, keep, place_wgmma_waits

__all__ = ["lower_kernel"]


TURN_BARRIER = 2


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
        Launch attributes around the code, host code before them.
    """
    lowering = _Lowering(info, hw, func)
    return float8_as_bytes(lowering.run(), hw, lowering.location)


class _Lowering:
    def __init__(self, info: KernelInfo, hw, func) -> None:
        self.info, self.hw, self.func = info, hw, func
        self.location = SourceLocation.from_span(info.block.span)
        self.nodes = _with_sums(read_body(info.block.body), {b.name: b for b in info.buffers})
        self.roles = read_roles(info.block)
        self.rings: Rings | None = None
        self.team: Team | None = None
        self.producing = False
        self.asynchronous = any(self._is_async(n) for n in walk_nodes(self.nodes) if isinstance(n, OpNode))

    def run(self):
        """The kernel, with one role or two."""
        return self._specialised() if self.roles else self._uniform()

    # ---- one role: all threads load and work

    def _uniform(self):
        plans = self._plans()
        copies: dict[Var, int] = {}
        for plan in plans.values():
            if plan.overlaps:
                for buffer, count in plan.buffers.items():
                    copies[buffer] = max(copies.get(buffer, 1), count)
        self.storage = make_storage(self.info, self.nodes, copies, self.func, self.location)
        nodes = self._steps_and_barriers(expand_pipelines(self.nodes, lambda loop: plans.get(id(loop))))
        body = seq([self._emit(node) for node in nodes])
        return launch(self.info, self.storage, body, self.info.threads, [], bounded=self.asynchronous)

    def _plans(self) -> dict[int, PipelinePlan]:
        by_name = {b.name: b for b in self.info.buffers}
        plans = {}
        for node in walk_nodes(self.nodes):
            if isinstance(node, LoopNode):
                data = read_pipeline(node.annotations)
                if data:
                    plans[id(node)] = PipelinePlan(data, by_name)
        return plans

    # ---- two roles: a producer warpgroup loads, the others work

    def _specialised(self):
        ctas, tiles = read_persistent(self.info.block), None
        if ctas:
            self.nodes, tiles = persistent_tree(self.info, self.nodes, ctas, read_raster(self.info.block))
        storage = make_storage(self.info, self.nodes, self._ring_copies(), self.func, self.location)
        self.storage = storage
        described = (self.roles["rings"], self.roles.get("exchanges", ()), int(self.roles.get("signal", 0)))
        self.rings = make_rings(storage, self.nodes, *described)
        storage.maps = maps = TensorMaps(storage)
        storage.persistent = bool(ctas)
        registers = self.roles.get("registers")
        teams = make_teams(storage, self.info.threads, registers)
        set_arrivals(self.rings, self.nodes, teams)
        producer = producer_tree(self.nodes, self.rings, maps)
        trees = self._consumer_steps(teams)
        consumers = [self._consumer_code(team, tree) for team, tree in zip(teams, trees, strict=True)]
        self.producing = True
        producer_code = seq([self._emit(node) for node in producer])
        self.producing = False
        threads = sum(team.threads for team in teams)
        producer_code = when(tirx.EQ(storage.tx, const(threads)), producer_code)
        if registers:
            producer_code = seq([evaluate(T.ptx.setmaxnreg.dec.sync.aligned.u32(int(registers[0]))), producer_code])
        work = consumers[0]
        for team, code in zip(teams[1:], consumers[1:], strict=True):
            work = tirx.IfThenElse(storage.warpgroup < const(team.first // 128), work, code)
        threads_with_producer = threads + PRODUCER_THREADS
        first = seq([*maps.prefetch(), self.rings.init()])
        loads = [n.op for n in walk_nodes(self.nodes) if isinstance(n, OpNode) and self.rings.of_copy(n.op.name)]
        body = seq(
            [
                when(tirx.EQ(storage.tx, const(0)), first),
                *[clear_rows(storage, op, threads_with_producer) for op in loads],
                evaluate(T.cuda.cta_sync()),
                tirx.IfThenElse(tirx.EQ(storage.warpgroup, const(threads // 128)), producer_code, work),
            ]
        )
        return launch(self.info, storage, body, threads_with_producer, maps.host, bounded=True, tiles=tiles)

    def _consumer_steps(self, teams: list[Team]) -> list[list[Node]]:
        """The tree of each team in steps, with barriers and waits; places all shared tiles."""
        storage, declared, trees = self.storage, set(self.storage.tiles), []
        for team in teams:
            work = consumer_tree(clone(self.nodes, {}), self.rings, team)
            if team.role == FRONT:
                work = gather_products(work, self._is_async)
            work = front_first(work, self.rings, team, self._is_async)
            if self.roles.get("overlap", True):
                registers = team.registers or self.hw.registers_per_thread
                room = functools.partial(has_room, storage=storage, registers=registers)
                work = overlap_iterations(work, self._is_async, bool(self.roles.get("turns")), room)
            with team.at(storage):
                trees.append(self._steps(work))
        known = None
        if len(teams) > 1:
            loaded = {b for r in self.rings.rings if r.copies for b in r.buffers}
            known = live_across_teams(storage, self.nodes, self.rings.exchanges, loaded)
        placement = self._place([n for tree in trees for n in tree], declared, known)
        return [place_wgmma_waits(self._barriers(tree, placement)) for tree in trees]

    def _consumer_code(self, team: Team, tree: list[Node]):
        self.team = team
        with team.at(self.storage):
            taking_turns = any(isinstance(n, TurnNode) for n in walk_nodes(tree))
            code = [self._first_turn() if taking_turns else None, *[self._emit(node) for node in tree]]
            if team.role != FRONT:
                code.append(drain_stores(self.storage))
        gain = None
        if team.registers:
            gain = evaluate(T.ptx.setmaxnreg.inc.sync.aligned.u32(team.registers))
        return seq([gain, team.numbered(self.storage, seq(code))])

    def _turn(self, node: TurnNode):
        group = tirx.Cast("uint32", self.storage.warpgroup)
        threads = T.uint32(2 * 128)
        if node.enter:
            return evaluate(T.ptx.bar.sync(T.uint32(TURN_BARRIER) + group, threads))
        return evaluate(T.ptx.bar.arrive(T.uint32(TURN_BARRIER + 1) - group, threads))

    def _first_turn(self):
        """The first warpgroup begins."""
        arrive = evaluate(T.ptx.bar.arrive(T.uint32(TURN_BARRIER), T.uint32(2 * 128)))
        return when(tirx.EQ(self.storage.warpgroup, const(0)), arrive)

    def _ring_copies(self) -> dict[Var, int]:
        slots = {str(name): int(ring["slots"]) for ring in self.roles["rings"] for name in ring["copies"]}
        copies = {
            n.op.dst.buffer: slots[n.op.name]
            for n in walk_nodes(self.nodes)
            if isinstance(n, OpNode) and n.op.name in slots
        }
        for exchange in self.roles.get("exchanges", []):
            copies |= {b: int(exchange["slots"]) for b in self.info.buffers if b.name in exchange["tiles"]}
        return copies

    @staticmethod
    def _is_async(node: OpNode) -> bool:
        if not isinstance(node.op, GemmOp):
            return False
        instruction = read_instruction(node.op.annotations)
        return instruction is not None and instruction.family == "wgmma"

    # ---- steps, shared memory, barriers

    def _steps_and_barriers(self, nodes: list[Node]) -> list[Node]:
        declared = set(self.storage.tiles)
        nodes = self._steps(nodes)
        return place_wgmma_waits(self._barriers(nodes, self._place(nodes, declared)))

    def _place(self, nodes: list[Node], declared: set[Var], known=None) -> Placement:
        """Find room for all shared tiles, those that the steps have added to the ``declared`` ones included."""
        storage = self.storage
        scratch = {b for b in storage.tiles if b not in declared}
        ring_tiles = {b for r in self.rings.rings for b in r.buffers} if self.rings else set()
        rings = {r.name: r for r in self.rings.rings} if self.rings else {}
        guests = {r.buffers[0]: (rings[r.inside[0]].buffers[0], r.inside[1]) for r in rings.values() if r.inside}
        guests |= {r.over_tile: (r.over.buffers[0], 0) for r in rings.values() if r.over}
        placement = place_tiles(
            storage, nodes, self.hw.shared_per_block, scratch, self.location,
            reserved=self.rings.bytes if self.rings else 0, from_start=ring_tiles, known=known,
            inside=guests,
        )  # fmt: skip
        if placement.bytes:
            storage.pool = tirx.decl_buffer(
                (placement.bytes,), "uint8", "smem", scope="shared.dyn", data_alignment=1024, layout=None
            )
        return placement

    def _barriers(self, nodes: list[Node], placement: Placement) -> list[Node]:
        tiles, written = self.storage.tiles, _written_globals(nodes)

        def shared(buffer):
            return buffer in tiles or any(buffer.same_as(w) for w in written)

        rings = self.rings.rings if self.rings else []
        paired = [(r.over_tile, r.over.buffers[0]) for r in rings if r.over]

        def slot_by_slot(a, b):
            return any(a.same_as(x) and b.same_as(y) or a.same_as(y) and b.same_as(x) for x, y in paired)

        return insert_barriers(nodes, shared, lambda a, b: placement.overlap(self.storage, a, b), slot_by_slot)

    def _steps(self, nodes: list[Node]) -> list[Node]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, OpNode):
                out += self._operation(node)
            elif isinstance(node, SumNode):
                steps = complete_sum(self.storage, node, self.hw)
                for step in steps:
                    step.fragments = frozenset([node.buffer])
                out += steps
            elif isinstance(node, RawNode):
                out += lower_raw(self.storage, node, self.hw)
            elif isinstance(node, CondNode):
                out.append(CondNode(node.condition, self._steps(node.then), self._steps(node.orelse)))
            elif isinstance(node, GroupNode):
                node.team = group_team(self.storage, node.group)
                with node.team.at(self.storage):
                    node.body = self._steps(node.body)
                out.append(node)
            elif hasattr(node, "body"):
                self.storage.loops += isinstance(node, LoopNode | WhileNode)
                node.body = self._steps(node.body)
                self.storage.loops -= isinstance(node, LoopNode | WhileNode)
                out.append(node)
            else:
                out.append(node)
        return out

    def _operation(self, node: OpNode) -> list[Node]:
        if isinstance(node.op, SyncOp):
            return [BarrierNode()]
        lower = lower_gemm if isinstance(node.op, GemmOp) else lower_op
        steps = lower(self.storage, node, self.hw)
        touched = frozenset(b for b in buffers_of(node) if b in self.storage.fragments)
        for step in steps:
            if isinstance(step, MicroNode):
                step.fragments = touched
        return steps

    # ---- code

    def _emit(self, node: Node):
        storage = self.storage
        if isinstance(node, MicroNode):
            return node.emit()
        if isinstance(node, BarrierNode):
            return self._barrier(node)
        if isinstance(node, CommitNode):
            return evaluate(T.ptx.cp.async_.commit_group())
        if isinstance(node, WaitNode):
            wait = evaluate(T.ptx.cp.async_.wait_group(node.pending))
            # what cp.async wrote is read by wgmma through the async proxy
            return seq([wait, evaluate(T.ptx.fence.proxy.async_.shared__cta())]) if self.asynchronous else wait
        if isinstance(node, WgmmaWaitNode):
            return evaluate(T.ptx.wgmma.wait_group.sync.aligned(node.pending))
        if isinstance(node, KeepNode):
            held = storage.fragments[node.accumulator]
            return keep(held.local, held.layout.registers, held.dtype)
        if isinstance(node, RingWaitNode):
            return self.rings.wait_full(node.ring, node.count)
        if isinstance(node, TurnNode):
            return self._turn(node)
        if isinstance(node, SendWaitNode):
            # where the slot's own load has arrived it was free
            return None if node.ring.over is not None else self.rings.wait_empty(node.ring, node.count)
        if isinstance(node, SignalNode):
            return self.rings.say(node.ring, node.count)
        if isinstance(node, SendNode):
            return self.rings.send(node.ring, node.count)
        if isinstance(node, ReleaseNode):
            return self.rings.release(node.ring, node.count, node.guard)
        if isinstance(node, RawNode):
            if isinstance(node.stmt, DeclBuffer):
                return None if viewed_buffer(node.stmt, storage.locals) is None else node.stmt
            return storage.rewrite(node.stmt)
        if isinstance(node, LoopNode):
            kind = ForKind.UNROLLED if node.unroll else ForKind.SERIAL
            start, extent = (storage.rewrite(const(e) if isinstance(e, int) else e) for e in (node.start, node.extent))
            # unrolled, a producer's loop would not fit the few registers that it keeps
            notes = {"disable_unroll": True} if self.producing and not node.unroll else {}
            body = seq([self._emit(n) for n in node.body])
            return For(node.var, start, extent, kind, body, annotations=notes)
        if isinstance(node, CondNode):
            then = seq([self._emit(n) for n in node.then])
            orelse = seq([self._emit(n) for n in node.orelse]) if node.orelse else None
            return tirx.IfThenElse(storage.rewrite(node.condition), then, orelse)
        if isinstance(node, GroupNode):
            self.team = node.team
            with node.team.at(storage):
                code = seq([self._emit(n) for n in node.body])
            self.team = None
            return when(tirx.EQ(storage.warpgroup, const(node.group)), node.team.numbered(storage, code))
        if isinstance(node, WhileNode):
            return tirx.While(storage.rewrite(node.condition), seq([self._emit(n) for n in node.body]))
        raise InternalError(f"{type(node).__name__} reached code generation", self.location)

    def _barrier(self, node: BarrierNode):
        if self.team is None:
            meet = evaluate(T.cuda.cta_sync())
        else:  # the producer, or the other warpgroups, take no part
            meet = evaluate(T.ptx.bar.sync(T.uint32(self.team.barrier), T.uint32(self.team.threads)))
        return seq([evaluate(T.ptx.fence.proxy.async_.shared__cta()), meet]) if node.fence else meet


def _with_sums(nodes: list[Node], by_name: dict[str, Var]) -> list[Node]:
    """The tree with the combination of deferred sums behind their loops."""
    out: list[Node] = []
    for node in nodes:
        for part in ("body", "then", "orelse"):
            if hasattr(node, part):
                setattr(node, part, _with_sums(getattr(node, part), by_name))
        out.append(node)
        if isinstance(node, LoopNode):
            out += [SumNode(by_name[total], n) for n, total in _deferred(node.body)]
    return out


def _deferred(nodes: list[Node]):
    """(reduction, fragment) of deferred sums whose innermost loop has this body."""
    for node in nodes:
        if isinstance(node, OpNode) and (total := read_deferred(node.op.annotations)) is not None:
            yield node, total
        elif isinstance(node, CondNode):
            yield from _deferred([*node.then, *node.orelse])


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
