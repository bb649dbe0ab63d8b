"""Barriers from real dependences: a ``__syncthreads`` stands exactly where threads would otherwise race.

Steps (:class:`MicroNode`) declare the shared memory they read and write. The pass keeps the accesses since the last
barrier and inserts one before a step that conflicts with them. A loop's body is entered from above and from its own
end, so that conflicts across the back edge count too; conditions are uniform, so a barrier may stand in a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import TensorLoad, Var

from ...errors import InternalError
from ...ir.visit import walk
from .program import (
    Access,
    CommitNode,
    CondNode,
    GroupNode,
    LoopNode,
    MicroNode,
    Node,
    RawNode,
    Version,
    WaitNode,
    WhileNode,
    walk_nodes,
)

__all__ = ["BarrierNode", "insert_barriers"]


@dataclass
class BarrierNode:
    """All threads of the CTA meet (``__syncthreads``).

    ``fence``: tiles written by ordinary stores (or cp.async) are read by wgmma or TMA next, which needs a proxy fence
    in each writing thread first. ``frees``: tiles that products in flight still read and that are written after the
    barrier; None where the barrier was asked for and all products have to be complete.
    """

    fence: bool = False
    frees: tuple[Var, ...] | None = None


@dataclass(frozen=True)
class _Pending:
    access: Access
    write: bool


class _State:
    """Accesses since the last barrier."""

    def __init__(self, pending: list[_Pending] | None = None) -> None:
        self.pending = pending or []

    def copy(self) -> _State:
        return _State(list(self.pending))

    def add(self, access: Access, write: bool) -> None:
        for known in self.pending:
            if (
                known.write == write
                and known.access.buffer.same_as(access.buffer)
                and _same_version(known.access.version, access.version)
            ):
                return
        self.pending.append(_Pending(access, write))

    def merge(self, other: _State) -> None:
        for item in other.pending:
            self.add(item.access, item.write)

    def at_back_edge(self, loop: Var) -> _State:
        """The same accesses as the next iteration of ``loop`` sees them."""
        out = _State()
        for item in self.pending:
            version = item.access.version
            if version is not None:
                version = (
                    version.previous_iteration()
                    if version.loop is not None and version.loop.same_as(loop)
                    else _unknown(version)
                )
            out.add(Access(item.access.buffer, version, item.access.agent), item.write)
        return out

    def after_loop(self) -> _State:
        """The same accesses once the loop variable is out of scope."""
        out = _State()
        for item in self.pending:
            version = None if item.access.version is None else _unknown(item.access.version)
            out.add(Access(item.access.buffer, version, item.access.agent), item.write)
        return out


def _same_version(a: Version | None, b: Version | None) -> bool:
    return b is None if a is None else a.same(b)


def _unknown(version: Version) -> Version:
    return Version(version.index, None, 0, version.count)


def insert_barriers(
    nodes: list[Node],
    shared: Callable[[Var], bool],
    overlap: Callable[[Var, Var], bool],
    slot_by_slot: Callable[[Var, Var], bool] = lambda a, b: False,
) -> list[Node]:
    """The tree with barriers.

    Parameters
    ----------
    nodes : list
        The kernel's tree; operations are already split into steps.
    shared : callable
        Whether a buffer is visible to several threads and written in this kernel.
    overlap : callable
        Whether two different buffers may share memory (tiles of the pool that are live at different times).
    slot_by_slot : callable
        Whether each copy of one buffer shares memory with the same copy of the other one only.
    """
    asynchronous: list[Var] = []
    for node in walk_nodes(nodes):
        if isinstance(node, MicroNode):
            asynchronous += [a.buffer for a in node.reads if a.agent == "async"]
    return _Inserter(shared, overlap, slot_by_slot, asynchronous).run(nodes, _State())[0]


class _Inserter:
    def __init__(self, shared, overlap, slot_by_slot, asynchronous: list[Var]) -> None:
        self.shared, self.overlap, self.asynchronous = shared, overlap, asynchronous
        self.slot_by_slot = slot_by_slot

    def run(self, nodes: list[Node], state: _State) -> tuple[list[Node], _State]:
        out: list[Node] = []
        for node in nodes:
            if isinstance(node, MicroNode):
                state = self._step(out, node, [a for a in node.reads], [a for a in node.writes], state)
            elif isinstance(node, RawNode):
                state = self._step(out, node, self._reads(node.stmt), [], state)
            elif isinstance(node, BarrierNode):
                out.append(BarrierNode(node.fence or self._unfenced(state), node.frees))
                state = _State()
            elif isinstance(node, CommitNode | WaitNode) or hasattr(node, "ring") or hasattr(node, "enter"):
                out.append(node)  # orders asynchronous work; says nothing about the threads among each other
                if ordered := getattr(node, "ordered", ()):
                    # all warps have announced what they did with these tiles
                    state = _State([i for i in state.pending if all(not i.access.buffer.same_as(b) for b in ordered)])
            elif isinstance(node, CondNode):
                state = self._expression(out, node.condition, state)
                then, after_then = self.run(node.then, state.copy())
                orelse, after_else = self.run(node.orelse, state.copy())
                if not orelse:
                    after_then = self._close_branch(then, state, after_then)
                out.append(CondNode(node.condition, then, orelse))
                after_then.merge(after_else)
                state = after_then
            elif isinstance(node, LoopNode):
                state = self._expression(out, node.start, self._expression(out, node.extent, state))
                entry = state.copy()
                _, first = self.run(node.body, entry.copy())
                entry.merge(first.at_back_edge(node.var))
                body, last = self.run(node.body, entry.copy())
                out.append(
                    LoopNode(node.var, node.start, node.extent, body, node.annotations, node.unroll, node.location)
                )
                last.merge(state)  # no iteration at all
                state = last.after_loop()
            elif isinstance(node, WhileNode):
                # the condition is evaluated before the body, and again at its end
                state = self._expression(out, node.condition, state)
                entry = state.copy()
                body, first = self.run(node.body, entry.copy())
                entry.merge(self._expression(body, node.condition, first).after_loop())
                body, last = self.run(node.body, entry)
                last = self._expression(body, node.condition, last)
                out.append(WhileNode(node.condition, body))
                last.merge(state)
                state = last
            elif isinstance(node, GroupNode):
                # one warpgroup: it meets by itself inside, and the others wait for it where they touch the same tiles
                reads, writes = self._accesses(node.body)
                if self._conflicts(reads, writes, state):
                    state = self._barrier(out, reads, writes, state)
                body, _ = self.run(node.body, _State())
                out.append(GroupNode(node.group, body, node.team))
                for access in reads:
                    state.add(access, False)
                for access in writes:
                    state.add(access, True)
            else:
                raise InternalError(f"{type(node).__name__} reached the barrier pass")
        return out, state

    def _accesses(self, nodes: list[Node]) -> tuple[list[Access], list[Access]]:
        """What a warpgroup's statements read and write, any copy of a tile."""
        reads, writes = [], []
        for node in walk_nodes(nodes):
            if isinstance(node, MicroNode):
                reads += [Access(a.buffer, None, a.agent) for a in node.reads]
                writes += [Access(a.buffer, None, a.agent) for a in node.writes]
            parts = [node.stmt] if isinstance(node, RawNode) else []
            parts += [getattr(node, name) for name in ("condition", "start", "extent") if hasattr(node, name)]
            for part in parts:
                reads += self._reads(part)
        return reads, writes

    def _close_branch(self, then: list, before: _State, after: _State) -> _State:
        """A barrier at the end of a branch that writes what all threads see: whoever passes it by needs none."""
        known = [(i.access.buffer, i.write) for i in before.pending]
        new = [
            i.access.buffer
            for i in after.pending
            if i.write and i.access.agent == "generic" and not any(w and b.same_as(i.access.buffer) for b, w in known)
        ]
        if not new:
            return after
        then.append(BarrierNode(self._unfenced(after), ()))
        return _State([i for i in after.pending if i.access.agent == "async" and not i.write])

    def _step(self, out: list, node, reads: list[Access], writes: list[Access], state: _State) -> _State:
        reads = [a for a in reads if self.shared(a.buffer)]
        writes = [a for a in writes if self.shared(a.buffer)]
        if self._conflicts(reads, writes, state):
            state = self._barrier(out, reads, writes, state)
        out.append(node)
        for access in reads:
            state.add(access, False)
        for access in writes:
            state.add(access, True)
        return state

    def _expression(self, out: list, expr, state: _State) -> _State:
        reads = self._reads(expr)
        if reads and self._conflicts(reads, [], state):
            state = self._barrier(out, reads, [], state)
        for access in reads:
            state.add(access, False)
        return state

    def _reads(self, node) -> list[Access]:
        if isinstance(node, int):
            return []
        found: list[Access] = []
        walk(node, (TensorLoad, lambda load: found.append(Access(load.source)) if self.shared(load.source) else None))
        return found

    def _conflicts(self, reads: list[Access], writes: list[Access], state: _State) -> bool:
        for item in state.pending:
            for access in reads if item.write else []:
                if self._meet(access, item.access):
                    return True
            for access in writes:
                if self._meet(access, item.access):
                    return True
        return False

    def _barrier(self, out: list, reads: list[Access], writes: list[Access], state: _State) -> _State:
        """Add a barrier. What products in flight read stays pending, unless the barrier is there because of it."""
        in_flight = [i for i in state.pending if i.access.agent == "async" and not i.write]
        freed = [i for i in in_flight if any(self._meet(w, i.access) for w in writes)]
        fence = self._unfenced(state) or self._crosses_proxy(reads, state)
        out.append(BarrierNode(fence, tuple(i.access.buffer for i in freed)))
        return _State([i for i in in_flight if all(i is not f for f in freed)])

    def _crosses_proxy(self, reads: list[Access], state: _State) -> bool:
        """Whether the async proxy reads next what a barrier's threads wrote through the generic one."""
        return any(
            item.write and item.access.agent != "async" and access.agent == "async" and self._meet(access, item.access)
            for item in state.pending
            for access in reads
        )

    def _unfenced(self, state: _State) -> bool:
        """Whether a barrier's threads stored what the async proxy may read later.

        Whatever the barrier stands there for, the stores are not remembered behind it. What cp.async wrote is fenced
        where it is waited for.
        """
        return any(
            self.overlap(buffer, read) or buffer.same_as(read)
            for buffer in (i.access.buffer for i in state.pending if i.write and i.access.agent == "generic")
            for read in self.asynchronous
        )

    def _meet(self, a: Access, b: Access) -> bool:
        if a.buffer.same_as(b.buffer) or self.slot_by_slot(a.buffer, b.buffer):
            return a.version is None or b.version is None or a.version.may_alias(b.version)
        return self.overlap(a.buffer, b.buffer)
