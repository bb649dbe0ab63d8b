"""Evaluates program expressions into scalar or vector expressions over flat storage.

A value is *exact* while it is known to be representable in its program type.  Casts to narrow floats and arithmetic on
them leave the rounding pending: a store rounds anyway, every other use rounds first (``settle``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var
from tvm.ir.prim import expr as prim
from tvm.tirx.op import masked_load

from ...errors import InternalError
from ...ir.visit import mentions, substitute, walk
from . import vmath
from .affine import affine, conjuncts, same
from .builder import Builder, const_int, is_nan, lanes_of, load, ramp, splat, vtype
from .convert import NARROW_FLOATS, compute_dtype, narrow, storage_dtype, widen
from .storage import Storage


class NotVectorizableError(Exception):
    """This expression or statement has no vector form; the caller falls back to scalar code."""


@dataclass
class Value:
    """A computed value: expression of the compute type, program type, and whether rounding to that type is done."""

    expr: Expr
    dtype: str
    exact: bool = True

    @property
    def lanes(self) -> int:
        """1 for a scalar."""
        return lanes_of(self.expr)


@dataclass
class Lane:
    """The axis that runs along the vector: ``var`` takes the values base, base + 1, ..."""

    var: Var
    base: Expr
    lanes: int

    @property
    def indices(self) -> Expr:
        """The axis's values as a vector."""
        return ramp(self.base, self.lanes)


_BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_INTEGER_DIVISION = (tirx.FloorDiv, tirx.FloorMod, tirx.Mod)
_COMPARE = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_BITWISE = (prim.BitwiseAnd, prim.BitwiseOr, prim.BitwiseXor, prim.LShift, prim.RShift)
_ELEMENTWISE = (
    "sqrt",
    "floor",
    "ceil",
    "trunc",
    "round",
    "nearbyint",
    "fabs",
    "fma",
    "pow",
    "sin",
    "cos",
    "tan",
    "exp10",
    "log10",
    "log1p",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "asinh",
    "acosh",
    "atanh",
    "popcount",
    "atan2",
    "hypot",
    "copysign",
    "fmod",
    "nextafter",
    "ldexp",
    "exp",
    "exp2",
    "log",
    "log2",
    "tanh",
    "erf",
)


