"""A kernel's body as a tree: tile operations, uniform statements, loops and branches.

The passes of this package rewrite the tree (pipelines, phases, barriers) before any thread-level code exists;
emission is a plain walk over the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import tvm_ffi
from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlockRealize
from tvm.tirx import For, IfThenElse, SeqStmt, While

from ...errors import InternalError
from ...ir.ops import TileOp, match_op, read_op
from ...ir.visit import substitute

__all__ = [
    "Access", "CommitNode", "CondNode", "GroupNode", "LoopNode", "MicroNode", "Node", "OpNode", "RawNode",
    "SumNode", "Version",
    "WaitNode", "WhileNode", "clone", "read_body", "walk_nodes",
]  # fmt: skip


@dataclass(frozen=True, eq=False)
class Version:
    """Which copy of a multi-buffered tile: ``(loop + shift - start) % count``.

    Attributes
    ----------
    index : expression
        The copy's number.
    loop : Var or None
        The pipelined loop's variable, None outside of it.
    shift : int
        Iterations ahead of the loop variable.
    count : int
        Number of copies.
    """

    index: object
    loop: Var | None
    shift: int
    count: int

    def may_alias(self, other: Version | None) -> bool:
        """Whether both may name the same copy in the same iteration."""
        if other is not None and isinstance(self.index, tirx.IntImm) and isinstance(other.index, tirx.IntImm):
            return int(self.index.value) == int(other.index.value)
        if other is None or self.loop is None or other.loop is None or not self.loop.same_as(other.loop):
            return True
        return (self.shift - other.shift) % self.count == 0

    def same(self, other: Version | None) -> bool:
        """Whether both name the same copy in the same way."""
        if other is None or (self.loop is None) != (other.loop is None):
            return False
        if self.loop is not None and not self.loop.same_as(other.loop):
            return False
        return (self.shift, self.count) == (other.shift, other.count) and tvm_ffi.structural_equal(
            tirx.convert(self.index), tirx.convert(other.index)
        )

    def substituted(self, mapping: dict) -> Version:
        """The same copy with variables replaced."""
        loop = self.loop
        if loop is not None and loop in mapping:
            # after a shift of the iteration the copy is no longer comparable with others by its shift alone
            loop = None
        return Version(substitute(tirx.convert(self.index), mapping), loop, self.shift, self.count)

    def previous_iteration(self) -> Version:
        """The same copy as seen from the next iteration of its loop."""
        return Version(self.index, self.loop, self.shift - 1, self.count)


@dataclass
class Access:
    """Memory shared between threads that a step reads or writes.

    ``agent`` says who touches it: ``"generic"`` (ordinary loads and stores), ``"cp.async"``, ``"async"`` (TMA, wgmma).
    """

    buffer: Var
    version: Version | None = None
    agent: str = "generic"


@dataclass
class OpNode:
    """A tile operation; ``versions`` names the copies of multi-buffered tiles that it uses."""

    op: TileOp
    versions: dict[Var, Version] = field(default_factory=dict)


@dataclass
class RawNode:
    """A uniform statement: Bind, a store to a variable or per-thread array, DeclBuffer."""

    stmt: object


@dataclass
class LoopNode:
    """A loop of the kernel; ``unroll`` asks the compiler for full unrolling."""

    var: Var
    start: object
    extent: object
    body: list
    annotations: dict = field(default_factory=dict)
    unroll: bool = False
    location: object = None


@dataclass
class CondNode:
    """A branch on a uniform condition."""

    condition: object
    then: list
    orelse: list = field(default_factory=list)


@dataclass
class WhileNode:
    """A loop on a uniform condition."""

    condition: object
    body: list


@dataclass
class GroupNode:
    """Statements of one warpgroup (``T.ws``); ``team`` numbers its threads once its body is made of steps."""

    group: int
    body: list
    team: object = None


@dataclass
class SumNode:
    """Combine across threads what a loop accumulated in ``buffer`` by the deferred sum ``reduce``."""

    buffer: Var
    reduce: OpNode


@dataclass
class CommitNode:
    """Close a group of asynchronous copies (``cp.async.commit_group``)."""


@dataclass
class WaitNode:
    """Wait until at most ``pending`` groups of this thread's asynchronous copies are unfinished."""

    pending: int


@dataclass
class MicroNode:
    """One step of thread-level code between two possible barriers.

    Attributes
    ----------
    reads, writes : list of Access
        Memory shared between threads; the barrier pass separates conflicting steps.
    emit : callable
        Makes the step's statement; called once, after shared memory is planned.
    label : str
        What it does, for printing.
    fragments : frozenset of Var
        Fragments that the step reads or writes (filled in by the driver).
    wgmma : WgmmaIssue or None
        Set where the step issues asynchronous products that are waited for later.
    """

    reads: list[Access]
    writes: list[Access]
    emit: Callable[[], object]
    label: str = ""
    fragments: frozenset = frozenset()
    wgmma: WgmmaIssue | None = None


