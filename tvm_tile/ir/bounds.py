"""Out-of-bounds rules: loads outside a tensor give 0 (or its safe value), stores are dropped, proofs cost nothing.

Accesses whose indices are provably inside stay as they are; the others get a condition. An on-chip access that is
outside for certain is refused.
"""

from __future__ import annotations

import contextlib

import tvm
from tvm import tirx
from tvm.ir import Range, TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize
from tvm.sym import Analyzer, ConstIntBound, ProofStrength
from tvm.tirx import Bind, BufferStore, Evaluate, For, IfThenElse, is_buffer_var

from ..errors import TileShapeError
from .visit import rewrite, source_location, substitute, walk

__all__ = ["guard_accesses"]

_NO_GUARD = ("gemm", "reduce", "cumsum")  # operations on whole tiles cannot drop single elements


def guard_accesses(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Guard every access of a parsed function that cannot be proven to be inside its buffer.

    Parameters
    ----------
    func : PrimFunc
        Tile IR as the parser built it.

    Raises
    ------
    TileShapeError
        For an on-chip access that is out of bounds for certain, or that a whole-tile operation makes and that cannot be
        proven to be inside.
    """
    return _Guard(func).run()


class _Guard:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.analyzer = Analyzer()
        self.op: str | None = None
        self.safe: dict[str, object] = {}
        self.spans: list = [None]
        self.conditions = 0
        self.ranges: dict[Var, tuple] = {}
        self.multiples: dict[Var, object] = {}
        self.extents: set[Var] = set()  # variables that are extents or strides of tensors

    def run(self) -> tirx.PrimFunc:
        for param in self.func.params:
            if is_buffer_var(param):
                for extent in [*param.ty.shape, *param.ty.strides]:
                    walk(extent, (Var, self._non_negative))
        with contextlib.ExitStack() as stack:
            # T.assume conditions stand in front of the kernels
            walk(self.func.body, (tirx.AssertStmt, lambda a: self._assume(a.condition, stack)))
            statements = [
                (For, self.on_for),
                (SBlockRealize, self.on_realize),
                (SBlock, self.on_block),
                (IfThenElse, self.on_if),
                (Bind, self.on_bind),
                (BufferStore, self.on_store),
                (Evaluate, self.on_evaluate),
            ]
            expressions = [(TensorLoad, self.on_load), (tvm.ir.Call, self.on_call)]
            return rewrite(self.func, [*((kind, self._located(handler)) for kind, handler in statements), *expressions])

    def _located(self, handler):
        """The handler, with the statement's place on the stack of places for errors."""

        def handle(stmt, m):
            self.spans.append(getattr(stmt, "span", None) or self.spans[-1])
            try:
                return handler(stmt, m)
            finally:
                self.spans.pop()

        return handle

    def _non_negative(self, var) -> None:
        if str(var.ty.dtype).startswith("int") and not is_buffer_var(var):
            self.extents.add(var)
            limit = 2**31 - 1 if str(var.ty.dtype) == "int32" else 2**62
            self.analyzer.update(var, ConstIntBound(0, limit), True)

    # ---- scopes

    def on_for(self, loop, m):
        start, extent = m.mutate(loop.min), m.mutate(loop.extent)
        self.analyzer.bind(loop.loop_var, Range.from_min_extent(self._known(start), self._known(extent)))
        self.ranges[loop.loop_var] = (loop.min, loop.extent)
        body = m.mutate(loop.body)
        return For(
            loop.loop_var, start, extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step, loop.span
        )

    def on_realize(self, realize, m):
        for axis, value in zip(realize.block.iter_vars, realize.iter_values, strict=False):
            self.analyzer.bind(axis.var, self._known(value))
            if value in self.ranges:
                self.ranges[axis.var] = self.ranges[value]
        return SBlockRealize(realize.iter_values, realize.predicate, m.mutate(realize.block))

    def on_block(self, block, m):
        annotations = block.annotations
        saved = self.op, self.safe
        if "tile.kernel" in annotations:
            self.safe = {str(k): str(v) for k, v in dict(annotations.get("tile.safe_values", {})).items()}
        if "tile.op" in annotations:
            self.op = str(annotations["tile.op"])
        try:
            # reads and writes keep the regions the builder found: the guards only narrow them
            body = m.mutate(block.body)
            init = None if block.init is None else m.mutate(block.init)
        finally:
            self.op, self.safe = saved
        return SBlock(block.iter_vars, block.reads, block.writes, block.name_hint, body, init, block.alloc_buffers,
                      block.match_buffers, annotations, block.span)  # fmt: skip

    @contextlib.contextmanager
    def _given(self, condition):
        self.conditions += 1
        try:
            with self.analyzer.constraint_scope(self._known(condition)):
                yield
        finally:
            self.conditions -= 1

    def on_if(self, stmt, m):
        condition = m.mutate(stmt.condition)
        with self._given(condition):
            then = m.mutate(stmt.then_case)
        other = None
        if stmt.else_case is not None:
            with self._given(tirx.Not(condition)):
                other = m.mutate(stmt.else_case)
        return IfThenElse(condition, then, other, stmt.span)

    def on_bind(self, stmt, m):
        value = m.mutate(stmt.value)
        if str(stmt.var.ty).startswith("int"):
            loads: list = []
            walk(value, (TensorLoad, loads.append), (tvm.ir.Call, loads.append))
            if not loads:
                self.analyzer.bind(stmt.var, self._known(value))
        return Bind(stmt.var, value, stmt.span)

    # ---- accesses

    def on_store(self, store, m):
        indices = self._indices(store.buffer, [m.mutate(i) for i in store.indices])
        value = m.mutate(store.value)
        condition = self._condition(store.buffer, indices, f"the store to {store.buffer.name}")
        out = BufferStore(store.buffer, value, indices, span=store.span)
        return out if condition is None else IfThenElse(condition, out, None, store.span)

    def on_load(self, load, m):
        if not is_buffer_var(load.source):
            return m.default_mutate(load)
        indices = self._indices(load.source, [m.mutate(i) for i in load.indices])
        out = tirx.BufferLoad(load.source, indices)
        condition = self._condition(load.source, indices, f"the load {load}")
        return out if condition is None else tirx.if_then_else(condition, out, self._outside(load.source))

    def _outside(self, buffer):
        """What a load outside of ``buffer`` gives."""
        dtype = str(buffer.ty.dtype)
        text = self.safe.get(buffer.name)
        if text is None or str(buffer.ty.storage_scope) != "global":
            return tirx.const(False if dtype == "bool" else 0, dtype)
        if dtype == "bool":
            return tirx.const(text in ("1", "True"), dtype)
        return tirx.const(float(text) if "float" in dtype else int(text), dtype)

    def on_evaluate(self, stmt, m):
        call = stmt.value
        if not _is_atomic(call):
            return m.default_mutate(stmt)
        call, condition = self._atomic(call, m)
        out = Evaluate(call, stmt.span)
        return out if condition is None else IfThenElse(condition, out, None, stmt.span)

    def on_call(self, call, m):
        name = getattr(call.op, "name", "")
        if _is_atomic(call):
            call, condition = self._atomic(call, m)
            return call if condition is None else tirx.if_then_else(condition, call, tirx.const(0, str(call.ty.dtype)))
        if name == "prim.if_then_else":
            condition = m.mutate(call.args[0])
            with self._given(condition):
                then = m.mutate(call.args[1])
            with self._given(tirx.Not(condition)):
                other = m.mutate(call.args[2])
            return tirx.if_then_else(condition, then, other)
        return m.default_mutate(call)

    def _atomic(self, call, m):
        element = call.args[1].args[0]
        indices = self._indices(element.source, [m.mutate(i) for i in element.indices])
        value = m.mutate(call.args[2])
        address = tirx.address_of(tirx.BufferLoad(element.source, indices))
        condition = self._condition(element.source, indices, f"the atomic update of {element.source.name}")
        return tirx.call_extern(str(call.ty.dtype), call.args[0].value, address, value), condition

    def _known(self, expr):
        """The expression with what T.assume says about divisibility written into it."""
        return substitute(expr, self.multiples) if self.multiples and isinstance(expr, tvm.ir.Expr) else expr

    def _prove(self, condition) -> bool:
        condition = self._known(condition)
        if self.analyzer.can_prove(condition) or self.analyzer.can_prove(condition, ProofStrength.SYMBOLIC_BOUND):
            return True
        worst = self._in_last_iteration(condition)
        return worst is not None and self.analyzer.can_prove(worst)

    def _in_last_iteration(self, condition):
        """``index >= 0`` for the last iteration of a loop that the index runs down with, where it is least.

        A proof for every iteration has to see that the loop's extent cancels out.
        """
        if not isinstance(condition, tirx.GE):
            return None
        names: list[Var] = []
        walk(condition.a, (Var, names.append))
        for var in names:
            if var in self.ranges:
                start, extent = (self._known(e) for e in self.ranges[var])
                slope = self.analyzer.simplify(substitute(condition.a, {var: var + 1}) - condition.a)
                if isinstance(slope, tirx.IntImm) and int(slope) < 0:
                    return substitute(condition, {var: start + extent - 1})
        return None

    def _assume(self, condition, stack) -> None:
        """``n % c == 0`` makes n a multiple in all proofs; other conditions are constraints."""
        if isinstance(condition, tirx.And):
            self._assume(condition.a, stack)
            self._assume(condition.b, stack)
            return
        if isinstance(condition, tirx.EQ) and isinstance(condition.a, tirx.FloorMod) and isinstance(condition.a.a, Var):
            var, divisor, rest = condition.a.a, condition.a.b, condition.b
            if isinstance(divisor, tirx.IntImm) and isinstance(rest, tirx.IntImm) and int(rest.value) == 0:
                if var not in self.multiples:
                    quotient = Var(f"{var.name}_quotient", var.ty.dtype)
                    if var in self.extents:  # a scalar parameter may be negative, an extent is not
                        self._non_negative(quotient)
                    self.multiples[var] = quotient * divisor
                return
        stack.enter_context(self.analyzer.constraint_scope(condition))

    def _indices(self, buffer, indices: list) -> list:
        """Index arithmetic in 64 bits where a dimension has 2^31 elements or more."""
        return [
            _widened(i) if isinstance(e, tirx.IntImm) and int(e.value) > 2**31 - 1 and str(i.ty.dtype) != "int64" else i
            for i, e in zip(indices, buffer.ty.shape, strict=True)
        ]

    def _condition(self, buffer, indices, what: str):
        """The conjunction that keeps an access inside, or None where it is proven."""
        terms = []
        on_chip = str(buffer.ty.storage_scope) != "global"
        for dim, (index, extent) in enumerate(zip(indices, buffer.ty.shape, strict=False)):
            low = self._prove(index >= 0)
            high = self._prove(index < extent)
            if low and high:
                continue
            if on_chip:
                self._refuse_outside(buffer, dim, index, extent, what)
            elif isinstance(index, tirx.IntImm) and int(index.value) < 0:
                self._refuse_negative(buffer, dim, index, extent, what)
            if not low:
                terms.append(index >= 0)
            if not high:
                terms.append(index < extent)
        if not terms:
            return None
        if self.op in _NO_GUARD and on_chip:
            raise TileShapeError(
                f"{what} cannot be proven to stay inside {buffer.name} {_shape(buffer)}",
                self._where(),
                f"a T.{self.op} works on whole tiles: slice {buffer.name} with bounds the compiler can see, or guard "
                f"the operation",
            )
        condition = terms[0]
        for term in terms[1:]:
            condition = tirx.And(condition, term)
        return condition

    def _refuse_negative(self, buffer, dim, index, extent, what: str) -> None:
        """A negative constant is Python's way to count from the end, not a ragged edge."""
        raise TileShapeError(
            f"{what} is outside of {buffer.name} {_shape(buffer)}: index {index} of dimension {dim}",
            self._where(),
            f"negative indices do not count from the end: write {extent + index} instead of {index}",
        )

    def _refuse_outside(self, buffer, dim, index, extent, what: str) -> None:
        """An index that leaves an on-chip buffer for certain, for some iteration of unconditional loops."""
        certain = self.analyzer.can_prove(index < 0) or self.analyzer.can_prove(index >= extent)
        if not certain and self.conditions == 0 and self._is_linear(index):
            bound = self.analyzer.const_int_bound(index)
            certain = (
                bound.min_value > -(2**40)
                and bound.max_value < 2**40
                and (bound.min_value < 0 or bound.max_value >= int(extent))
            )
        if certain:
            bound = self.analyzer.const_int_bound(index)
            reach = (
                f"{bound.min_value} to {bound.max_value}"
                if bound.max_value < 2**40 and bound.min_value > -(2**40)
                else str(index)
            )
            raise TileShapeError(
                f"{what} leaves {buffer.name} {_shape(buffer)}: index {index} of dimension {dim} runs over {reach}",
                self._where(),
                f"dimension {dim} of {buffer.name} has indices 0 to {int(extent) - 1}",
            )

    def _is_linear(self, index) -> bool:
        """Whether an index is linear in loop variables of constant range, so that its bounds are attained."""
        free: list[Var] = []
        walk(index, (Var, lambda v: free.append(v) if all(not v.same_as(f) for f in free) else None))
        if not free:
            return True
        if any(v not in self.ranges or not isinstance(self.ranges[v][1], tirx.IntImm) for v in free):
            return False
        return len(tvm.sym.detect_linear_equation(index, free)) > 0

    def _where(self):
        return source_location(self.spans[-1])


def _widened(expr):
    """The same integer expression computed in 64 bits."""
    if isinstance(expr, tirx.IntImm):
        return tirx.const(int(expr.value), "int64")
    if isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul | tirx.FloorDiv | tirx.FloorMod | tirx.Min | tirx.Max):
        return type(expr)(_widened(expr.a), _widened(expr.b))
    return tirx.Cast("int64", expr)


def _is_atomic(call) -> bool:
    return (
        isinstance(call, tvm.ir.Call)
        and getattr(call.op, "name", "") == "tirx.call_extern"
        and str(call.args[0].value).startswith("tile_atomic_")
    )


def _shape(buffer) -> str:
    inner = ", ".join(str(e) for e in buffer.ty.shape)
    return f"({inner},)" if len(buffer.ty.shape) == 1 else f"({inner})"
