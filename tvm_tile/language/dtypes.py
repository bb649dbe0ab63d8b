"""Dtypes of the language: names, ranges, conversions of Python scalars."""

from __future__ import annotations

import difflib
import math
import operator

import tvm
from tvm import tirx

from ..errors import TileTypeError

__all__ = ["DTYPES", "check_dtype", "constant", "convert", "infinity", "is_float", "is_integer", "isnan", "number_of"]

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = FLOATS + INTEGERS + ("bool",)
_ALIASES = {
    "float": "float32", "half": "float16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f16": "float16",
    "f32": "float32", "f64": "float64", "fp64": "float64", "int": "int32", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "float8_e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
# Largest finite values; e4m3fn has no infinity (OCP 8-bit floating point specification, 2023).
_MAX = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
        "float64": 1.7976931348623157e308, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # fmt: skip

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def _no_infinity(dtype: str) -> str:
    if dtype == "float8_e4m3fn":
        return f"{dtype} has no infinity"
    return f"{dtype} has no infinity here: what is stored saturates, as the conversions of GPUs do"


def is_float(dtype: str) -> bool:
    """Whether a dtype is a floating-point one."""
    return dtype in FLOATS


def is_integer(dtype: str) -> bool:
    """Whether a dtype is an integer one (bool is not)."""
    return dtype in INTEGERS


def check_dtype(dtype, what: str) -> str:
    """The canonical name of a dtype.

    Raises
    ------
    TileTypeError
        When the language has no such dtype; the message proposes the nearest.
    """
    name = str(dtype() if callable(dtype) and not isinstance(dtype, str) else dtype)
    if name.startswith("torch."):
        name = name[len("torch.") :]
    if hasattr(dtype, "ty") and not isinstance(dtype, str):
        name = str(dtype.ty.dtype)
    elif callable(dtype) and not isinstance(dtype, str) and hasattr(dtype(), "ty"):
        name = str(dtype().ty.dtype)
    name = _ALIASES.get(name, name)
    if name in DTYPES:
        return name
    near = difflib.get_close_matches(name, DTYPES + tuple(_ALIASES), n=1)
    raise TileTypeError(
        f"{what}: unknown dtype {name!r}",
        advice=(f"did you mean {_ALIASES.get(near[0], near[0])!r}?" if near else f"one of {', '.join(DTYPES)}"),
    )


def infinity(dtype) -> tirx.FloatImm:
    """Positive infinity of a floating-point dtype.

    Parameters
    ----------
    dtype : str
        The dtype.

    Raises
    ------
    TileTypeError
        For a dtype without one: integers, and float8, whose conversions saturate.

    Examples
    --------
    >>> float(T.infinity("float16").value)
    inf
    """
    dtype = check_dtype(dtype, "T.infinity")
    if dtype not in FLOATS:
        raise TileTypeError(f"T.infinity: {dtype} has no infinity", advice="use T.max_value(dtype)")
    if dtype in _FLOAT8:
        raise TileTypeError(f"T.infinity: {_no_infinity(dtype)}", advice=f"use its largest value, {_MAX[dtype]:g}")
    return tirx.const(math.inf, dtype)


def isnan(value):
    """Whether an expression is NaN.

    Parameters
    ----------
    value : expression
        A floating-point value of any dtype (TVM's own ``isnan`` has no bfloat16 and no 8-bit dtypes).

    Examples
    --------
    >>> @T.prim_func
    ... def kernel(A: T.Tensor((100,), "float32"), B: T.Tensor((100,), "float32")):
    ...     with T.Kernel(2, threads=64) as bx:
    ...         for i in T.Parallel(64):
    ...             if T.isnan(A[bx * 64 + i]):
    ...                 B[bx * 64 + i] = 0
    """
    if not tvm.ir.is_prim_expr(value) or not is_float(str(value.ty.dtype)):
        raise TileTypeError(f"T.isnan takes a floating-point expression, but got {value!r}")
    if str(value.ty.dtype) not in ("float16", "float32", "float64"):
        value = tirx.Cast("float32", value)  # exact
    return tirx.isnan(value)


def constant(value, dtype: str, what: str):
    """``value`` as an expression of ``dtype``; a Python number must be representable.

    Raises
    ------
    TileTypeError
        For a number out of range, a fractional number for an integer dtype, or an implicit float -> integer conversion.
    """
    if isinstance(value, tirx.IntImm | tirx.FloatImm) and not isinstance(value, bool):
        number = value.value
        if str(value.ty.dtype) == dtype:
            return value
        value = bool(number) if str(value.ty.dtype) == "bool" else number
    if isinstance(value, bool | int | float):
        return _number(value, dtype, what)
    if tvm.ir.is_prim_expr(value):
        return convert(value, dtype, what)
    if hasattr(value, "expr_ty"):
        return convert(tirx.convert(value), dtype, what)
    raise TileTypeError(
        f"{what}: expected a scalar value of {dtype}, but got {type(value).__name__}",
        advice="use T.copy or T.Parallel for whole tiles",
    )


def _number(value, dtype: str, what: str):
    if dtype == "bool":
        return tirx.const(bool(value), "bool")
    if is_integer(dtype):
        if isinstance(value, float) and not value.is_integer():
            raise TileTypeError(
                f"{what}: {value} is not an integer, but the element dtype is {dtype}",
                advice="use an integer, or a float dtype",
            )
        bits = tvm.runtime.DataType(dtype).bits
        low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        if math.isinf(value) or not low <= int(value) <= high:
            raise TileTypeError(f"{what}: {value} does not fit {dtype}", advice=f"its range is {low} to {high}")
        return tirx.const(int(value), dtype)
    if math.isinf(value) and dtype in _FLOAT8:
        raise TileTypeError(f"{what}: {_no_infinity(dtype)}", advice=f"its largest value is {_MAX[dtype]:g}")
    if math.isfinite(value) and abs(value) > _MAX[dtype]:
        raise TileTypeError(f"{what}: {value} does not fit {dtype}", advice=f"its largest value is {_MAX[dtype]:g}")
    return tirx.const(float(value), dtype)


def convert(value, dtype: str, what: str):
    """An expression cast to ``dtype`` where C would convert implicitly; float -> integer must be asked for."""
    have = str(value.ty.dtype)
    if have == dtype:
        return value
    if is_float(have) and (is_integer(dtype) or dtype == "bool"):
        raise TileTypeError(
            f"{what}: a value of {have} does not convert to {dtype} by itself",
            advice=f"say how: T.cast(value, {dtype!r}) truncates toward zero"
            if dtype != "bool"
            else "compare it: value != 0",
        )
    return tirx.Cast(dtype, value)


def number_of(expr) -> int | float | None:
    """The Python number behind a constant expression such as ``-T.infinity("float32")``, else None.

    TVM's simplifier leaves arithmetic on infinities alone.
    """
    if isinstance(expr, bool | int | float):
        return expr
    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        return expr.value
    if isinstance(expr, tirx.Cast):
        value = number_of(expr.value)
        if value is None or is_float(str(expr.ty.dtype)):
            return value
        return int(value) if math.isfinite(value) else None
    fold = {tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul}.get(type(expr))
    if fold is None:
        return None
    parts = number_of(expr.a), number_of(expr.b)
    return None if None in parts else fold(*parts)