@dataclass
class Evaluator:
    """Evaluates expressions at one place of the generated program.

    Attributes
    ----------
    b : Builder
        Where temporaries go.
    storages : Callable
        Program buffer -> :class:`Storage`.
    env : dict
        Program variable -> scalar expression.
    values : dict
        Program variable bound to a computed :class:`Value`.
    lane : Lane or None
        The vector axis; None evaluates scalars.
    mask : Expr or None
        Lanes (a bool vector) in which this place executes.
    assumed : list of Expr
        Conditions known to hold here.
    effects : Callable or None
        Handler of the language's extern calls.
    zero : Expr or None
        A zero that LLVM does not see through (:func:`.builder.emit_opaque_zero`).
    """

    b: Builder
    storages: Callable[[Var], Storage]
    env: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)
    lane: Lane | None = None
    mask: Expr | None = None
    assumed: list = field(default_factory=list)
    effects: Callable | None = None
    zero: Expr | None = None

    # ---------------------------------------------------------------- helpers
    def settle(self, value: Value) -> Value:
        """Round a pending value to its program type."""
        if value.exact:
            return value
        bits = narrow(self.b, value.expr, value.dtype)
        return Value(self.b.bind(widen(self.b, bits, value.dtype), "rounded"), value.dtype)

    def spread(self, expr: Expr, lanes: int) -> Expr:
        """A scalar in all lanes; a vector as it is."""
        return expr if lanes == 1 or lanes_of(expr) == lanes else tirx.Broadcast(expr, lanes)

    def varies(self, expr) -> bool:
        """Whether an expression may differ between lanes (looking at the axis only)."""
        return self.lane is not None and mentions(expr, self.lane.var)

    def scalar(self, expr) -> Expr:
        """A uniform index or bound."""
        value = self.settle(self.evaluate(expr))
        if value.lanes != 1:
            raise NotVectorizableError(str(expr))
        return value.expr

    def holds(self, condition) -> bool:
        """Whether a condition is among the assumptions."""
        return any(same(condition, known) for known in self.assumed)

    # ---------------------------------------------------------------- expressions
    def evaluate(self, expr) -> Value:
        """The value of a program expression."""
        dtype = str(expr.ty.dtype)
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            number = tirx.const(expr.value, compute_dtype(dtype))
            return Value(number, dtype, dtype not in NARROW_FLOATS or float(expr.value) in (0.0, 1.0))
        if isinstance(expr, Var):
            return self._variable(expr, dtype)
        if isinstance(expr, TensorLoad):
            return self.load(expr)
        if isinstance(expr, tirx.Cast):
            return self._cast(expr, dtype)
        if isinstance(expr, _BINARY + _BITWISE):
            left, right = self.settle(self.evaluate(expr.a)), self.settle(self.evaluate(expr.b))
            lanes = max(left.lanes, right.lanes)
            result = type(expr)(self.spread(left.expr, lanes), self.spread(right.expr, lanes))
            return Value(result, dtype, dtype not in NARROW_FLOATS or isinstance(expr, tirx.Min | tirx.Max))
        if isinstance(expr, _INTEGER_DIVISION):
            return self._integer_division(expr, dtype)
        if isinstance(expr, _COMPARE):
            if self.holds(expr):
                return Value(tirx.const(True, "bool"), "bool")
            left, right = self.settle(self.evaluate(expr.a)), self.settle(self.evaluate(expr.b))
            lanes = max(left.lanes, right.lanes)
            left_expr, right_expr = self.spread(left.expr, lanes), self.spread(right.expr, lanes)
            if isinstance(expr, tirx.NE):
                return Value(not_equal(left_expr, right_expr), "bool")
            return Value(type(expr)(left_expr, right_expr), "bool")
        if isinstance(expr, tirx.And | tirx.Or):
            return self._logical(expr)
        if isinstance(expr, tirx.Not):
            return Value(tirx.Not(self.evaluate(expr.a).expr), "bool")
        if isinstance(expr, prim.BitwiseNot):
            return Value(tirx.bitwise_not(self.evaluate(expr.a).expr), dtype)
        if isinstance(expr, tirx.Select):
            return self._choose(expr.condition, expr.true_value, expr.false_value, dtype)
        if isinstance(expr, tirx.Let):
            value = self.settle(self.evaluate(expr.value))
            self.values[expr.var] = (
                value if value.dtype == "bool" else Value(self.b.bind(value.expr, expr.var.name), value.dtype)
            )
            return self.evaluate(expr.body)
        if isinstance(expr, Call):
            return self._call(expr, dtype)
        if self.lane is not None:
            raise NotVectorizableError(type(expr).__name__)
        raise InternalError(f"the CPU lowering has no rule for {type(expr).__name__}: {expr}")

    def _variable(self, var: Var, dtype: str) -> Value:
        if self.lane is not None and var.same_as(self.lane.var):
            return Value(self.lane.indices, dtype)
        if var in self.values:
            return self.values[var]
        return Value(self.env.get(var, var), dtype)

    def _cast(self, expr, dtype: str) -> Value:
        value = self.evaluate(expr.value)
        if value.dtype == dtype:
            return value
        value = self.settle(value)
        source, target = compute_dtype(value.dtype), compute_dtype(dtype)
        exact = dtype not in NARROW_FLOATS
        if dtype == "bool":
            return Value(not_equal(value.expr, splat(tirx.const(0, source), source, value.lanes)), dtype)
        if source == target:
            return Value(value.expr, dtype, exact)
        return Value(tirx.Cast(vtype(target, value.lanes), value.expr), dtype, exact)

    def _integer_division(self, expr, dtype: str) -> Value:
        left, right = self.settle(self.evaluate(expr.a)), self.settle(self.evaluate(expr.b))
        lanes = max(left.lanes, right.lanes)
        if lanes == 1:
            return Value(type(expr)(left.expr, right.expr), dtype, dtype not in NARROW_FLOATS)
        divisor = const_int(right.expr)
        if divisor is None or divisor <= 0 or divisor & (divisor - 1) or isinstance(expr, tirx.Mod):
            raise NotVectorizableError("vector division")
        # shifts and masks round toward minus infinity on two's complement numbers, as the floor forms do
        if isinstance(expr, tirx.FloorDiv):
            return Value(left.expr >> splat(divisor.bit_length() - 1, dtype, lanes), dtype)
        return Value(tirx.bitwise_and(left.expr, splat(divisor - 1, dtype, lanes)), dtype)

    def _logical(self, expr) -> Value:
        left, right = self.evaluate(expr.a), self.evaluate(expr.b)
        decided = 0 if isinstance(expr, tirx.And) else 1
        for one, other in ((left, right), (right, left)):
            known = const_int(one.expr)
            if known is not None:
                return Value(tirx.const(bool(decided), "bool"), "bool") if known == decided else other
        lanes = max(left.lanes, right.lanes)
        return Value(type(expr)(self.spread(left.expr, lanes), self.spread(right.expr, lanes)), "bool")

    # ---------------------------------------------------------------- choices
    def _choose(self, condition, then, otherwise, dtype: str) -> Value:
        """``then`` where the condition holds; neither side touches memory where it is not chosen."""
        split = self.split(condition)
        if split is not None:
            uniform, varying = split
            return self._choose(uniform, tirx.if_then_else(varying, then, otherwise), otherwise, dtype)
        chosen = self.evaluate(condition)
        known = const_int(chosen.expr)
        if known is not None:
            return self.evaluate(then if known else otherwise)
        if chosen.lanes == 1:
            return self._choose_uniform(condition, chosen.expr, then, otherwise, dtype)
        outer = self.mask
        try:
            self.mask = chosen.expr if outer is None else tirx.And(outer, chosen.expr)
            left = self.evaluate(then)
            unchosen = tirx.Not(chosen.expr)
            self.mask = unchosen if outer is None else tirx.And(outer, unchosen)
            right = self.evaluate(otherwise)
        finally:
            self.mask = outer
        lanes = chosen.lanes
        if dtype == "bool":
            left, right = self.spread(left.expr, lanes), self.spread(right.expr, lanes)
            return Value(tirx.Or(tirx.And(chosen.expr, left), tirx.And(tirx.Not(chosen.expr), right)), dtype)
        result = tirx.Select(chosen.expr, self.spread(left.expr, lanes), self.spread(right.expr, lanes))
        return Value(result, dtype, left.exact and right.exact)

    def split(self, condition):
        """A conjunction as its uniform and its varying part, where it has both."""
        if self.lane is None:
            return None
        terms = conjuncts(condition)
        varies = [self.varies(t) or self._mentions_vectors([t]) for t in terms]
        if all(varies) or not any(varies):
            return None
        parts = [[t for t, v in zip(terms, varies, strict=False) if v == side] for side in (False, True)]
        return tuple(functools.reduce(tirx.And, part) for part in parts)

    def _choose_uniform(self, condition, chosen: Expr, then, otherwise, dtype: str) -> Value:
        if not _touches_memory(then) and not _touches_memory(otherwise):
            left, right = self.evaluate(then), self.evaluate(otherwise)
            lanes = max(left.lanes, right.lanes)
            if dtype == "bool" and lanes > 1:
                chosen = tirx.Broadcast(chosen, lanes)
            if dtype != "bool" or lanes == 1:
                result = tirx.Select(
                    chosen if lanes == 1 else tirx.Broadcast(chosen, lanes),
                    self.spread(left.expr, lanes),
                    self.spread(right.expr, lanes),
                )
                return Value(result, dtype, left.exact and right.exact)
        lanes = (
            self.lane.lanes
            if self.varies(then) or self.varies(otherwise) or self._mentions_vectors([then, otherwise])
            else 1
        )
        # bools are kept as bytes: TVM has no memory of bool vectors
        cell = self.b.register("uint8" if dtype == "bool" else compute_dtype(dtype), lanes, "chosen")

        def write(side, known: list) -> Callable[[], None]:
            def emit() -> None:
                self.assumed.extend(known)
                value = self.spread(self.settle(self.evaluate(side)).expr, lanes)
                if known:
                    del self.assumed[-len(known) :]
                self.b.store(cell, narrow(self.b, value, "bool") if dtype == "bool" else value, 0)

            return emit

        self.b.if_else(chosen, write(then, conjuncts(condition)), write(otherwise, []))
        if dtype == "bool":
            return Value(widen(self.b, load(cell, 0), dtype), dtype)
        return Value(self.b.bind(load(cell, 0), "chosen"), dtype)

    # ---------------------------------------------------------------- memory
    def load(self, expr: TensorLoad) -> Value:
        """Read an element (or a vector of them)."""
        storage = self.storages(expr.source)
        index, lanes, contiguous = self.index(storage, expr.indices)
        dtype = storage.dtype
        if storage.bytewise:
            if lanes > 1 and (self.mask is not None or not contiguous):
                raise NotVectorizableError("masked bytes")
            bits = tirx.reinterpret(vtype(storage_dtype(dtype), lanes), load(storage.flat, byte_index(index, dtype)))
        elif lanes == 1:
            bits = load(storage.flat, index)
        elif self.mask is not None and contiguous:
            bits = masked_load(vtype(storage_dtype(dtype), lanes), storage.flat, index, self.mask)
            bits = tirx.Select(self.mask, bits, splat(0, storage_dtype(dtype), lanes))
        elif self.mask is not None:
            # an inactive lane may have any index: read element 0 instead
            safe = tirx.Select(self.mask, index, splat(0, "int64" if storage.wide else "int32", lanes))
            bits = load(storage.flat, safe)
        else:
            bits = load(storage.flat, index)
        if lanes == 1 and self.mask is not None and str(storage.source.ty.storage_scope) in ("global", ""):
            # the address may be valid only because some lane is active
            raise NotVectorizableError("uniform load under a lane mask")
        return Value(widen(self.b, self.b.bind(bits, "loaded"), dtype), dtype)

    def index(self, storage: Storage, indices) -> tuple[Expr, int, bool]:
        """Flat index of an access, its lanes, and whether they are contiguous."""
        if self.lane is None:
            return (
                self._substituted(storage.flat_index([self.settle(self.evaluate(i)).expr for i in indices])),
                1,
                False,
            )
        flat = storage.flat_index(list(indices))
        parts = None if self._mentions_vectors(indices) else affine(flat, self.lane.var)
        if parts is not None and not _contains(flat, TensorLoad):
            coefficient, rest = parts
            rest = self._substituted(rest)
            if const_int(coefficient) == 0:
                return rest, 1, False
            base = rest + self._scaled(coefficient, storage)
            if const_int(coefficient) == 1:
                return ramp(base, self.lane.lanes), self.lane.lanes, True
            stride = coefficient if not isinstance(coefficient, int) else tirx.const(coefficient, str(base.ty.dtype))
            stride = self._substituted(stride)
            if str(stride.ty.dtype) != str(base.ty.dtype):
                stride = tirx.Cast(str(base.ty.dtype), stride)
            return tirx.Ramp(base, stride, self.lane.lanes), self.lane.lanes, False
        values = [self.settle(self.evaluate(i)) for i in indices]
        lanes = max(v.lanes for v in values)
        if lanes == 1:
            return storage.flat_index([v.expr for v in values]), 1, False
        dtype = "int64" if storage.wide else "int32"
        total = splat(0, dtype, lanes)
        for value, stride in zip(values, storage.strides, strict=True):
            step = stride if isinstance(stride, int) else self._substituted(stride)
            step = tirx.const(step, dtype) if isinstance(step, int) else tirx.Cast(dtype, step)
            vector = tirx.Cast(vtype(dtype, lanes), self.spread(value.expr, lanes))
            total = total + vector * tirx.Broadcast(step, lanes)
        if const_int(storage.offset) != 0:
            total = total + splat(storage.offset, dtype, lanes)
        return self.b.bind(total, "gather"), lanes, False

    def _scaled(self, coefficient, storage: Storage) -> Expr:
        dtype = "int64" if storage.wide else "int32"
        base = self.lane.base if str(self.lane.base.ty.dtype) == dtype else tirx.Cast(dtype, self.lane.base)
        if isinstance(coefficient, int):
            return base * tirx.const(coefficient, dtype)
        return base * tirx.Cast(dtype, self._substituted(coefficient))

    def _substituted(self, expr) -> Expr:
        if isinstance(expr, int):
            return expr
        mapping = dict(self.env)
        mapping.update({var: value.expr for var, value in self.values.items() if value.lanes == 1})
        return substitute(expr, mapping) if mapping else expr

    def _mentions_vectors(self, indices) -> bool:
        vectors = [var for var, value in self.values.items() if value.lanes > 1]
        return any(mentions(i, var) for i in indices for var in vectors)

    # ---------------------------------------------------------------- calls
    def _call(self, expr: Call, dtype: str) -> Value:
        name = op_name(expr)
        if name == "if_then_else":
            return self._choose(*expr.args, dtype)
        if name == "likely":
            return self.evaluate(expr.args[0])
        if name == "reinterpret":
            return self._reinterpret(expr, dtype)
        if name == "call_extern" and self.effects is not None:
            return self.effects(self, expr)
        args = [self.settle(self.evaluate(a)) for a in expr.args]
        lanes = max(v.lanes for v in args)
        exprs = [self.spread(v.expr, lanes) for v in args]
        kind = compute_dtype(args[0].dtype)
        pending = dtype not in NARROW_FLOATS
        if name in vmath.FUNCTIONS and kind == "float32":
            return Value(vmath.FUNCTIONS[name](self.b, exprs[0]), dtype, pending)
        if name == "isnan":
            return Value(is_nan(exprs[0]), "bool")
        if name in ("isinf", "isfinite"):
            if not kind.startswith("float"):
                return Value(splat(tirx.const(name == "isfinite", "bool"), "bool", lanes), "bool")
            size = _call(vtype(kind, lanes), "fabs", exprs)
            limit = splat(tirx.const(float("inf"), kind), kind, lanes)
            return Value(tirx.EQ(size, limit) if name == "isinf" else tirx.LT(size, limit), "bool")
        if name == "rsqrt":
            return Value(splat(1.0, kind, lanes) / _call(vtype(kind, lanes), "sqrt", exprs), dtype, pending)
        if name == "sigmoid":
            one = splat(1.0, kind, lanes)
            return Value(
                one / (one + _call(vtype(kind, lanes), "exp", [splat(0.0, kind, lanes) - exprs[0]])), dtype, pending
            )
        if name == "erf" and kind == "float64":  # TVM has none for this type; the C library has
            if lanes > 1:
                raise NotVectorizableError(name)
            return Value(tirx.call_pure_extern(kind, "erf", *exprs), dtype)
        if name in _ELEMENTWISE:
            return Value(_call(vtype(compute_dtype(dtype), lanes), expr.op, exprs), dtype, pending)
        if lanes > 1 or self.lane is not None:
            raise NotVectorizableError(name)
        raw = [a if isinstance(a, StringImm) else v.expr for a, v in zip(expr.args, args, strict=False)]
        return Value(Call(expr.op, raw, ret_ty=tvm.ir.PrimType(compute_dtype(dtype))), dtype, pending)

    def _reinterpret(self, expr: Call, dtype: str) -> Value:
        value = self.settle(self.evaluate(expr.args[0]))
        stored = narrow(self.b, value.expr, value.dtype) if value.dtype in NARROW_FLOATS else value.expr
        target = storage_dtype(dtype)
        if target != storage_dtype(value.dtype):
            stored = tirx.reinterpret(vtype(target, value.lanes), stored)
        return Value(widen(self.b, stored, dtype), dtype)


