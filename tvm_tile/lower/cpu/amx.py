"""Intel AMX: asking for it, and the tile GEMM micro-kernels (bf16 and int8).

The micro-kernel reads A row-major, B in the *VNNI panel* layout and accumulates into a row-major C.  A VNNI panel holds
16 columns of B; along K, ``pack`` consecutive values (2 of bf16, 4 of int8: one 32-bit word) stand together:

    offset(k, n) = ((n // 16) * (K // pack) + k // pack) * 16 * pack + (n % 16) * pack + k % pack

so that each 16 x 16-word hardware tile is 1 KB of contiguous memory.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

from tvm import tirx
from tvm.ir import Expr, StringImm, Var

from .builder import Builder, address, llvm_call

ARCH_REQ_XCOMP_PERM = 0x1023  # arch_prctl: ask for a dynamically enabled state component
XFEATURE_XTILEDATA = 18
SYS_ARCH_PRCTL = 158

ROWS = 16  # rows of a hardware tile
ROW_BYTES = 64
TILE_BYTES = ROWS * ROW_BYTES


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@functools.cache
def request_permission() -> bool:
    """Ask the operating system for AMX tile data; permission is per process, threads share it."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    except (OSError, AttributeError):
        return False


def amx_available(dtype: str = "bfloat16") -> bool:
    """Whether this process may run AMX tile products of ``dtype`` (``bfloat16``, ``int8`` or ``uint8``)."""
    flags = _cpu_flags()
    unit = {"bfloat16": "amx_bf16", "int8": "amx_int8", "uint8": "amx_int8"}.get(dtype)
    return unit is not None and unit in flags and "amx_tile" in flags and request_permission()


def emit_permission_request(b: Builder) -> None:
    """Ask for AMX at the kernel's entry: an exported kernel also runs where nobody imported this package."""
    zero = tirx.const(0, "int64")
    args = [tirx.const(v, "int64") for v in (SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)]
    status = b.bind(tirx.call_extern("int64", "syscall", *args), "amx_status")
    message = [StringImm("this kernel was compiled for AMX, which the operating system refuses on this machine")]
    b.emit(tirx.AssertStmt(tirx.EQ(status, zero), StringImm("RuntimeError"), message))


def emit_configure(b: Builder) -> None:
    """Configure all eight tiles as 16 rows of 64 bytes in the running thread (palette 1)."""
    config = b.alloc(64, "uint8", "amx_config")
    words = b.view(config, "uint64", 8)
    # byte 0: palette; bytes 16..31: bytes a row (8 x uint16); bytes 48..55: rows (8 x uint8)
    for i, word in enumerate((1, 0, 0x0040004000400040, 0x0040004000400040, 0, 0, 0x1010101010101010, 0)):
        b.store(words, tirx.const(word, "uint64"), i)
    b.evaluate(llvm_call("void", "llvm.x86.ldtilecfg", address(config, 0), pure=False))


def emit_release(b: Builder) -> None:
    """Give the tile state back (keeps context switches cheap)."""
    b.evaluate(llvm_call("void", "llvm.x86.tilerelease", pure=False))


@dataclass(frozen=True)
class AmxType:
    """An operand pair of the tile product: elements a 32-bit word, the instruction, the accumulator."""

    pack: int
    instruction: str
    accumulator: str

    @property
    def k_step(self) -> int:
        """Elements along K of one hardware tile."""
        return 16 * self.pack


def amx_type(a: str, b: str) -> AmxType | None:
    """The tile product for operand types ``a`` and ``b``, or None where AMX has none."""
    if a == b == "bfloat16":
        return AmxType(2, "llvm.x86.tdpbf16ps", "float32")
    signs = {"int8": "s", "uint8": "u"}
    if a in signs and b in signs:
        return AmxType(4, f"llvm.x86.tdpb{signs[a]}{signs[b]}d", "int32")
    return None


