"""bfloat16 and float8 in scalar code: kept in memory as the integers of their bits, computed in float32.

TVM's own legalisation does not look into ``Bind``, does not round at casts, and reads subnormal, zero and NaN float8
values wrong; the reference lowering therefore says every conversion itself.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call, Expr, PointerType, PrimType, TensorLoad, Var
from tvm.tirx import is_buffer_var
from tvm.tirx.buffer import buffer_data

from ...ir.visit import rewrite
from .builder import sequence
from .convert import narrow, storage_dtype, widen
from .expression import op_name

__all__ = ["legalise"]

_ARITHMETIC = tuple(
    getattr(tirx, name)
    for name in ("Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max")
    + ("EQ", "NE", "LT", "LE", "GT", "GE")
)


def legalise(params: list[Var], body: tirx.Stmt) -> tirx.Stmt:
    """A statement of scalar code without bfloat16 and float8.

    Parameters
    ----------
    params : list of Var
        The function's parameters; tensors of these types keep them and are read through views.
    body : Stmt
        Code without blocks and without vectors.
    """
    return _SmallFloats().function(params, body)


def _small(dtype) -> bool:
    return str(dtype).startswith(("bfloat16", "float8"))


class _Lets:
    """Names the parts of an expression inside that expression (a statement would evaluate them too early)."""

    def __init__(self) -> None:
        self.bound: list[tuple[Var, Expr]] = []

    def bind(self, value: Expr, name: str = "t") -> Expr:
        """Give a value a name."""
        var = Var(name, str(value.ty.dtype))
        self.bound.append((var, value))
        return var

    def around(self, result: Expr) -> Expr:
        """The result with everything that it names."""
        for var, value in reversed(self.bound):
            result = tirx.Let(var, value, result)
        return result


def _widen(bits: Expr, dtype: str) -> Expr:
    lets = _Lets()
    return lets.around(widen(lets, lets.bind(bits, "bits"), dtype))


def _narrow(value: Expr, dtype: str) -> Expr:
    lets = _Lets()
    return lets.around(narrow(lets, value, dtype))


class _SmallFloats:
    def __init__(self) -> None:
        self.buffers: dict[Var, Var] = {}
        self.values: dict[Var, Var] = {}

    def function(self, params, body):
        views = []
        for param in params:
            if is_buffer_var(param) and _small(param.ty.dtype):
                view = self._replacement(param)
                pointer = PointerType(PrimType(str(view.ty.dtype)), "global")
                views.append(tirx.DeclBuffer(view, data=tirx.reinterpret(pointer, buffer_data(param))))
        handlers = [
            (TensorLoad, self.on_load),
            (tirx.BufferStore, self.on_store),
            (tirx.AllocBuffer, self.on_alloc),
            (tirx.stmt.DeclBuffer, self.on_declare),
            (tirx.Bind, self.on_bind),
            (Var, lambda var, m: self.values.get(var, self.buffers.get(var, var))),
            (tirx.Cast, self.on_cast),
            (tirx.FloatImm, lambda e, m: tirx.FloatImm("float32", e.value) if _small(e.ty.dtype) else e),
            (tirx.Select, self.on_select),
            (Call, self.on_call),
            *((kind, self.on_arithmetic) for kind in _ARITHMETIC),
        ]
        return sequence([*views, rewrite(body, handlers)])

    def _replacement(self, buffer: Var) -> Var:
        ty = buffer.ty
        dtype = storage_dtype(str(ty.dtype))
        self.buffers[buffer] = tirx.decl_buffer(
            ty.shape,
            dtype,
            buffer.name + "_bits",
            strides=list(ty.strides) or None,
            elem_offset=ty.elem_offset,
            scope=str(ty.storage_scope),
            data_alignment=max(1, tirx.const(0, dtype).ty.dtype.bits // 8),
        )
        return self.buffers[buffer]

    def on_load(self, load, m):
        indices = [m.mutate(i) for i in load.indices]
        if not _small(load.source.ty.dtype):
            return tirx.BufferLoad(self.buffers.get(load.source, load.source), indices)
        return _widen(tirx.BufferLoad(self.buffers[load.source], indices), str(load.source.ty.dtype))

    def on_store(self, store, m):
        indices = [m.mutate(i) for i in store.indices]
        value = m.mutate(store.value)
        if not _small(store.buffer.ty.dtype):
            return tirx.BufferStore(store.buffer, value, indices)
        return tirx.BufferStore(self.buffers[store.buffer], _narrow(value, str(store.buffer.ty.dtype)), indices)

    def on_alloc(self, stmt, m):
        return tirx.AllocBuffer(self._replacement(stmt.buffer)) if _small(stmt.buffer.ty.dtype) else stmt

    def on_declare(self, stmt, m):
        data = m.mutate(stmt.data)
        buffer = self._replacement(stmt.buffer) if _small(stmt.buffer.ty.dtype) else stmt.buffer
        return tirx.stmt.DeclBuffer(buffer, data=data)

    def on_bind(self, bind, m):
        value = m.mutate(bind.value)
        if _small(bind.var.ty.dtype):
            self.values[bind.var] = Var(bind.var.name, "float32")
        return tirx.Bind(self.values.get(bind.var, bind.var), value)

    def on_cast(self, cast, m):
        value, dtype = m.mutate(cast.value), str(cast.ty.dtype)
        if not _small(dtype):
            return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)
        if str(value.ty.dtype) != "float32":
            value = tirx.Cast("float32", value)
        return _widen(_narrow(value, dtype), dtype)

    def on_arithmetic(self, expr, m):
        return type(expr)(m.mutate(expr.a), m.mutate(expr.b))

    def on_select(self, expr, m):
        return tirx.Select(m.mutate(expr.condition), m.mutate(expr.true_value), m.mutate(expr.false_value))

    def on_call(self, call, m):
        if op_name(call) == "reinterpret" and isinstance(call.ty, PrimType):
            (value,) = call.args
            have, want = str(value.ty.dtype), str(call.ty.dtype)
            bits = m.mutate(value)
            if _small(have):
                bits = _narrow(bits, have)
            if _small(want):
                stored = storage_dtype(want)
                return _widen(bits if str(bits.ty.dtype) == stored else tirx.reinterpret(stored, bits), want)
            return bits if str(bits.ty.dtype) == want else tirx.reinterpret(call.ty, bits)
        if not (hasattr(call.ty, "dtype") and _small(call.ty.dtype)):
            return m.default_mutate(call)
        return Call(call.op, [m.mutate(a) for a in call.args], attrs=call.attrs, ret_ty=PrimType("float32"))
