"""Elementary functions of float32 vectors as straight-line TIR that LLVM keeps in vector registers.

``llvm.exp2`` and its like become one libm call a lane, which costs more than everything around it.  Range reductions
and coefficients follow the Cephes Math Library (S. L. Moshier, single precision: ``exp2f.c``, ``expf.c``, ``log2f.c``,
``logf.c``, ``tanhf.c``, ``ndtrf.c``).  Errors stay within about 2 units in the last place; subnormal results become 0.
Every function takes the builder (temporaries are bound, not repeated) and a scalar or vector of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr

from .builder import Builder, is_nan, lanes_of, splat, vtype

_ROUND = 12582912.0  # 1.5 * 2**23: what is added to it is rounded to an integer, which stands in the low bits
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.44269504088896341
_LOG2_E_MINUS_1 = 0.44269504088896340736
_SQRT_HALF = 0.70710678118654752
_SMALLEST_NORMAL = 2.0**-126
_INFINITY, _NAN = float("inf"), float("nan")

_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_ERF_SMALL = (
    7.853861353153693e-5,
    -8.010193625184903e-4,
    5.188327685732524e-3,
    -2.685381193529856e-2,
    1.128358514861418e-1,
    -3.761262582423300e-1,
    1.128379165726710,
)
_ERFC_MIDDLE = (
    2.326819970068386e-2,
    -1.387039388740657e-1,
    3.687424674597105e-1,
    -5.824733027278666e-1,
    6.210004621745983e-1,
    -4.944515323274145e-1,
    3.404879937665872e-1,
    -2.741127028184656e-1,
    5.638259427386472e-1,
)
_ERFC_LARGE = (
    -1.047766399936249e1,
    1.297719955372516e1,
    -7.495518717768503,
    2.921019019210786,
    -1.015265279202700,
    4.218463358204948e-1,
    -2.820767439740514e-1,
    5.641895067754075e-1,
)


def _f(value: float, like: Expr) -> Expr:
    return splat(tirx.const(value, "float32"), "float32", lanes_of(like))


def _i(value: int, like: Expr) -> Expr:
    return splat(tirx.const(value, "int32"), "int32", lanes_of(like))


def _as_int(x: Expr) -> Expr:
    return tirx.reinterpret(vtype("int32", lanes_of(x)), x)


def _as_float(x: Expr) -> Expr:
    return tirx.reinterpret(vtype("float32", lanes_of(x)), x)


def _polynomial(b: Builder, x: Expr, coefficients: Sequence[float]) -> Expr:
    """Horner's rule, highest power first."""
    result = _f(coefficients[0], x)
    for c in coefficients[1:]:
        result = result * x + _f(c, x)
    return b.bind(result, "poly")


def _round(b: Builder, x: Expr) -> tuple[Expr, Expr]:
    """Nearest integer as float, and that integer shifted into the exponent field.

    Adding and subtracting 1.5 * 2**23 rounds arguments below 2**22; the callers replace the results of larger ones.
    There is no float-to-int conversion, which is undefined for NaN and infinity. The sum must be bound: TVM's
    simplifier would fold ``(x + c) - c`` to ``x``.
    """
    shifted = b.bind(x + _f(_ROUND, x), "shifted")
    exponent = b.bind(tirx.shift_left(_as_int(shifted), _i(23, x)), "exponent")
    return b.bind(shifted - _f(_ROUND, x), "whole"), exponent


def exp2(b: Builder, x: Expr) -> Expr:
    """2**x; inf from 128 on, 0 below -126, NaN kept."""
    x = b.bind(x, "x")
    whole, exponent = _round(b, x)
    mantissa = _polynomial(b, b.bind(x - whole, "fraction"), _EXP2)
    result = _as_float(_as_int(mantissa) + exponent)
    result = tirx.Select(x < _f(-126.0, x), _f(0.0, x), result)
    return b.bind(tirx.Select(x >= _f(128.0, x), _f(_INFINITY, x), result), "exp2")


def exp(b: Builder, x: Expr) -> Expr:
    """e**x; inf and 0 outside of float32's normal range, NaN kept."""
    x = b.bind(x, "x")
    whole, exponent = _round(b, b.bind(x * _f(_LOG2_E, x), "scaled"))
    rest = b.bind(x - whole * _f(_LN2_HIGH, x), "rest")
    rest = b.bind(rest - whole * _f(_LN2_LOW, x), "rest")
    mantissa = b.bind(_polynomial(b, rest, _EXP) * (rest * rest) + rest + _f(1.0, x), "mantissa")
    result = _as_float(_as_int(mantissa) + exponent)
    result = tirx.Select(x < _f(-87.33654, x), _f(0.0, x), result)
    return b.bind(tirx.Select(x > _f(88.72283, x), _f(_INFINITY, x), result), "exp")


