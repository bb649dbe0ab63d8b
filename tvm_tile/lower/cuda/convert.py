"""Conversions between dtypes on the device.

``tirx.Cast`` covers most pairs. Helpers stand in where the code generator's own conversion is missing, ambiguous or
wrong: float8 before sm_89 (its bit arithmetic overflows), one narrow float to another, and packed conversions of two
elements a time.
Floats become float8 with saturation (infinity too) and NaN stays NaN, on every target.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from ...errors import InternalError
from ...ir.visit import rewrite
from .build import const, evaluate, seq
from .space import expr

__all__ = ["FLOAT8", "NARROW", "cast", "convert_pair", "convert_run", "legalise", "move", "native_float8", "printable"]

FLOAT8 = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
NARROW = ("float16", "bfloat16", *FLOAT8)

_DEVICE = "__device__ __forceinline__"
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}


def move(bytes_: int, dst: Expr, src: Expr):
    """Copy 1, 2, 4, 8 or 16 bytes between two aligned addresses in one access.

    Parameters
    ----------
    bytes_ : int
        Bytes moved.
    dst, src : expression
        ``tirx.address_of`` an element of any buffer.
    """
    word, name = _WORDS[bytes_], f"tile_move_{bytes_}"
    source = f"{_DEVICE} void {name}(void* dst, const void* src) {{ *({word}*)dst = *(const {word}*)src; }}"
    return evaluate(T.cuda.func_call(name, dst, src, source_code=source))


def native_float8(hw) -> bool:
    """Whether the target converts float8 in hardware (sm_89)."""
    return hw.sm >= 89


def cast(value: Expr, dtype: str, hw) -> Expr:
    """A scalar converted to another dtype.

    Parameters
    ----------
    value : expression
        What to convert.
    dtype : str
        Target dtype.
    hw : GPU
        The target machine.
    """
    source = str(value.ty.dtype)
    if source == dtype:
        return value
    if source in FLOAT8 and not native_float8(hw):
        return cast(_from_float8(value, source), dtype, hw)
    if dtype in FLOAT8 and not native_float8(hw):
        return _to_float8(cast(value, "float32", hw), dtype)
    if dtype == "bool":
        return tirx.NE(cast(value, "float32", hw) if source in NARROW else value, _zero(source))
    through_float = (
        (source in NARROW and dtype in NARROW)
        or (dtype in NARROW and source != "float32")
        or (source in NARROW and dtype != "float32")
    )
    if through_float:
        return tirx.Cast(dtype, tirx.Cast("float32", value))
    return tirx.Cast(dtype, value)


def _zero(dtype: str):
    return tirx.const(0, "float32" if dtype in NARROW else dtype)


def _from_float8(value: Expr, dtype: str) -> Expr:
    """Exact; by integer operations, because denormal numbers are flushed in float arithmetic."""
    name = f"tile_float_of_{FLOAT8[dtype].lower()}"
    if dtype == "float8_e4m3fn":
        special, mantissa, tiny, bias, least = "m == 0x7fu ? 0x7fc00000u : 0u", 20, "8u", 120, "0x1p-9f"
    else:
        special, mantissa, tiny, bias, least = (
            "m >= 0x7cu ? 0x7f800000u | (m & 3u) << 21 : 0u",
            21,
            "4u",
            112,
            "0x1p-16f",
        )
    source = f"""
{_DEVICE} float {name}(unsigned char bits) {{
  unsigned int m = bits & 0x7fu, sign = (bits & 0x80u) << 24, special = {special};
  unsigned int wide = m < {tiny} ? __float_as_uint((float)m * {least}) : (m << {mantissa}) + ({bias}u << 23);
  return __uint_as_float(sign | (special ? special : wide));
}}
"""
    return T.cuda.func_call(name, tirx.reinterpret("uint8", value), source_code=source, return_type="float32")


def _to_float8(value: Expr, dtype: str) -> Expr:
    """Nearest even; the float adder rounds subnormal results: the last bit of its sum is the least value."""
    name = f"tile_{FLOAT8[dtype].lower()}_of_float"
    largest, mantissa, bias = ("448.0f", 3, 7) if dtype == "float8_e4m3fn" else ("57344.0f", 2, 15)
    dropped = 23 - mantissa
    exponent = dropped + 1 - bias
    source = f"""
{_DEVICE} unsigned char {name}(float x) {{
  unsigned int bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu, code;
  if (size > 0x7f800000u) return (unsigned char)(sign | 0x7fu);
  float a = fminf(__uint_as_float(size), {largest});
  unsigned int c = __float_as_uint(a);
  if (a < 0x1p{1 - bias}f) code = __float_as_uint(a + 0x1p{exponent}f) - {(127 + exponent) << 23}u;
  else code = ((c + (c >> {dropped} & 1u) + {(1 << (dropped - 1)) - 1}u) >> {dropped}) - {(127 - bias) << mantissa}u;
  return (unsigned char)(sign | code);
}}
"""
    return tirx.reinterpret(dtype, T.cuda.func_call(name, value, source_code=source, return_type="uint8"))


def legalise(node, hw):
    """Casts of a statement or expression as :func:`cast` makes them."""

    def on_cast(node, m):
        value = m.mutate(node.value)
        return cast(value, str(node.ty.dtype), hw)

    return rewrite(node, [(tirx.Cast, on_cast)])


def printable(node):
    """Constants in a form that the code generator can print: bfloat16 infinity and NaN by their bits.

    It prints them as ``inff`` and ``nanf``, which are no C++, and folds casts of float32 ones to that.
    """

    def bits(value: float):
        return tirx.reinterpret(
            "bfloat16", tirx.const(0x7FC0 if math.isnan(value) else 0x7F80 if value > 0 else 0xFF80, "uint16")
        )

    def odd(node) -> bool:
        return isinstance(node, tirx.FloatImm) and not math.isfinite(float(node.value))

    def on_float(node, _m):
        return bits(float(node.value)) if str(node.ty.dtype) == "bfloat16" and odd(node) else node

    def on_cast(node, m):
        if str(node.ty.dtype) == "bfloat16" and odd(node.value):
            return bits(float(node.value.value))
        return m.default_mutate(node)

    return rewrite(node, [(tirx.FloatImm, on_float), (tirx.Cast, on_cast)])


# two neighbours converted by one instruction: (source, target) -> (PTX, needs sm)
_PAIRS = {
    ("float32", "bfloat16"): ("cvt.rn.bf16x2.f32", 80),
    ("float32", "float16"): ("cvt.rn.f16x2.f32", 80),
    ("float32", "float8_e4m3fn"): ("cvt.rn.satfinite.e4m3x2.f32", 89),
    ("float32", "float8_e5m2"): ("cvt.rn.satfinite.e5m2x2.f32", 89),
}


def convert_run(dst, dst_at, src, src_at, count: int, hw):
    """Convert ``count`` consecutive elements of a local array into consecutive elements of another, unrolled.

    Parameters
    ----------
    dst, src : Var
        Local arrays (registers).
    dst_at, src_at : expression
        First element; ``dst_at`` is even where ``count`` is (pairs are converted together).
    count : int
        Elements.
    hw : GPU
        The target machine.
    """
    source, target = str(src.ty.dtype), str(dst.ty.dtype)
    dst_at, src_at = expr(dst_at), expr(src_at)
    pair = _PAIRS.get((source, target))
    stmts = []
    if pair is not None and count % 2 == 0 and hw.sm >= pair[1]:
        for n in range(0, count, 2):
            first, second = (tirx.BufferLoad(src, [src_at + (n + k)]) for k in range(2))
            stmts.append(_pair(pair[0], target, tirx.address_of(tirx.BufferLoad(dst, [dst_at + n])), first, second))
        return seq(stmts)
    for n in range(count):
        value = cast(tirx.BufferLoad(src, [src_at + n]), target, hw)
        stmts.append(tirx.BufferStore(dst, value, [dst_at + const(n)]))
    return seq(stmts)


def convert_pair(source: str, target: str, address: Expr, low: Expr, high: Expr, hw):
    """Two values converted by one instruction into the word at ``address``.

    Parameters
    ----------
    source, target : str
        Dtypes; float32 to float16, bfloat16, or (from sm_89) float8.
    address : expression
        Where the pair goes, ``low`` first.
    low, high : expression
        The values.
    hw : GPU
        The target machine.
    """
    pair = _PAIRS.get((source, target))
    if pair is None or hw.sm < pair[1]:
        raise InternalError(f"no instruction converts two {source} to {target} on {hw.name}")
    return _pair(pair[0], target, address, low, high)


def _pair(ptx: str, target: str, address: Expr, low: Expr, high: Expr):
    name = "tile_" + ptx.replace(".", "_")
    bits = 32 if target in ("float16", "bfloat16") else 16
    word, constraint = ("unsigned int", "r") if bits == 32 else ("unsigned short", "h")
    source = (
        f"{_DEVICE} void {name}(void* dst, float low, float high) {{ {word} d; "
        f'asm("{ptx} %0, %1, %2;" : "={constraint}"(d) : "f"(high), "f"(low)); *({word}*)dst = d; }}'
    )
    return evaluate(T.cuda.func_call(name, address, low, high, source_code=source))
