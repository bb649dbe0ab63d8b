"""How many consecutive elements one memory access may move: contiguity, alignment and guards, proven symbolically."""

from __future__ import annotations

import contextlib

import tvm
from tvm import tirx
from tvm.ir import Range, TensorLoad, Var
from tvm.tirx import For, IfThenElse

from ..ir.kernels import KernelInfo
from ..ir.visit import mentions, walk
from ..layout import SharedLayout
from .analysis import GLOBAL, SHARED, Access, Site

__all__ = ["BASE_ALIGNMENT", "MAX_VECTOR_BITS", "VectorProver", "body_width", "guards_of"]

#: Bytes to which every tensor's first element is taken to be aligned; checked at the call (``tile.alignment``).
BASE_ALIGNMENT = 16
MAX_VECTOR_BITS = 128


class VectorProver:
    """Proofs for one kernel.

    Parameters
    ----------
    info : KernelInfo
        The kernel: its axes are not negative.
    func : PrimFunc
        Its ``T.assume`` conditions hold.
    """

    def __init__(self, info: KernelInfo, func: tirx.PrimFunc) -> None:
        self.analyzer = tvm.sym.Analyzer()
        for var, extent in zip(info.axes, info.grid, strict=True):
            self.analyzer.bind(var, Range.from_min_extent(0, extent))
        self.assumed = _assumptions(func)

    def access_width(self, site: Site, access: Access, axis: int, layout: SharedLayout | None) -> int | None:
        """Elements of ``axis`` that one access moves at once: a power of two; None where the axis does not move it.

        Parameters
        ----------
        layout : SharedLayout or None
            Of a shared buffer; its vectors stay inside a 16-byte chunk.
        """
        width = MAX_VECTOR_BITS // access.bits
        if access.scope == SHARED and layout is None:
            return 1
        var = site.op.axes[axis].var
        if not any(mentions(i, var) for i in access.indices) and not any(t and t.axis == axis for t in access.terms):
            return None
        if any(t is None for t in access.terms) or site.extents[axis] is None:
            return 1
        moving = [d for d, t in enumerate(access.terms) if t.axis == axis]
        if moving != [len(access.terms) - 1]:
            return 1
        strides = self._strides(access, layout)
        with self._context():
            if not self._is(strides[-1], 1):
                return 1
            while width > 1 and not self._fits(site, access, axis, strides, width):
                width //= 2
        return width

    def _fits(self, site: Site, access: Access, axis: int, strides, width: int) -> bool:
        if site.extents[axis] % width or not self._multiple(access.terms[-1].start, width):
            return False
        return all(
            self._multiple(strides[d], width)
            or (t.axis is None and self._multiple(t.start * strides[d], width))
            or self._single(site, t)
            for d, t in enumerate(access.terms[:-1])
        )

    @staticmethod
    def _single(site: Site, term) -> bool:
        """An index that is 0 throughout."""
        return term.constant == 0 and (term.axis is None or site.extents[term.axis] == 1)

    def _strides(self, access: Access, layout: SharedLayout | None) -> list:
        if layout is not None:
            shape = layout.shape
            out = [layout.row_stride, 1] if len(shape) > 1 else [1]
            stride = layout.matrix_stride
            for extent in reversed(shape[:-2]):
                out.insert(0, stride)
                stride *= extent
            return out
        buffer = access.buffer.ty
        if buffer.strides:
            return list(buffer.strides)
        out, run = [], tirx.const(1, "int64")
        for extent in reversed(buffer.shape):
            out.insert(0, run)
            run = run * tirx.Cast("int64", tirx.convert(extent))
        return [self.analyzer.simplify(s) for s in out]

    def guard_width(self, site: Site, axis: int, conditions: list, limit: int) -> int:
        """Elements of ``axis``, at most ``limit``, within which every condition has one value."""
        width = limit
        with self._context():
            for condition in conditions:
                for term in _conjuncts(condition):
                    while width > 1 and not self._uniform(site.op.axes[axis].var, term, width):
                        width //= 2
        return width

    def _uniform(self, var: Var, term, width: int) -> bool:
        if not mentions(term, var):
            return True
        kind = type(term).__name__
        if kind not in ("LT", "LE", "GT", "GE"):
            return False
        left, right = (term.a, term.b) if kind in ("LT", "LE") else (term.b, term.a)  # left < right or left <= right
        found = tvm.sym.detect_linear_equation(right - left, [var])
        if len(found) != 2 or not isinstance(found[0], tirx.IntImm) or abs(int(found[0].value)) != 1:
            return False
        # With the axis x: the condition changes between x = t - 1 and x = t; t has to be a multiple of the width.
        slope, rest = int(found[0].value), found[1]
        strict = kind in ("LT", "GT")
        if slope == -1:  # x < rest or x <= rest
            threshold = rest if strict else rest + 1
        else:  # -rest < x or -rest <= x
            threshold = rest - 1 if strict else rest
        return self._multiple(threshold, width)

    # ---- arithmetic

    def multiple(self, expr, width: int) -> bool:
        """Whether an expression is a multiple of ``width`` for certain."""
        with self._context():
            return self._multiple(expr, width)

    @contextlib.contextmanager
    def _context(self):
        with contextlib.ExitStack() as stack:
            for condition in self.assumed:
                stack.enter_context(self.analyzer.constraint_scope(condition))
            yield

    def _multiple(self, expr, width: int) -> bool:
        if isinstance(expr, int):
            return expr % width == 0
        found = self.analyzer.modular_set(self.analyzer.simplify(expr))
        return int(found.coeff) % width == 0 and int(found.base) % width == 0

    def _is(self, expr, value: int) -> bool:
        if isinstance(expr, int | tirx.IntImm):
            return int(expr) == value
        return self.analyzer.can_prove_equal(expr, tirx.const(value, str(expr.ty.dtype)))


