"""``T.print`` and ``T.device_assert`` on the device: ``printf``, and a trap after the message is printed."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Call
from tvm.script import tirx as T

from .build import evaluate, seq
from .convert import NARROW, cast

__all__ = ["lower_assert", "lower_print"]

_DEVICE = "__device__ __forceinline__"
# printf conversion and argument type of each dtype family
_INTEGERS = {"int": ("%lld", "int64"), "uint": ("%llu", "uint64"), "bool": ("%d", "int32")}


def lower_print(call: Call, hw):
    """``tile_print(text, value, *indices)`` whose arguments are already thread-level.

    ``text`` has a ``%d`` for each index of an element of a tile; a value alone stands after it.
    """
    text, values = str(call.args[1].value), list(call.args[2:])
    arguments: list = []
    if len(values) < 2:
        text = text.replace("%", "%%") + (" " if text and values else "")
    else:
        text = text.replace("%d", "%lld")
        arguments = [tirx.Cast("int64", v) for v in values[1:]]
    if values:
        conversion, value = _value(values[0], hw)
        text += conversion
        arguments.append(value)
    return evaluate(T.cuda.printf(text + "\n", *arguments))


def _value(value, hw):
    dtype = str(value.ty.dtype)
    if dtype == "float64":
        return "%.17g", value
    if dtype == "float32" or dtype in NARROW:
        return "%.9g", tirx.Cast("float64", cast(value, "float32", hw))
    for family, (conversion, wide) in _INTEGERS.items():
        if dtype.startswith(family):
            return conversion, tirx.Cast(wide, value)
    return "%d", tirx.Cast("int32", value)


def lower_assert(call: Call):
    """``tile_assert(condition, message)`` whose arguments are already thread-level."""
    condition, message = call.args[1], str(call.args[2].value)
    text = f"T.device_assert: {message or condition}".replace("%", "%%") + "\n"
    trap = T.cuda.func_call("tile_trap", source_code=f"{_DEVICE} void tile_trap() {{ __trap(); }}")
    stop = seq([evaluate(T.cuda.printf(text)), evaluate(trap)])
    return tirx.IfThenElse(tirx.Not(condition), stop, None)
