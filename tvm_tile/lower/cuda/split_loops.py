"""Index-set splitting: a loop becomes consecutive loops in which a uniform branch is always or never taken.

A condition built of comparisons that are affine in the loop variable holds in an interval of iterations, or everywhere
but in one. The loop is cut at the ends of that interval; each part keeps only the side of the branch that it takes, so
that the long part of a causal or windowed loop has no branch in its middle. The parts run over the same values of the
loop variable in the same order, so that whatever is counted by it (slots and phases of rings) continues.
Source: R. Allen and K. Kennedy, "Optimizing Compilers for Modern Architectures", 2001, section 5.7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad, Var

from ...ir.visit import mentions, substitute, walk
from ...schedule.analysis import dtype_bits
from .build import const
from .program import CondNode, LoopNode, Node, OpNode, RawNode, clone, walk_nodes
from .roles import buffers_of
from .storage import Storage

__all__ = ["has_room", "ranges", "split_at_branch"]

#: Larger constants could overflow where a bound of the iterations is computed from them.
_LARGE = 1 << 30
#: Operations of a body that is repeated; the parts of a loop are at most three times its code.
_MOST_OPERATIONS = 32
#: Part of the registers that fragments may take: ptxas keeps an accumulator in other registers in each part of a loop.
_MOST_REGISTERS = 0.75


@dataclass(frozen=True)
class _Interval:
    """Iterations ``[low, high)``; None is the loop's own start or end."""

    low: object = None
    high: object = None

    def meet(self, other: _Interval) -> _Interval:
        """The iterations of both."""
        return _Interval(_either(tirx.max, self.low, other.low), _either(tirx.min, self.high, other.high))


@dataclass(frozen=True)
class _Truth:
    """Where a condition holds: in the interval ``holds``, or everywhere but in ``fails``; both where each is one."""

    holds: _Interval | None
    fails: _Interval | None

    @staticmethod
    def of(holds: _Interval | None, fails: _Interval | None) -> _Truth | None:
        """The same with the other interval where one has an open end; None where neither is known."""
        if holds is not None and fails is None:
            fails = _rest(holds)
        elif fails is not None and holds is None:
            holds = _rest(fails)
        return None if holds is None and fails is None else _Truth(holds, fails)

    def negated(self) -> _Truth:
        return _Truth(self.fails, self.holds)


def split_at_branch(loop: LoopNode) -> list[Node]:
    """The parts of a loop, or the loop alone where no branch of its body allows it.

    Parameters
    ----------
    loop : LoopNode
        A serial loop.

    Returns
    -------
    list of Node
        One, two or three loops, any of which may have no iteration, behind the values of their bounds.
    """
    operations = sum(isinstance(n, OpNode) for n in walk_nodes(loop.body))
    if loop.unroll or operations > _MOST_OPERATIONS or _loads(loop.start) or _loads(loop.extent):
        return [loop]
    changing = _bound_inside(loop.body)
    for node in loop.body:
        if isinstance(node, CondNode) and any(isinstance(n, OpNode) for n in walk_nodes([node])):
            binds, parts = ranges(node.condition, loop.var, loop.start, loop.extent, changing)
            if parts:
                return [*(RawNode(b) for b in binds), *(_part(loop, node.condition, *p) for p in parts)]
    return [loop]


