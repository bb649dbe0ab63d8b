"""Tensor-core instructions: shapes, dtype triples, PTX names. Source: PTX ISA 8.8, "Matrix multiply" sections.

A dtype is TVM's name (``float16``, ``bfloat16``, ``float8_e4m3fn``, ``int8``, ...); ``tf32`` stands for float32
operands rounded to tf32 by the tensor core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .errors import LayoutError

_PTX_DTYPE = {"float16": "f16", "bfloat16": "bf16", "tf32": "tf32", "float32": "f32", "int8": "s8", "uint8": "u8",
              "int32": "s32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_BITS = {"float16": 16, "bfloat16": 16, "tf32": 32, "float32": 32, "int8": 8, "uint8": 8, "int32": 32,
         "float8_e4m3fn": 8, "float8_e5m2": 8}
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_INT8 = ("int8", "uint8")

MMA, WGMMA = "mma", "wgmma"


def dtype_bits(dtype: str) -> int:
    """Register bits of an operand or accumulator dtype of the tensor cores."""
    if dtype not in _BITS:
        raise LayoutError(f"{dtype!r} is no tensor-core dtype", f"known are {', '.join(sorted(_BITS))}")
    return _BITS[dtype]


@dataclass(frozen=True)
class Instruction:
    """One tensor-core instruction ``D[m, n] += A[m, k] B[k, n]`` executed by ``warps`` warps together.

    ``min_sm`` is the lowest compute capability that has it (wgmma: exactly that one, as ``sm_90a``).
    """

    family: str
    a_dtype: str
    b_dtype: str
    c_dtype: str
    m: int
    n: int
    k: int
    min_sm: int
    warps: int = 1

    @property
    def ptx(self) -> str:
        """Full PTX name."""
        a, b, c = (_PTX_DTYPE[d] for d in (self.a_dtype, self.b_dtype, self.c_dtype))
        shape = f"m{self.m}n{self.n}k{self.k}"
        if self.family == WGMMA:
            return f"wgmma.mma_async.sync.aligned.{shape}.{c}.{a}.{b}"
        return f"mma.sync.aligned.{shape}.row.col.{c}.{a}.{b}.{c}"

    @property
    def operand_bits(self) -> int:
        """Register bits of one A or B element."""
        return _BITS[self.a_dtype]

    @property
    def accumulator_bits(self) -> int:
        """Register bits of one accumulator element."""
        return _BITS[self.c_dtype]

    @property
    def a_registers(self) -> int:
        """32-bit registers a thread for A."""
        return self.m * self.k * self.operand_bits // (32 * 32 * self.warps)

    @property
    def b_registers(self) -> int:
        """32-bit registers a thread for B; 0 where B is read from shared memory."""
        return 0 if self.family == WGMMA else self.n * self.k * self.operand_bits // (32 * 32)

    @property
    def c_registers(self) -> int:
        """32-bit registers a thread for the accumulator."""
        return self.m * self.n * self.accumulator_bits // (32 * 32 * self.warps)

    @property
    def valid_n(self) -> tuple[int, ...]:
        """Extents of n that exist for this family and dtype, ascending."""
        return wgmma_valid_n(self.a_dtype) if self.family == WGMMA else (self.n,)

    def with_n(self, n: int) -> Instruction:
        """The same instruction for another n (wgmma)."""
        if n not in self.valid_n:
            raise LayoutError(f"{self.family} with {self.a_dtype} operands has no n = {n}",
                              f"n is one of {', '.join(map(str, self.valid_n))}")
        return replace(self, n=n)

    def largest_n(self, extent: int, most: int | None = None) -> int:
        """Largest n of the instruction, up to ``most``, that divides ``extent``."""
        fitting = [n for n in self.valid_n if extent % n == 0 and (most is None or n <= most)]
        if not fitting:
            raise LayoutError(f"N = {extent} is no multiple of {self.valid_n[0]}, the smallest n of {self.family}")
        return fitting[-1]


def wgmma_valid_n(a_dtype: str) -> tuple[int, ...]:
    """n of wgmma: multiples of 8 up to 256; for 8-bit integers 8, 24 and multiples of 16."""
    if a_dtype in _INT8:
        return (8, 16, 24, *range(32, 257, 16))
    return tuple(range(8, 257, 8))


def _mma_table() -> tuple[Instruction, ...]:
    def rows(pairs, accumulators, ks, sm):
        return [Instruction(MMA, a, b, c, 16, 8, k, sm) for a, b in pairs for c in accumulators for k in ks]

    fp8 = [(a, b) for a in _FP8 for b in _FP8]
    int8 = [(a, b) for a in _INT8 for b in _INT8]
    return tuple(rows([("float16", "float16")], ("float32", "float16"), (16, 8), 80)
                 + rows([("bfloat16", "bfloat16")], ("float32",), (16, 8), 80)
                 + rows([("tf32", "tf32")], ("float32",), (8,), 80)
                 + rows(fp8, ("float32",), (32,), 89)
                 + rows(int8, ("int32",), (32,), 80))


def _wgmma_table() -> tuple[Instruction, ...]:
    def rows(pairs, accumulators, k):
        return [Instruction(WGMMA, a, b, c, 64, 8, k, 90, 4) for a, b in pairs for c in accumulators]

    fp8 = [(a, b) for a in _FP8 for b in _FP8]
    int8 = [(a, b) for a in _INT8 for b in _INT8]
    return tuple(rows([("float16", "float16")], ("float32", "float16"), 16)
                 + rows([("bfloat16", "bfloat16")], ("float32",), 16)
                 + rows([("tf32", "tf32")], ("float32",), 8)
                 + rows(fp8, ("float32", "float16"), 32)
                 + rows(int8, ("int32",), 32))


INSTRUCTIONS: dict[str, tuple[Instruction, ...]] = {MMA: _mma_table(), WGMMA: _wgmma_table()}
"""All instructions by family; wgmma entries have the smallest n, see `Instruction.with_n`. Deepest k first."""


def supported(family: str, sm: int) -> tuple[Instruction, ...]:
    """Instructions of a family on compute capability ``sm`` (80, 89, 90); empty if there are none."""
    if family not in INSTRUCTIONS:
        raise LayoutError(f"unknown instruction family {family!r}", f"one of {', '.join(INSTRUCTIONS)}")
    exact = family == WGMMA
    return tuple(i for i in INSTRUCTIONS[family] if (i.min_sm == sm if exact else i.min_sm <= sm))


def allowed_triples(family: str, sm: int) -> tuple[tuple[str, str, str], ...]:
    """(A, B, accumulator) dtypes of a family on a compute capability, without repetition."""
    return tuple(dict.fromkeys((i.a_dtype, i.b_dtype, i.c_dtype) for i in supported(family, sm)))


def find_instruction(family: str, a_dtype: str, b_dtype: str, c_dtype: str, sm: int,
                     k: int | None = None) -> Instruction:
    """Instruction for a dtype triple, with the deepest k that divides the tile's ``k`` (any k if None).

    Raises
    ------
    LayoutError
        Naming the allowed triples, or the k that the tile's K has to be a multiple of.
    """
    fitting = [i for i in supported(family, sm) if (i.a_dtype, i.b_dtype, i.c_dtype) == (a_dtype, b_dtype, c_dtype)]
    if not fitting:
        triples = ", ".join(f"({a}, {b}, {c})" for a, b, c in allowed_triples(family, sm))
        raise LayoutError(f"sm_{sm} has no {family} for A {a_dtype}, B {b_dtype}, accumulator {c_dtype}",
                          f"allowed are {triples}" if triples else f"sm_{sm} has no {family} at all")
    for instruction in fitting:
        if k is None or k % instruction.k == 0:
            return instruction
    raise LayoutError(f"K = {k} is no multiple of the k of {family} with {a_dtype} operands",
                      f"make K a multiple of {min(i.k for i in fitting)}")
