"""Groups of consumer warps with a role of their own, and what passes between them.

A kernel has one team (all consumers), or a front and a back (``schedule/split.py``). Then each team gets its part of
the tree, its threads are numbered from zero, and shared tiles go from the front to the back through *exchanges*: rings
whose full barriers the front's warps complete instead of the copy engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.ir import Var
from tvm.tirx import Bind

from ...layout.boxes import WARPGROUP
from ...schedule.decisions import BACK, FRONT, FRONT_THREADS
from .build import const, seq
from .program import CondNode, LoopNode, Node, OpNode, SumNode
from .storage import Storage

__all__ = ["Team", "group_team", "make_teams", "own_nodes"]

#: Named barriers of the teams' own; those between are taken by turns and TMA stores.
BARRIERS = {None: 1, BACK: 1, FRONT: 8}
#: Barrier of warpgroup 0 of T.ws; the others follow.
GROUP_BARRIER = 8


@dataclass
class Team:
    """Consumer warps with one role.

    Attributes
    ----------
    role : str or None
        ``"front"``, ``"back"``, or None where all consumers do the same.
    first, threads : int
        Its first thread in the CTA, and how many it has.
    registers : int or None
        Registers a thread after they have changed hands.
    tx, warpgroup : Var
        Number of a thread and of its warpgroup, counted from the team's first.
    group : int, optional
        Which warpgroup of ``T.ws`` it is.
    """

    role: str | None
    first: int
    threads: int
    registers: int | None
    tx: Var = None
    warpgroup: Var = None
    group: int | None = None

    @property
    def barrier(self) -> int:
        """Number of the barrier at which the team meets."""
        return BARRIERS[self.role] if self.group is None else GROUP_BARRIER + self.group

    @property
    def warps(self) -> int:
        """Warps of the team."""
        return self.threads // 32

    def owns(self, node: OpNode | SumNode) -> bool:
        """Whether an operation is this team's."""
        op = node.reduce.op if isinstance(node, SumNode) else node.op
        return self.role is None or str(op.annotations.get("tile.role")) == self.role

    @contextmanager
    def at(self, storage: Storage) -> Iterator[None]:
        """Within this, steps are made and emitted for the team's threads."""
        outer = storage.tx, storage.warpgroup, storage.threads
        storage.tx, storage.warpgroup, storage.threads = self.tx, self.warpgroup, self.threads
        try:
            yield
        finally:
            storage.tx, storage.warpgroup, storage.threads = outer

    def numbered(self, storage: Storage, code):
        """The team's code behind the definitions of its thread numbers (outside of :meth:`at`)."""
        if self.first == 0:
            return code
        groups = const(self.first // 128)
        own = [Bind(self.tx, storage.tx - const(self.first)), Bind(self.warpgroup, storage.warpgroup - groups)]
        return seq([*own, code])


def make_teams(storage: Storage, threads: int, registers) -> list[Team]:
    """The teams of a kernel, in the order of their threads.

    The front comes first: where several warps could go on, those with low numbers do, and while the front waits for its
    turn the tensor cores wait for its products.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    threads : int
        Threads of ``T.Kernel``.
    registers : list of int or None
        Of producer and consumers, or of producer, back and front.
    """
    if registers is None or len(registers) == 2:
        own = None if registers is None else int(registers[1])
        return [Team(None, 0, threads, own, storage.tx, storage.warpgroup)]
    front = Team(FRONT, 0, FRONT_THREADS, int(registers[2]), storage.tx, storage.warpgroup)
    own = (Var("back_thread", "int32"), Var("back_warpgroup", "int32"))
    return [front, Team(BACK, FRONT_THREADS, threads, int(registers[1]), *own)]


def group_team(storage: Storage, group: int) -> Team:
    """The warpgroup of a ``T.ws`` block."""
    if group == 0:
        return Team(None, 0, WARPGROUP, None, storage.tx, storage.warpgroup, 0)
    own = (Var(f"group{group}_thread", "int32"), Var(f"group{group}_warpgroup", "int32"))
    return Team(None, WARPGROUP * group, WARPGROUP, None, *own, group)


def own_nodes(nodes: list[Node], team: Team) -> list[Node]:
    """The tree with only a team's operations; branches and loops left without any node disappear."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, OpNode | SumNode):
            if not team.owns(node):
                continue
        elif isinstance(node, CondNode):
            then, orelse = own_nodes(node.then, team), own_nodes(node.orelse, team)
            if not then and not orelse:
                continue
            node = CondNode(node.condition, then, orelse)
        elif isinstance(node, LoopNode):
            node.body = own_nodes(node.body, team)
            if not node.body:
                continue
        out.append(node)
    return out
