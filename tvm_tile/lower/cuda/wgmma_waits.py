"""Where asynchronous products are waited for: as late as possible, at the first step that needs them.

A walk over the steps keeps the commit groups in flight. A step that touches an accumulator in flight, rewrites
registers that a product still reads, or hands the product's shared operands back, waits for exactly the groups up to
that product. A product into an accumulator that is already in flight needs no wait: the tensor core keeps their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Var
from tvm.script import tirx as T

from .build import const, evaluate
from .program import CondNode, GroupNode, LoopNode, MicroNode, Node, WhileNode, walk_nodes
from .roles import ReleaseNode, SendNode, SignalNode
from .sync import BarrierNode

__all__ = ["KeepNode", "WgmmaWaitNode", "keep", "place_wgmma_waits"]


@dataclass
class WgmmaWaitNode:
    """Wait until at most ``pending`` commit groups of wgmma are in flight (``wgmma.wait_group``)."""

    pending: int


@dataclass
class KeepNode:
    """The accumulator's registers are written before this, or read behind it: it emits nothing.

    It stands in front of a loop whose products stay in flight from turn to turn, and behind waits outside of innermost
    loops. The compiler does not know that a product writes its registers until it is waited for: it may put off zeros
    into the loop, or begin to divide before the wait. ptxas, which knows, then serialises all products of the kernel
    (C7514, C7515).
    """

    accumulator: Var


def keep(local: Var, registers: int, dtype: str):
    """The statement of a :class:`KeepNode`; None for accumulators of 16 bits.

    Parameters
    ----------
    local : Var
        The thread's registers.
    registers : int
        How many.
    dtype : str
        Their dtype.
    """
    kind = {"float32": ("float", "f"), "int32": ("int", "r")}.get(dtype)
    if kind is None:
        return None
    name = f"tile_keep_{kind[0]}_{registers}"
    source = (
        f"__forceinline__ __device__ void {name}({kind[0]}* at) {{\n#pragma unroll\n"
        f'  for (int i = 0; i < {registers}; ++i) asm volatile("" : "+{kind[1]}"(at[i]));\n}}\n'
    )
    return evaluate(T.cuda.func_call(name, T.address_of(local[const(0)]), source_code=source))


@dataclass(frozen=True, eq=False)
class _Group:
    accumulator: Var
    a_fragment: Var | None
    shared: tuple[Var, ...]
    age: int = 0  # loop iterations since it was issued

    def older(self) -> _Group:
        return _Group(self.accumulator, self.a_fragment, self.shared, self.age + 1)


def place_wgmma_waits(nodes: list[Node]) -> list[Node]:
    """The tree with waits.

    Parameters
    ----------
    nodes : list
        Steps of the warps that issue products, barriers placed.
    """
    out, flight = _run(nodes, [])
    if flight:
        out.append(WgmmaWaitNode(0))
    return out


def _run(nodes: list[Node], flight: list[_Group], inside: bool = False) -> tuple[list[Node], list[_Group]]:
    """The nodes with waits, and what is in flight behind them; ``inside`` an innermost loop or not."""
    out: list[Node] = []

    def wait(to: list[Node], pending: list[_Group], left: int = 0) -> None:
        to.append(WgmmaWaitNode(left))
        if not inside:
            to.extend(_kept(pending[: len(pending) - left]))

    for node in nodes:
        if isinstance(node, WgmmaWaitNode | KeepNode):
            continue  # of an earlier walk over the body of a loop
        if isinstance(node, LoopNode | WhileNode):
            if flight:
                wait(out, flight)
            node.body, flight = _steady(node.body)
            out += [*_kept(flight), node]
        elif isinstance(node, GroupNode):
            if flight:
                wait(out, flight)
            body, left = _run(node.body, [], inside)
            if left:
                wait(body, left)
            out.append(GroupNode(node.group, body, node.team))
            flight = []
        elif isinstance(node, CondNode):
            then, left = _run(node.then, list(flight), inside)
            orelse, right = _run(node.orelse, list(flight), inside)
            if _ends_with(right, left):
                left = right  # a branch that waited for more is no reason to wait in the other one
            elif not _ends_with(left, right):
                if left:
                    wait(then, left)
                if right:
                    wait(orelse, right)
                left = []
            out.append(CondNode(node.condition, then, orelse))
            flight = left
        else:
            needed = _needed(node, flight)
            if needed:
                wait(out, flight, len(flight) - needed)
                flight = flight[needed:]
            out.append(node)
            if isinstance(node, MicroNode) and node.wgmma is not None:
                shared = tuple(a.buffer for a in node.reads)
                flight = [*flight, _Group(node.wgmma.accumulator, node.wgmma.a_fragment, shared)]
    return out, flight


def _kept(groups: list[_Group]) -> list[KeepNode]:
    """One node for each accumulator of some products."""
    found: list[Var] = []
    for group in groups:
        if not any(_same(group.accumulator, f) for f in found):
            found.append(group.accumulator)
    return [KeepNode(f) for f in found]


def _steady(body: list[Node]) -> tuple[list[Node], list[_Group]]:
    """A loop's body with waits for what any iteration finds in flight, and what the last one leaves.

    An iteration may find fewer groups than its waits were made for (the first one finds none): ``wait N`` completes all
    but the newest N, whatever their number.
    """
    entry: list[_Group] = []
    innermost = not any(isinstance(n, LoopNode | WhileNode) for n in walk_nodes(body))
    for _ in range(4):
        made, last = _run(body, entry, innermost)
        again = [g.older() for g in last]
        found, expected = [_key(g) for g in again], [_key(g) for g in entry]
        fewer = found == expected[len(expected) - len(found) :] if len(found) <= len(expected) else False
        # nothing ever waits for some groups: one more of each kind in flight changes nothing
        alike = expected and set(found) == set(expected) and found[len(found) - len(expected) :] == expected
        if fewer or alike:
            return made, last
        entry = again
    made, last = _run(body, [], innermost)
    return ([*made, WgmmaWaitNode(0)] if last else made), []


def _key(group: _Group) -> tuple:
    """What decides whether something has to wait for a group."""
    fragment = None if group.a_fragment is None else group.a_fragment.name
    return group.accumulator.name, fragment, tuple(b.name for b in group.shared), min(group.age, 2)


def _needed(node: Node, flight: list[_Group]) -> int:
    """How many of the oldest groups must be complete before a node."""
    if isinstance(node, BarrierNode):
        if node.frees is None:
            return len(flight)
        return max((n + 1 for n, g in enumerate(flight) if _common(g.shared, node.frees)), default=0)
    if isinstance(node, SendNode):
        return len(flight)
    if isinstance(node, SignalNode):
        return max(0, len(flight) - node.pending)
    if isinstance(node, ReleaseNode):
        return max(
            (n + 1 for n, g in enumerate(flight) if g.age >= node.age and _common(g.shared, node.buffers)), default=0
        )
    if not isinstance(node, MicroNode):
        return 0
    needed = 0
    for n, group in enumerate(flight):
        if node.wgmma is not None:
            clash = any(
                _same(a, b)
                for a, b in ((node.wgmma.a_fragment, group.accumulator), (node.wgmma.accumulator, group.a_fragment))
            )
        else:
            clash = any(_same(f, group.accumulator) or _same(f, group.a_fragment) for f in node.fragments) or _common(
                tuple(a.buffer for a in node.writes), group.shared
            )
        if clash:
            needed = n + 1
    return needed


def _ends_with(long: list[_Group], short: list[_Group]) -> bool:
    """Whether ``short`` is ``long`` without some of its oldest groups."""
    tail = long[len(long) - len(short) :] if len(short) <= len(long) else None
    return tail is not None and all(a is b for a, b in zip(tail, short, strict=True))


def _same(a, b) -> bool:
    return a is not None and b is not None and a.same_as(b)


def _common(left: tuple[Var, ...], right: tuple[Var, ...]) -> bool:
    return any(_same(a, b) for a in left for b in right)