def has_room(loop: LoopNode, storage: Storage, registers: int) -> bool:
    """Whether the parts of a loop are likely to be compiled without spills.

    Parameters
    ----------
    loop : LoopNode
        A consumer's loop.
    storage : Storage
        The kernel's fragments.
    registers : int
        Registers of a thread.
    """
    buffers = [b for n in walk_nodes(loop.body) if isinstance(n, OpNode) for b in buffers_of(n)]
    if any(str(b.ty.storage_scope) == "global" for b in buffers):
        return False  # the addresses of plain loads take many registers
    held = {b: f for b in buffers if (f := storage.fragments.get(b)) is not None}
    taken = sum(-(-f.layout.registers * dtype_bits(f.dtype) // 32) for f in held.values())
    return taken <= _MOST_REGISTERS * registers


def _part(loop: LoopNode, condition, first, extent, value: bool) -> LoopNode:
    var = Var(loop.var.name, loop.var.ty)
    body = clone(_resolved(loop.body, _consequences(condition, value)), {loop.var: var})
    return replace(loop, var=var, start=first, extent=extent, body=body)


def ranges(condition, var: Var, start, extent, changing: set[Var] = frozenset()) -> tuple[list, list[tuple]]:
    """Consecutive ranges of a loop in each of which a condition has one value.

    Parameters
    ----------
    condition : Expr
        What depends on the loop.
    var : Var
        The loop variable.
    start, extent : Expr or int
        The loop's bounds.
    changing : set of Var
        Variables that iterations set.

    Returns
    -------
    binds : list of Bind
        Values that the ranges use.
    parts : list of (first, extent, value)
        Two or three ranges that cover the loop in its order, fewer where one is empty for certain; none where the
        condition changes more often, or in a way that is not known before the loop.
    """
    truth = _truth(condition, var, changing)
    if truth is None:
        return [], []
    inside, inner = (truth.holds, True) if truth.holds is not None else (truth.fails, False)
    analyzer = tvm.sym.Analyzer()
    binds: list = []

    def bound(name: str, value):
        value = analyzer.simplify(value)
        if isinstance(value, tirx.IntImm | Var):
            return value
        variable = Var(f"{var.name}_{name}", var.ty)
        binds.append(tirx.Bind(variable, value))
        return variable

    start = bound("start", tirx.convert(start))
    end = bound("end", tirx.max(start + extent, start))
    # low first: an empty interval then ends where it begins
    low = start if inside.low is None else bound("low", tirx.min(tirx.max(inside.low, start), end))
    high = end if inside.high is None else bound("high", tirx.min(tirx.max(inside.high, low), end))
    parts = []
    for first, last, value in ((start, low, not inner), (low, high, inner), (high, end, not inner)):
        length = analyzer.simplify(last - first)
        if not (isinstance(length, tirx.IntImm) and int(length) <= 0):
            parts.append((first, length, value))
    return binds, parts


def _resolved(nodes: list[Node], known: list[tuple]) -> list[Node]:
    """A body without the branches whose conditions are known."""
    out: list[Node] = []
    for node in nodes:
        if isinstance(node, CondNode):
            value = next((v for c, v in known if tvm_ffi.structural_equal(c, node.condition)), None)
            if value is not None:
                out += _resolved(node.then if value else node.orelse, known)
                continue
            node = CondNode(node.condition, _resolved(node.then, known), _resolved(node.orelse, known))
        out.append(node)
    return out


def _consequences(condition, value: bool) -> list[tuple]:
    """(condition, value) of all that follows from a condition's value."""
    found = [(condition, value)]
    if isinstance(condition, tirx.Not):
        return found + _consequences(condition.a, not value)
    if isinstance(condition, tirx.And if value else tirx.Or):
        return found + _consequences(condition.a, value) + _consequences(condition.b, value)
    return found


# ------------------------------------------------------------------------------------------------ conditions


def _truth(condition, var: Var, changing: set[Var]) -> _Truth | None:
    """Where a condition holds, or None where that is not an interval, or not known before the loop."""
    if isinstance(condition, tirx.Not):
        truth = _truth(condition.a, var, changing)
        return None if truth is None else truth.negated()
    if isinstance(condition, tirx.And | tirx.Or):
        left, right = (_truth(c, var, changing) for c in (condition.a, condition.b))
        if left is None or right is None:
            return None
        if isinstance(condition, tirx.And):
            return _Truth.of(_meet(left.holds, right.holds), None)
        return _Truth.of(None, _meet(left.fails, right.fails))
    if isinstance(condition, tirx.EQ | tirx.NE):
        difference = _affine(condition.a, condition.b, var, changing)
        if difference is None:
            return None
        slope, rest = difference
        equal = _below(slope, rest - 1).meet(_below(-slope, -rest - 1))
        return _Truth.of(equal, None) if isinstance(condition, tirx.EQ) else _Truth.of(None, equal)
    if not isinstance(condition, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
        return None
    left, right = condition.a, condition.b
    if isinstance(condition, tirx.GT | tirx.GE):
        left, right = right, left
    difference = _affine(left, right, var, changing)
    if difference is None:
        return None
    slope, rest = difference
    return _Truth.of(_below(slope, rest - 1 if isinstance(condition, tirx.LE | tirx.GE) else rest), None)


def _affine(left, right, var: Var, changing: set[Var]) -> tuple[int, object] | None:
    """(slope, rest) of ``left - right = slope * var + rest`` with a slope other than 0 and a rest that stays."""
    if any(str(side.ty.dtype) != str(var.ty.dtype) for side in (left, right)):
        return None
    analyzer = tvm.sym.Analyzer()
    difference = left - right
    slope = analyzer.simplify(substitute(difference, {var: var + 1}) - difference)
    if not isinstance(slope, tirx.IntImm) or int(slope) == 0:
        return None
    rest = analyzer.simplify(difference - slope * var)
    if mentions(rest, var):
        rest = analyzer.simplify(substitute(difference, {var: tirx.const(0, var.ty.dtype)}))
    names: list[Var] = []
    odd: list = [slope] if abs(int(slope)) >= _LARGE else []
    walk(
        rest,
        (Var, names.append),
        (TensorLoad, odd.append),
        (Call, lambda call: None if _is_choice(call) else odd.append(call)),
        (tirx.IntImm, lambda number: odd.append(number) if abs(int(number)) >= _LARGE else None),
    )
    return None if odd or any(name in changing for name in names) else (int(slope), rest)


def _loads(expression) -> bool:
    found: list = []
    if not isinstance(expression, int):
        walk(expression, (TensorLoad, found.append))
    return bool(found)


def _is_choice(call) -> bool:
    return str(getattr(call.op, "name", "")).rsplit(".", 1)[-1] == "if_then_else"


def _below(slope: int, rest) -> _Interval:
    """Iterations with ``slope * var + rest < 0``."""
    if slope > 0:
        return _Interval(None, tirx.floordiv(slope - 1 - rest, const(slope)))
    return _Interval(tirx.floordiv(rest, const(-slope)) + 1, None)


def _rest(interval: _Interval) -> _Interval | None:
    """What an interval with one open end leaves."""
    if interval.low is None and interval.high is not None:
        return _Interval(interval.high, None)
    if interval.high is None and interval.low is not None:
        return _Interval(None, interval.low)
    return None


def _meet(left: _Interval | None, right: _Interval | None) -> _Interval | None:
    return None if left is None or right is None else left.meet(right)


def _either(combine, left, right):
    return right if left is None else left if right is None else combine(left, right)


def _bound_inside(nodes: list[Node]) -> set[Var]:
    """Variables that get their values in a body."""
    found: set[Var] = set()
    for node in walk_nodes(nodes):
        if isinstance(node, LoopNode):
            found.add(node.var)
        elif isinstance(node, RawNode) and isinstance(node.stmt, tirx.Bind):
            found.add(node.stmt.var)
    return found
