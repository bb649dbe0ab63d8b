"""float8 before sm_89: its bytes are moved as uint8, and only conversions know what they mean.

TVM's legalisation of float8 keeps local arrays in float32 (which byte moves do not expect) and its bit arithmetic
loses NaN, subnormals and saturation. So no float8 value is left for it: buffers become uint8, conversions are the
helpers of :mod:`.convert`, and arithmetic on float8 values is refused.
"""

from __future__ import annotations

import functools
import math

from tvm import tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.tirx import AllocBuffer, AttrStmt, BufferStore, SeqStmt, is_buffer_var
from tvm.tirx.stmt import DeclBuffer

from ...errors import TileTypeError
from ...ir.visit import rewrite, walk
from .convert import FLOAT8, legalise, native_float8

__all__ = ["float8_as_bytes", "float8_code"]

_ARITHMETIC = (
    *(tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min),
    *(tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE),
)


def float8_as_bytes(stmt, hw, location=None):
    """A kernel whose float8 buffers are uint8 ones, on targets without float8 conversions; others unchanged.

    Parameters
    ----------
    stmt : Stmt
        Thread-level code of one kernel, with its launch attributes.
    hw : GPU
        The target machine.
    location : SourceLocation, optional
        For the error.

    Raises
    ------
    TileTypeError
        For arithmetic or comparisons of float8 values.
    """
    if native_float8(hw) or not _uses_float8(stmt):
        return stmt
    return _Bytes(location).run(legalise(stmt, hw))


def _uses_float8(stmt) -> bool:
    found: list = []
    walk(stmt, (Var, lambda v: found.append(v) if _is_float8_buffer(v) else None))
    return bool(found)


def _is_float8_buffer(var) -> bool:
    return is_buffer_var(var) and str(var.ty.dtype) in FLOAT8


@functools.lru_cache(maxsize=4)
def _values(dtype: str) -> list[float]:
    """Value of each code of a float8 format."""
    mantissa, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    out = []
    for code in range(256):
        exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
        size = math.ldexp(fraction, 1 - bias - mantissa)
        if exponent:
            size = math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
        if dtype == "float8_e4m3fn" and code & 0x7F == 0x7F:
            size = math.nan
        if dtype == "float8_e5m2" and exponent == 31:
            size = math.nan if fraction else math.inf
        out.append(-size if code & 0x80 else size)
    return out


def float8_code(value: float, dtype: str) -> int:
    """The byte of a constant: nearest (ties to even), saturating, NaN stays NaN.

    Parameters
    ----------
    value : float
        The constant.
    dtype : str
        ``float8_e4m3fn`` or ``float8_e5m2``.
    """
    if math.isnan(value):
        return 0x7F
    limit = 448.0 if dtype == "float8_e4m3fn" else 57344.0
    sign, size = (0x80 if math.copysign(1.0, value) < 0 else 0), min(abs(value), limit)
    codes = [c for c in range(128) if _values(dtype)[c] <= limit]
    return sign | min(codes, key=lambda c: (abs(_values(dtype)[c] - size), c & 1))


class _Bytes:
    def __init__(self, location) -> None:
        self.location = location
        self.buffers: dict[Var, Var] = {}
        self.views: list[DeclBuffer] = []

    def run(self, stmt):
        for kind in _ARITHMETIC:
            walk(stmt, (kind, self._refuse))
        handlers = [
            *((AllocBuffer, self._alloc), (DeclBuffer, self._decl), (TensorLoad, self._load)),
            *((BufferStore, self._store), (Call, self._call), (tirx.Select, self._select)),
            (tirx.FloatImm, self._constant),
        ]
        made = rewrite(stmt, handlers)
        return self._declare_views(made)

    def _refuse(self, node) -> None:
        if str(node.a.ty.dtype) in FLOAT8:
            raise TileTypeError(
                f"arithmetic on {node.a.ty.dtype} values, which this target has no instructions for",
                self.location,
                "convert the operands first: T.cast(x, 'float32')",
            )

    def _new(self, buffer: Var, data=None) -> Var:
        ty = buffer.ty
        return tirx.decl_buffer(
            ty.shape, "uint8", buffer.name, data=data, strides=list(ty.strides) or None, elem_offset=ty.elem_offset,
            scope=str(ty.storage_scope), layout=None,
        )  # fmt: skip

    def _buffer(self, buffer: Var) -> Var:
        if not _is_float8_buffer(buffer):
            return buffer
        if buffer not in self.buffers:  # a parameter: the same memory as bytes
            data = tirx.buffer_data(buffer)
            view = self._new(buffer, data)
            self.buffers[buffer] = view
            self.views.append(DeclBuffer(view, data=data))
        return self.buffers[buffer]

    def _alloc(self, node, m):
        if not _is_float8_buffer(node.buffer):
            return node
        self.buffers[node.buffer] = self._new(node.buffer)
        return AllocBuffer(self.buffers[node.buffer])

    def _decl(self, node, m):
        data = m.mutate(node.data)
        if not _is_float8_buffer(node.buffer):
            return DeclBuffer(node.buffer, data=data)
        self.buffers[node.buffer] = self._new(node.buffer, data)
        return DeclBuffer(self.buffers[node.buffer], data=data)

    def _load(self, node, m):
        if not is_buffer_var(node.source):
            return m.default_mutate(node)
        return tirx.BufferLoad(self._buffer(node.source), [m.mutate(i) for i in node.indices])

    def _store(self, node, m):
        return BufferStore(self._buffer(node.buffer), m.mutate(node.value), [m.mutate(i) for i in node.indices])

    def _call(self, call, m):
        name = getattr(call.op, "name", "")
        if name == "tirx.buffer_data":
            return tirx.buffer_data(self._buffer(call.args[0]))
        if name == "tirx.address_of":
            return tirx.address_of(m.mutate(call.args[0]))
        if name == "tirx.reinterpret":
            value = m.mutate(call.args[0])
            target = "uint8" if str(call.ty.dtype) in FLOAT8 else str(call.ty.dtype)
            return value if str(value.ty.dtype) == target else tirx.reinterpret(target, value)
        if name == "prim.if_then_else":
            return tirx.if_then_else(*[m.mutate(a) for a in call.args])
        return m.default_mutate(call)

    def _select(self, node, m):
        return tirx.Select(m.mutate(node.condition), m.mutate(node.true_value), m.mutate(node.false_value))

    def _constant(self, node, m):
        dtype = str(node.ty.dtype)
        return tirx.const(float8_code(float(node.value), dtype), "uint8") if dtype in FLOAT8 else node

    def _declare_views(self, stmt):
        """Views of parameters stand inside the innermost launch attribute."""
        if not self.views:
            return stmt

        def on_attr(node, m):
            if str(node.attr_key) != "thread_extent":
                return m.default_mutate(node)
            inner = isinstance(node.body, AttrStmt) and str(node.body.attr_key) == "thread_extent"
            body = m.mutate(node.body) if inner else SeqStmt([*self.views, node.body])
            return AttrStmt(node.node, node.attr_key, node.value, body)

        return rewrite(stmt, [(AttrStmt, on_attr)])