def _split(b: Builder, x: Expr) -> tuple[Expr, Expr, Expr]:
    """x = (1 + m) * 2**e with 1 + m in [sqrt(1/2), sqrt(2)); returns m, e and Cephes' log(1 + m) - m."""
    subnormal = x < _f(_SMALLEST_NORMAL, x)  # (bound vectors of bool do not pass TVM's checks)
    scaled = b.bind(tirx.Select(subnormal, x * _f(2.0**23, x), x), "scaled")
    bits = b.bind(_as_int(scaled), "bits")
    exponent = tirx.shift_right(bits, _i(23, x)) - _i(126, x)
    exponent = b.bind(exponent - tirx.Select(subnormal, _i(23, x), _i(0, x)), "exponent")
    mantissa = b.bind(
        _as_float(tirx.bitwise_or(tirx.bitwise_and(bits, _i(0x7FFFFF, x)), _i(0x3F000000, x))), "mantissa"
    )
    low = mantissa < _f(_SQRT_HALF, x)
    e = b.bind(tirx.Cast(vtype("float32", lanes_of(x)), exponent) - tirx.Select(low, _f(1.0, x), _f(0.0, x)), "e")
    m = b.bind(tirx.Select(low, mantissa + mantissa, mantissa) - _f(1.0, x), "m")
    square = b.bind(m * m, "square")
    tail = b.bind(m * (square * _polynomial(b, m, _LOG)), "tail")
    return m, e, tail


def _log_special(b: Builder, x: Expr, result: Expr) -> Expr:
    result = tirx.Select(x < _f(_INFINITY, x), result, x)  # +inf and NaN stand for themselves
    result = tirx.Select(x < _f(0.0, x), _f(_NAN, x), result)
    return b.bind(tirx.Select(tirx.EQ(x, _f(0.0, x)), _f(-_INFINITY, x), result), "log")


def log2(b: Builder, x: Expr) -> Expr:
    """Base-2 logarithm: -inf at 0, NaN below."""
    x = b.bind(x, "x")
    m, e, tail = _split(b, x)
    tail = b.bind(tail - _f(0.5, x) * (m * m), "tail")
    result = b.bind(tail * _f(_LOG2_E_MINUS_1, x) + m * _f(_LOG2_E_MINUS_1, x), "sum")
    return _log_special(b, x, result + tail + m + e)


def log(b: Builder, x: Expr) -> Expr:
    """Natural logarithm: -inf at 0, NaN below."""
    x = b.bind(x, "x")
    m, e, tail = _split(b, x)
    tail = b.bind(tail + e * _f(_LN2_LOW, x), "tail")
    tail = b.bind(tail - _f(0.5, x) * (m * m), "tail")
    return _log_special(b, x, m + tail + e * _f(_LN2_HIGH, x))


def _abs(b: Builder, x: Expr) -> Expr:
    return b.bind(_as_float(tirx.bitwise_and(_as_int(x), _i(0x7FFFFFFF, x))), "magnitude")


def _with_sign(b: Builder, magnitude: Expr, sign: Expr) -> Expr:
    bits = tirx.bitwise_or(_as_int(magnitude), tirx.bitwise_and(_as_int(sign), _i(-0x80000000, sign)))
    return b.bind(_as_float(bits), "signed")


def tanh(b: Builder, x: Expr) -> Expr:
    """Hyperbolic tangent."""
    x = b.bind(x, "x")
    size = _abs(b, x)
    square = b.bind(x * x, "square")
    small = b.bind(_polynomial(b, square, _TANH) * square * x + x, "small")
    large = _f(1.0, x) - _f(2.0, x) / (exp(b, size + size) + _f(1.0, x))
    large = _with_sign(b, b.bind(large, "large"), x)
    return b.bind(tirx.Select(size < _f(0.625, x), small, large), "tanh")


def sigmoid(b: Builder, x: Expr) -> Expr:
    """1 / (1 + exp(-x))."""
    return b.bind(_f(1.0, x) / (_f(1.0, x) + exp(b, _f(0.0, x) - x)), "sigmoid")


def erf(b: Builder, x: Expr) -> Expr:
    """Error function."""
    x = b.bind(x, "x")
    size = _abs(b, x)
    small = b.bind(_polynomial(b, b.bind(x * x, "square"), _ERF_SMALL) * x, "small")
    clipped = b.bind(tirx.Select(size > _f(1.0, x), size, _f(1.0, x)), "clipped")  # keeps 1 / size finite
    inverse = b.bind(_f(1.0, x) / clipped, "inverse")
    y = b.bind(inverse * inverse, "y")
    middle, large = _polynomial(b, y, _ERFC_MIDDLE), _polynomial(b, y, _ERFC_LARGE)
    rest = exp(b, _f(0.0, x) - clipped * clipped) * inverse * tirx.Select(clipped < _f(2.0, x), middle, large)
    outside = _with_sign(b, b.bind(_f(1.0, x) - rest, "outside"), x)
    result = tirx.Select(size <= _f(1.0, x), small, outside)
    return b.bind(tirx.Select(is_nan(x), x, result), "erf")


FUNCTIONS: dict[str, Callable[[Builder, Expr], Expr]] = {
    "exp2": exp2,
    "exp": exp,
    "log2": log2,
    "log": log,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "erf": erf,
}
"""The functions by the name of their TIR operator."""