@dataclass(frozen=True)
class WgmmaIssue:
    """An asynchronous product: its accumulator, and the fragment it reads A from (None: from shared memory)."""

    accumulator: Var
    a_fragment: Var | None


Node = OpNode | RawNode | LoopNode | CondNode | WhileNode | GroupNode | CommitNode | WaitNode | MicroNode | SumNode


def read_body(stmt) -> list[Node]:
    """The tree of a kernel block's body.

    Parameters
    ----------
    stmt : Stmt
        Body of a block annotated ``tile.kernel``.
    """
    if isinstance(stmt, SeqStmt):
        return [node for part in stmt.seq for node in read_body(part)]
    if match_op(stmt) is not None:
        return [OpNode(read_op(match_op(stmt)[1]))]
    if isinstance(stmt, For):
        annotations = {str(k): v for k, v in stmt.annotations.items()}
        return [
            LoopNode(stmt.loop_var, stmt.min, stmt.extent, read_body(stmt.body), annotations,
                     stmt.kind == tirx.ForKind.UNROLLED, stmt.span)
        ]  # fmt: skip
    if isinstance(stmt, IfThenElse):
        return [
            CondNode(
                stmt.condition, read_body(stmt.then_case), [] if stmt.else_case is None else read_body(stmt.else_case)
            )
        ]
    if isinstance(stmt, While):
        return [WhileNode(stmt.condition, read_body(stmt.body))]
    if isinstance(stmt, SBlockRealize) and "tile.ws" in stmt.block.annotations:
        return [GroupNode(int(stmt.block.annotations["tile.ws"]), read_body(stmt.block.body))]
    if isinstance(stmt, tirx.Bind | tirx.BufferStore | tirx.stmt.DeclBuffer | tirx.Evaluate):
        if isinstance(stmt, tirx.Evaluate) and isinstance(stmt.value, tirx.IntImm):
            return []
        return [RawNode(stmt)]
    raise InternalError(f"statement {type(stmt).__name__} in a kernel's body:\n{stmt}")


def clone(nodes: list[Node], mapping: dict, keep: Callable[[OpNode], bool] | None = None) -> list[Node]:
    """A copy of a tree with variables replaced and bound variables renamed, optionally only some operations.

    Parameters
    ----------
    nodes : list
        The tree.
    mapping : dict
        Var -> expression.
    keep : callable, optional
        Which operations stay; branches and loops left empty disappear, bound values stay.
    """
    mapping = dict(mapping)
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, OpNode):
            if keep is None or keep(node):
                versions = {b: v.substituted(mapping) for b, v in node.versions.items()}
                out.append(OpNode(read_op(substitute(node.op.realize, mapping)), versions))
        elif isinstance(node, RawNode):
            stmt = node.stmt
            if isinstance(stmt, tirx.Bind):
                fresh = Var(stmt.var.name, stmt.var.ty)
                out.append(RawNode(tirx.Bind(fresh, substitute(stmt.value, mapping))))
                mapping[stmt.var] = fresh
            elif keep is None:
                out.append(RawNode(substitute(stmt, mapping)))
        elif isinstance(node, LoopNode):
            var = Var(node.var.name, node.var.ty)
            body = clone(node.body, {**mapping, node.var: var}, keep)
            if keep is None or _has_ops(body):
                out.append(LoopNode(var, substitute(node.start, mapping), substitute(node.extent, mapping), body,
                                    node.annotations, node.unroll, node.location))  # fmt: skip
        elif isinstance(node, CondNode):
            then, orelse = clone(node.then, mapping, keep), clone(node.orelse, mapping, keep)
            if keep is None or _has_ops(then) or _has_ops(orelse):
                out.append(CondNode(substitute(node.condition, mapping), then, orelse))
        elif isinstance(node, WhileNode):
            out.append(WhileNode(substitute(node.condition, mapping), clone(node.body, mapping, keep)))
        elif isinstance(node, GroupNode):
            body = clone(node.body, mapping, keep)
            if keep is None or _has_ops(body):
                out.append(GroupNode(node.group, body, node.team))
        elif isinstance(node, SumNode):
            if keep is None:
                out.append(node)
        elif hasattr(node, "count") and hasattr(node, "ring"):
            guard = getattr(node, "guard", None)
            changes = {"count": substitute(node.count, mapping)}
            if guard is not None:
                changes["guard"] = substitute(guard, mapping)
            out.append(replace(node, **changes))
        else:
            out.append(node)
    return out


def _has_ops(nodes: list[Node]) -> bool:
    return any(isinstance(n, OpNode) for n in walk_nodes(nodes))


def walk_nodes(nodes: list[Node]) -> Iterator[Node]:
    """All nodes of a tree, parents first, in source order."""
    for node in nodes:
        yield node
        for name in ("body", "then", "orelse"):
            yield from walk_nodes(getattr(node, name, []))
