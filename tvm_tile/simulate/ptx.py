"""The PTX instruction table: each opcode pattern and how it is executed by the simulator's runtime.

An emitter gets the parsed instruction and gives C++ statements. What has no emitter is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import UnsupportedInstructionError

C_TYPE = {
    "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t",
    "f32": "float", "f64": "double", "f16": "half", "bf16": "nv_bfloat16", "f16x2": "half2", "bf16x2": "nv_bfloat162",
    "f32x2": "float2", "tf32": "uint32_t", "pred": "bool",
}  # fmt: skip
BITS = {"uint8_t": 8, "int8_t": 8, "uint16_t": 16, "int16_t": 16, "half": 16, "nv_bfloat16": 16, "uint32_t": 32,
        "int32_t": 32, "float": 32, "half2": 32, "nv_bfloat162": 32, "uint64_t": 64, "int64_t": 64, "double": 64,
        "float2": 64}  # fmt: skip
ELEMENT = {"f16": "EL_F16", "bf16": "EL_BF16", "tf32": "EL_TF32", "e4m3": "EL_E4M3", "e5m2": "EL_E5M2",
           "s8": "EL_S8", "u8": "EL_U8", "f32": "EL_F32", "s32": "EL_S32"}  # fmt: skip
ATOMIC_TYPE = {"u32": "TY_U32", "b32": "TY_U32", "s32": "TY_S32", "u64": "TY_U64", "b64": "TY_U64", "s64": "TY_S64",
               "f32": "TY_F32", "f64": "TY_F64", "f16": "TY_F16", "bf16": "TY_BF16", "f16x2": "TY_F16X2",
               "bf16x2": "TY_BF16X2", "b16": "TY_B16"}  # fmt: skip
ATOMIC_OP = {"add": "AT_ADD", "min": "AT_MIN", "max": "AT_MAX", "exch": "AT_EXCH", "cas": "AT_CAS", "and": "AT_AND",
             "or": "AT_OR", "xor": "AT_XOR", "inc": "AT_INC", "dec": "AT_DEC"}  # fmt: skip

Operand = str | list


@dataclass
class Instruction:
    """One PTX instruction: opcode split at its dots, operands (a list is a ``{...}`` or ``[...]`` group)."""

    opcode: str
    operands: list
    text: str
    registers: dict = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def has(self, token: str) -> bool:
        return token in self.parts

    def refuse(self, why: str = "") -> UnsupportedInstructionError:
        return UnsupportedInstructionError(
            f"the simulator does not implement the PTX instruction `{self.text}`" + (f": {why}" if why else "")
        )

    # ---- operands as C++ expressions
    def raw(self, op: Operand) -> str:
        """A register, literal or special register as a C++ expression of its own type."""
        if isinstance(op, list):
            raise self.refuse("a group where one register belongs")
        op = op.strip()
        if re.fullmatch(r"%\d+", op):
            return f"_a{op[1:]}"
        if op.startswith("%"):
            name = op[1:]
            if name in self.registers:
                return self.registers[name]
            if name.startswith(("clock", "globaltimer")):
                return "tsim::clock_()"
            return f'tsim::cluster_special("{name}")'
        if op in self.registers:
            return self.registers[op]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", op):
            return f"tsim::f_from(0x{op[2:]}u)"
        if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)U?", op):
            value = op.rstrip("U")
            return f"(int64_t){value}ll" if not value.startswith("0x") else f"(int64_t){value}ull"
        if re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d+)?", op):
            return f"(float){op}"
        raise self.refuse(f"operand `{op}`")

    def value(self, op: Operand, ctype: str) -> str:
        """An operand read as ``ctype`` (a register's low bits, or a converted literal)."""
        expr = self.raw(op)
        if expr.startswith("(int64_t)"):
            if ctype in ("half", "nv_bfloat16", "half2", "nv_bfloat162", "float2"):
                return f"tsim::as<{ctype}>({expr})"
            return f"({ctype}){expr}"
        return f"tsim::as<{ctype}>({expr})"

    def pred(self, op: str) -> str:
        op = op.strip()
        if op.startswith("!"):
            return f"!({self.raw(op[1:])})"
        return f"(({self.raw(op)}) != 0)"

    def group(self, op: Operand) -> list:
        return [x for x in op[1:]] if isinstance(op, list) else [op]

    def address(self, op: Operand) -> tuple[str, str]:
        """(base expression, byte offset) of ``[%0]`` or ``[%0+16]``."""
        if not isinstance(op, list) or op[0] != "[" or len(op) != 2:
            raise self.refuse("this address form")
        m = re.fullmatch(r"(%?[\w.]+)\s*(?:\+\s*(-?\w+))?", op[1].strip())
        if not m:
            raise self.refuse("this address form")
        return self.raw(m.group(1)), m.group(2) or "0"

    def shared(self, op: Operand) -> str:
        base, off = self.address(op)
        return f"(uint32_t)(tsim::as<uint32_t>({base}) + ({off}))"

    def pointer(self, op: Operand) -> str:
        base, off = self.address(op)
        return f"(void*)(tsim::as<uint64_t>({base}) + ({off}))"

    def store(self, op: Operand, expr: str) -> str:
        if isinstance(op, str) and op.strip() == "_":
            return f"(void)({expr});"
        return f"tsim::set({self.raw(op)}, {expr});"

    def dtype(self) -> str:
        for token in reversed(self.parts):
            if token in C_TYPE:
                return token
        raise self.refuse("no type")


TABLE: list[tuple[re.Pattern, Callable[[Instruction], str]]] = []


def instruction(pattern: str):
    """Register an emitter for opcodes that match ``pattern`` from their start."""

    def register(fn):
        TABLE.append((re.compile(pattern), fn))
        return fn

    return register


def emit(ins: Instruction) -> str:
    """C++ statements that execute one instruction."""
    for pattern, fn in TABLE:
        if pattern.match(ins.opcode):
            return fn(ins)
    raise ins.refuse()
