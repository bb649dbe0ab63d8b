"""Atomic updates on global and shared memory: ``tile_atomic_add``, ``max`` and ``min`` of every dtype of the language.

CUDA has native instructions for most; the maximum and minimum of floats exchange in a loop until nobody interfered
(and keep C's comparison: a NaN in memory stays, a NaN operand changes nothing). Every helper returns the previous
value.
"""

from __future__ import annotations

from tvm.ir import Call, Expr
from tvm.script import tirx as T

from ...errors import InternalError
from .convert import NARROW, cast

__all__ = ["atomic_call", "is_atomic", "lower_atomic"]

_C_TYPES = {
    "float64": "double", "float32": "float", "int32": "int", "uint32": "unsigned int",
    "int64": "long long", "uint64": "unsigned long long",
}  # fmt: skip
_NARROW = {"float16": ("cuda_fp16.h", "__half"), "bfloat16": ("cuda_bf16.h", "__nv_bfloat16")}
_DEVICE = "__device__ __forceinline__"


def is_atomic(call) -> bool:
    """Whether a call is an atomic update of the tile IR."""
    return (
        isinstance(call, Call)
        and getattr(call.op, "name", "") == "tirx.call_extern"
        and str(call.args[0].value).startswith("tile_atomic_")
    )


def atomic_call(op: str, address: Expr, value: Expr, dtype: str, hw) -> Expr:
    """An atomic update as a call of a device helper.

    Parameters
    ----------
    op : str
        ``add``, ``max`` or ``min``.
    address : expression
        ``tirx.address_of`` the element.
    value : expression
        What to combine, of the element's dtype.
    dtype : str
        The element's dtype.
    hw : GPU
        The target machine.

    Returns
    -------
    expression
        The previous value.
    """
    name = f"tile_atomic_{op}_{dtype}"
    if dtype in _NARROW and op == "add":
        # float32 at the interface: narrow types reach a helper in whatever form the code generator stores them
        header, kind = _NARROW[dtype]
        down, up = (
            ("__float2half_rn", "__half2float") if dtype == "float16" else ("__float2bfloat16_rn", "__bfloat162float")
        )
        source = (
            f"\n#include <{header}>\n{_DEVICE} float {name}(void* p, float v) "
            f"{{ return {up}(atomicAdd(({kind}*)p, {down}(v))); }}"
        )
        previous = T.cuda.func_call(
            name, address, cast(value, "float32", hw), source_code=source, return_type="float32"
        )
        return cast(previous, dtype, hw)
    if dtype not in _C_TYPES or dtype in NARROW:
        raise InternalError(f"no atomic {op} of {dtype}")
    return T.cuda.func_call(name, address, value, source_code=_source(name, op, dtype), return_type=dtype)


def _source(name: str, op: str, dtype: str) -> str:
    kind = _C_TYPES[dtype]
    head = f"{_DEVICE} {kind} {name}(void* p, {kind} v)"
    if op == "add":
        if dtype == "int64":
            return f"{head} {{ return (long long)atomicAdd((unsigned long long*)p, (unsigned long long)v); }}"
        return f"{head} {{ return atomicAdd(({kind}*)p, v); }}"
    native = {"max": "atomicMax", "min": "atomicMin"}[op]
    if dtype != "float32":
        return f"{head} {{ return {native}(({kind}*)p, v); }}"
    better = ">" if op == "max" else "<"
    return (
        f"{head} {{\n  unsigned int* word = (unsigned int*)p;\n  unsigned int old = atomicAdd(word, 0u);\n"
        f"  while (v {better} __uint_as_float(old)) {{\n"
        "    unsigned int seen = atomicCAS(word, old, __float_as_uint(v));\n"
        "    if (seen == old) break;\n    old = seen;\n  }\n  return __uint_as_float(old);\n}"
    )


def lower_atomic(call: Call, address: Expr, value: Expr, hw) -> Expr:
    """The device form of a tile-level atomic whose address and value are already thread-level."""
    op = str(call.args[0].value).removeprefix("tile_atomic_")
    return atomic_call(op, address, cast(value, str(call.ty.dtype), hw), str(call.ty.dtype), hw)