def not_equal(a: Expr, b: Expr) -> Expr:
    """``a != b``, true where one is NaN (TVM compiles its own NE of floats as "ordered and not equal")."""
    return tirx.Not(tirx.EQ(a, b)) if str(a.ty.dtype).startswith("float") else tirx.NE(a, b)


def byte_index(index: Expr, dtype: str) -> Expr:
    """The bytes of the elements at ``index`` (an index or a contiguous vector of them)."""
    width = tirx.const(0, storage_dtype(dtype)).ty.dtype.bits // 8
    first = index.base if isinstance(index, tirx.Ramp) else index
    return ramp(first * width, lanes_of(index) * width)


def op_name(call: Call) -> str:
    """Name of the operator that a call applies, without its dialect (``tirx.`` or ``prim.``)."""
    return str(getattr(call.op, "name", "")).rsplit(".", 1)[-1]


def _call(dtype: str, operator, args: list[Expr]) -> Expr:
    """Apply an elementary operator, given as itself or by its name in TIR."""
    operator = tvm.ir.Op.get(f"tirx.{operator}") if isinstance(operator, str) else operator
    return Call(operator, args, ret_ty=tvm.ir.PrimType(dtype))


def _touches_memory(expr) -> bool:
    return _contains(expr, TensorLoad) or _contains(expr, Call)


def _contains(expr, kind: type) -> bool:
    found: list = []
    walk(expr, (kind, found.append))
    return bool(found)
