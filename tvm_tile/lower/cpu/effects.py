"""Calls made for their effect: atomics, printing, assertions.

CTAs run in parallel on several cores, so an operation that updates global memory atomically runs under one mutex of the
kernel call (``Mutex``); within a CTA everything is serial.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call, Expr, StringImm, TensorLoad, Var

from ...errors import InternalError
from ...ir.visit import walk
from .builder import Builder, address, load
from .convert import narrow, widen
from .expression import Evaluator, NotVectorizableError, Value, op_name

MUTEX_BYTES = 64  # at least sizeof(pthread_mutex_t) on every platform; all zero is an unlocked mutex


class Effects:
    """Handles the effectful calls of one kernel; ``mutex`` is made when the first atomic needs it."""

    def __init__(self, mutex: Var) -> None:
        self.mutex = mutex
        self.locked = False

    def __call__(self, ev: Evaluator, call: Call) -> Value:
        name = str(call.args[0].value)
        if name.startswith("tile_atomic_"):
            return self._atomic(ev, name.removeprefix("tile_atomic_"), call)
        if ev.lane is not None:
            raise NotVectorizableError(name)
        if name == "tile_print":
            _print(ev, call)
        elif name == "tile_assert":
            self._assert(ev, call)
        elif name != "tile_sync":
            raise InternalError(f"the CPU lowering does not know {name}")
        return Value(tirx.const(0, "int32"), "int32")

    def lock(self, b: Builder) -> None:
        """Enter the kernel's critical section."""
        b.evaluate(tirx.call_extern("int32", "pthread_mutex_lock", address(self.mutex, 0)))
        self.locked = True

    def unlock(self, b: Builder) -> None:
        """Leave the critical section."""
        b.evaluate(tirx.call_extern("int32", "pthread_mutex_unlock", address(self.mutex, 0)))
        self.locked = False

    def _atomic(self, ev: Evaluator, op: str, call: Call) -> Value:
        element: TensorLoad = call.args[1].args[0]
        storage = ev.storages(element.source)
        if is_global(element.source) and not self.locked:
            raise InternalError("an atomic on global memory outside of the critical section")
        value = ev.settle(ev.evaluate(call.args[2]))
        index, lanes, contiguous = ev.index(storage, element.indices)
        if ev.lane is not None and (ev.mask is not None or not contiguous):
            raise NotVectorizableError("atomic")  # lanes may meet at one element
        b, dtype = ev.b, storage.dtype
        old = b.bind(widen(b, b.bind(load(storage.flat, index), "old"), dtype), "old")
        new = {"add": tirx.Add, "max": tirx.Max, "min": tirx.Min}[op](old, ev.spread(value.expr, lanes))
        b.store(storage.flat, narrow(b, new, dtype), index)
        return Value(old, dtype)

    def _assert(self, ev: Evaluator, call: Call) -> None:
        b = ev.b
        message = str(call.args[2].value)
        parts = [StringImm(f"T.device_assert: {message or call.args[1]}")]
        condition = ev.scalar(call.args[1])
        if self.locked:
            with b.when(tirx.Not(condition)):  # a failing thread must not leave the others waiting
                b.evaluate(tirx.call_extern("int32", "pthread_mutex_unlock", address(self.mutex, 0)))
        b.emit(tirx.AssertStmt(condition, StringImm("RuntimeError"), parts))


def is_global(buffer: Var) -> bool:
    """Whether a buffer of the program is a tensor parameter."""
    return str(buffer.ty.storage_scope) in ("global", "")


def has_global_atomics(stmt) -> bool:
    """Whether a statement updates global memory atomically."""
    found: list = []

    def look(call: Call) -> None:
        if op_name(call) == "call_extern" and str(call.args[0].value).startswith("tile_atomic_"):
            if is_global(call.args[1].args[0].source):
                found.append(call)

    walk(stmt, (Call, look))
    return bool(found)


def emit_mutex(b: Builder) -> Var:
    """An unlocked mutex in the function's prologue."""
    mutex = b.alloc(MUTEX_BYTES // 8, "int64", "mutex")
    with b.loop(MUTEX_BYTES // 8) as i:
        b.store(mutex, tirx.const(0, "int64"), i)
    return mutex


def _print(ev: Evaluator, call: Call) -> None:
    values = [ev.settle(ev.evaluate(a)).expr for a in call.args[2:]]
    emit_print(ev.b, str(call.args[1].value), values)


def emit_print(b: Builder, text: str, values: list[Expr]) -> None:
    """``printf`` with integers and strings only.

    Floats are turned into text first: a TIR call cannot announce the floating-point arguments of a variadic function.

    ``values`` are what is printed and, for an element of a tile, its indices, which ``text`` has a ``%d`` for.
    """
    arguments: list[Expr] = []
    if len(values) < 2:
        text = text.replace("%", "%%") + (" " if text and values else "")
    else:
        text = text.replace("%d", "%lld")
        arguments = [tirx.Cast("int64", v) for v in values[1:]]
    if values:
        value = values[0]
        dtype = str(value.ty.dtype)
        if dtype.startswith(("float", "bfloat")):
            buffer = b.alloc(32, "int8", "text")
            digits = tirx.const(17 if dtype == "float64" else 9, "int32")
            number = value if dtype == "float64" else tirx.Cast("float64", value)
            b.evaluate(tirx.call_extern("handle", "gcvt", number, digits, address(buffer, 0)))
            text += "%s"
            arguments.append(address(buffer, 0))
        else:
            text += "%lld"
            arguments.append(tirx.Cast("int64", value))
    b.evaluate(tirx.call_extern("int32", "printf", StringImm(text + "\n"), *arguments))
    b.evaluate(tirx.call_extern("int32", "fflush", tirx.reinterpret("handle", tirx.const(0, "uint64"))))