def emit_gemm(
    b: Builder,
    kind: AmxType,
    a: Var,
    a_offset,
    lda: int,
    packed: Var,
    c: Var,
    c_offset,
    ldc: int,
    m: int,
    n: int,
    k: int,
    clear: bool,
) -> None:
    """C[m, n] (+)= A[m, k] * B[k, n] with 2 x 2 hardware tiles a block.

    Parameters
    ----------
    a, a_offset, lda
        Row-major A: buffer, first element, row stride in elements.
    packed
        B as VNNI panels of ``k`` rows (module docstring), 16 columns each.
    c, c_offset, ldc
        Row-major accumulator.
    m, n, k
        Extents; multiples of 16, 16 and ``kind.k_step`` (the caller pads).
    clear
        Start from zero in place of the accumulator's old value.
    """
    if m % ROWS or n % ROWS or k % kind.k_step:
        raise ValueError(f"AMX tiles need padded extents, got {m} x {n} x {k}")
    for n_first, n_blocks, n_tiles in _blocks(n // 16):
        with b.loop(n_blocks, "nb") as nb:
            for m_first, m_blocks, m_tiles in _blocks(m // ROWS):
                with b.loop(m_blocks, "mb") as mb:
                    rows = [(m_first + i + mb * m_tiles) * ROWS for i in range(m_tiles)]
                    panels = [n_first + j + nb * n_tiles for j in range(n_tiles)]
                    _emit_block(b, kind, a, a_offset, lda, packed, c, c_offset, ldc, k, rows, panels, clear)


def _blocks(tiles: int) -> list[tuple[int, int, int]]:
    """Split a count of hardware tiles into pairs and a rest: (first tile, blocks, tiles a block)."""
    parts = [(0, tiles // 2, 2), (tiles // 2 * 2, tiles % 2, 1)]
    return [part for part in parts if part[1]]


def _emit_block(
    b: Builder,
    kind: AmxType,
    a: Var,
    a_offset,
    lda: int,
    packed: Var,
    c: Var,
    c_offset,
    ldc: int,
    k: int,
    rows: list,
    panels: list,
    clear: bool,
) -> None:
    accumulators = [[2 * i + j for j in range(len(panels))] for i in range(len(rows))]
    tile_elements = TILE_BYTES * kind.pack // 4
    a_stride = tirx.const(lda * 4 // kind.pack, "int64")
    c_stride = tirx.const(ldc * 4, "int64")
    word_stride = tirx.const(ROW_BYTES, "int64")
    c_index = [[c_offset + row * ldc + panel * 16 for panel in panels] for row in rows]
    for i in range(len(rows)):
        for j in range(len(panels)):
            if clear:
                _tile(b, "llvm.x86.tilezero", accumulators[i][j])
            else:
                _tile(b, "llvm.x86.tileloadd64", accumulators[i][j], address(c, c_index[i][j]), c_stride)
    with b.loop(k // kind.k_step, "kb") as kb:
        for j, panel in enumerate(panels):
            start = (panel * (k // kind.k_step) + kb) * tile_elements
            _tile(b, "llvm.x86.tileloadd64", 6 + j, address(packed, start), word_stride)
        for i, row in enumerate(rows):
            start = a_offset + row * lda + kb * kind.k_step
            _tile(b, "llvm.x86.tileloadd64", 4 + i, address(a, start), a_stride)
            for j in range(len(panels)):
                b.evaluate(llvm_call("void", kind.instruction, *_numbers(accumulators[i][j], 4 + i, 6 + j), pure=False))
    for i in range(len(rows)):
        for j in range(len(panels)):
            _tile(b, "llvm.x86.tilestored64", accumulators[i][j], address(c, c_index[i][j]), c_stride)


def _numbers(*tiles: int) -> list[Expr]:
    return [tirx.const(t, "int8") for t in tiles]


def _tile(b: Builder, name: str, tile: int, *args) -> None:
    b.evaluate(llvm_call("void", name, *_numbers(tile), *args, pure=False))