def _conjuncts(condition) -> list:
    if isinstance(condition, tirx.And):
        return _conjuncts(condition.a) + _conjuncts(condition.b)
    return [condition]


def _assumptions(func: tirx.PrimFunc) -> list:
    found: list = []
    walk(func.body, (tirx.AssertStmt, lambda s: found.append(s.condition)))
    return [term for condition in found for term in _conjuncts(condition)]


def guards_of(stmt) -> list:
    """Conditions of a statement under which memory may not be touched: branches and guarded loads."""
    found: list = []

    def on_call(call):
        if getattr(call.op, "name", "") == "prim.if_then_else" and _loads_memory(call):
            found.append(call.args[0])

    walk(stmt, (IfThenElse, lambda s: found.append(s.condition)), (tvm.ir.Call, on_call))
    return found


def _loads_memory(call) -> bool:
    loads: list[TensorLoad] = []
    for arg in call.args[1:]:
        walk(arg, (TensorLoad, loads.append))
    return any(
        str(x.source.ty.storage_scope) in (GLOBAL, SHARED) for x in loads if hasattr(x.source.ty, "storage_scope")
    )


def body_width(prover: VectorProver, site: Site, layout_of) -> int:
    """Elements of the last axis that all of an operation's memory accesses may join; 1 where some access cannot.

    Parameters
    ----------
    layout_of : callable
        Shared buffer -> SharedLayout or None.
    """
    if not site.op.axes or site.extents[-1] is None:
        return 1
    axis, width, moved = len(site.op.axes) - 1, MAX_VECTOR_BITS, False
    for access in site.accesses:
        if access.scope not in (GLOBAL, SHARED):
            continue
        if access.atomic:
            return 1
        layout = layout_of(access.buffer) if access.scope == SHARED else None
        found = prover.access_width(site, access, axis, layout)
        if found is not None:
            width, moved = min(width, found), True
    if not moved:
        return 1
    inner: list = []
    walk(site.op.body, (For, inner.append))
    return 1 if inner else prover.guard_width(site, axis, guards_of(site.op.body), width)
