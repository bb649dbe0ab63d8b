"""Storage types and conversions: how narrow floats are kept in memory and how they become float32 vectors and back.

Scratch and tensors of bfloat16 and float8 are read as the unsigned integers of their bits; arithmetic is float32.  All
conversions are bit operations, which LLVM vectorises on every CPU; rounding is to nearest even and NaN stays NaN.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from .builder import Builder, as_expr, is_nan, lanes_of, splat, vtype

_BITS_STORAGE = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "bool": "uint8"}

NARROW_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types whose values are computed in float32 and rounded where they are stored or cast."""


def storage_dtype(dtype: str) -> str:
    """The type under which memory of ``dtype`` is read and written."""
    return _BITS_STORAGE.get(dtype, dtype)


def compute_dtype(dtype: str) -> str:
    """The type in which values of ``dtype`` are computed."""
    return "float32" if dtype in NARROW_FLOATS else dtype


def widen(b: Builder, bits: Expr, dtype: str) -> Expr:
    """Stored bits of ``dtype`` as a value of ``compute_dtype(dtype)``."""
    lanes = lanes_of(bits)
    if dtype == "bfloat16":
        return _bf16_to_f32(bits, lanes)
    if dtype == "float8_e5m2":
        half = tirx.Cast(vtype("uint16", lanes), bits) << splat(8, "uint16", lanes)
        return tirx.Cast(vtype("float32", lanes), tirx.reinterpret(vtype("float16", lanes), half))
    if dtype == "float8_e4m3fn":
        return _e4m3_to_f32(b, bits, lanes)
    if dtype == "float16":
        return tirx.Cast(vtype("float32", lanes), bits)
    if dtype == "bool":
        return tirx.NE(bits, splat(0, "uint8", lanes))
    return bits


def narrow(b: Builder, value: Expr, dtype: str) -> Expr:
    """A value of ``compute_dtype(dtype)`` as the stored bits of ``dtype``."""
    lanes = lanes_of(value)
    if dtype == "bfloat16":
        return _f32_to_bf16(b, value, lanes)
    if dtype == "float8_e5m2":
        return _f32_to_f8(b, value, lanes, exponent_bits=5, mantissa_bits=2)
    if dtype == "float8_e4m3fn":
        return _f32_to_f8(b, value, lanes, exponent_bits=4, mantissa_bits=3)
    if dtype == "float16":
        return tirx.Cast(vtype("float16", lanes), value)
    if dtype == "bool":
        return tirx.Select(value, splat(1, "uint8", lanes), splat(0, "uint8", lanes))
    return value


def _u32(value: int, lanes: int) -> Expr:
    return splat(tirx.const(value, "uint32"), "uint32", lanes)


def _bf16_to_f32(bits: Expr, lanes: int) -> Expr:
    wide = tirx.Cast(vtype("uint32", lanes), bits) << _u32(16, lanes)
    return tirx.reinterpret(vtype("float32", lanes), wide)


def _f32_to_bf16(b: Builder, value: Expr, lanes: int) -> Expr:
    value = b.bind(value, "value")
    bits = b.bind(tirx.reinterpret(vtype("uint32", lanes), value), "bits")
    odd = tirx.bitwise_and(bits >> _u32(16, lanes), _u32(1, lanes))
    rounded = (bits + odd + _u32(0x7FFF, lanes)) >> _u32(16, lanes)
    quiet = tirx.bitwise_or(bits >> _u32(16, lanes), _u32(0x40, lanes))
    return tirx.Cast(vtype("uint16", lanes), tirx.Select(is_nan(value), quiet, rounded))


def _e4m3_to_f32(b: Builder, bits: Expr, lanes: int) -> Expr:
    """Through float16, whose exponent bias is larger by 8 (so the value is 2**8 too small until multiplied)."""
    wide = b.bind(tirx.Cast(vtype("uint16", lanes), bits), "wide")

    def u16(value: int) -> Expr:
        return splat(tirx.const(value, "uint16"), "uint16", lanes)

    magnitude = b.bind(tirx.bitwise_and(wide, u16(0x7F)), "magnitude")
    sign = tirx.bitwise_and(wide, u16(0x80)) << u16(8)
    half = tirx.reinterpret(vtype("float16", lanes), tirx.bitwise_or(sign, magnitude << u16(7)))
    value = tirx.Cast(vtype("float32", lanes), half) * splat(256.0, "float32", lanes)
    return tirx.Select(tirx.EQ(magnitude, u16(0x7F)), splat(as_expr(float("nan"), "float32"), "float32", lanes), value)


def _f32_to_f8(b: Builder, value: Expr, lanes: int, exponent_bits: int, mantissa_bits: int) -> Expr:
    """Round to nearest even on the bits; a value beyond the largest finite one becomes that one (saturation, the
    conversion GPUs do), NaN becomes NaN; infinity saturates as well."""
    bias = (1 << (exponent_bits - 1)) - 1
    largest = 448.0 if exponent_bits == 4 else 57344.0
    nan = 0x7F
    dropped = 23 - mantissa_bits
    value = b.bind(value, "value")
    all_bits = b.bind(tirx.reinterpret(vtype("uint32", lanes), value), "bits")
    sign = tirx.bitwise_and(all_bits >> _u32(24, lanes), _u32(0x80, lanes))
    size_bits = b.bind(tirx.bitwise_and(all_bits, _u32(0x7FFFFFFF, lanes)), "size_bits")
    size = b.bind(tirx.reinterpret(vtype("float32", lanes), size_bits), "size")
    limit = splat(largest, "float32", lanes)
    clipped_bits = tirx.reinterpret(vtype("uint32", lanes), tirx.Select(size > limit, limit, size))
    clipped_bits = b.bind(clipped_bits, "clipped")
    odd = tirx.bitwise_and(clipped_bits >> _u32(dropped, lanes), _u32(1, lanes))
    rounded = (clipped_bits + odd + _u32((1 << (dropped - 1)) - 1, lanes)) >> _u32(dropped, lanes)
    normal = rounded - _u32((127 - bias) << mantissa_bits, lanes)
    # subnormal results: adding 2**(dropped + 1 - bias) aligns the value so that the float adder rounds it
    align = 2.0 ** (dropped + 1 - bias)
    align_bits = (127 + dropped + 1 - bias) << 23
    shifted = tirx.reinterpret(vtype("uint32", lanes), size + splat(align, "float32", lanes))
    subnormal = shifted - _u32(align_bits, lanes)
    smallest_normal = splat(2.0 ** (1 - bias), "float32", lanes)
    magnitude = tirx.Select(size < smallest_normal, subnormal, normal)
    magnitude = tirx.Select(is_nan(value), _u32(nan, lanes), magnitude)
    return tirx.Cast(vtype("uint8", lanes), tirx.bitwise_or(sign, magnitude))
