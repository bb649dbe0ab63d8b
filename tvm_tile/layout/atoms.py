"""Register layouts of tensor-core instructions, as fragments of one warp (mma.sync) or warpgroup (wgmma), and of tiles.

Source: PTX ISA 8.8, register fragment figures of ``mma.sync.m16n8k*`` and ``wgmma.m64nNk*``. All of them follow one
rule, with ``g = lane / 4``, ``t = lane % 4`` and ``v`` elements in a 32-bit register (two for a 32-bit accumulator):
a row digit of 8 on g, a second row half on registers, ``v`` neighbours along the other axis, 4 such groups on t, and a
second half of k on the highest registers. Registers are counted in elements, not in 32-bit words.
"""

from __future__ import annotations

from .arith import ceil_div, round_up
from .errors import LayoutError
from .fragment import REG, THREAD, Digit, Fragment
from .instructions import WGMMA, Instruction
from .partition import WarpPartition


def _rows_by_columns(columns: int, pack: int, row_halves: int, warps: int = 1) -> Fragment:
    """``(8 * row_halves * warps) x columns`` fragment: rows on g, columns in groups of ``pack`` on t."""
    column_halves = columns // (4 * pack)
    rows = (Digit(warps, THREAD, 32), Digit(row_halves, REG, pack), Digit(8, THREAD, 4))
    cols = (Digit(column_halves, REG, pack * row_halves), Digit(4, THREAD, 1), Digit(pack, REG, 1))
    return Fragment((8 * row_halves * warps, columns), (rows, cols))


def a_atom(instruction: Instruction) -> Fragment:
    """A operand in registers, shape ``(m, k)``."""
    pack = 32 // instruction.operand_bits
    return _rows_by_columns(instruction.k, pack, 2, instruction.warps)


def b_atom(instruction: Instruction) -> Fragment:
    """B operand in registers, shape ``(k, n)``; mma.sync only."""
    if instruction.family == WGMMA:
        raise LayoutError("wgmma reads B from shared memory, it has no register layout")
    pack = 32 // instruction.operand_bits
    return _rows_by_columns(instruction.k, pack, 1).transpose()


def c_atom(instruction: Instruction) -> Fragment:
    """Accumulator, shape ``(m, n)``; the same element order for 32-bit and (packed) 16-bit accumulators."""
    return _rows_by_columns(instruction.n, 2, 2, instruction.warps)


def _halved_c_atom(instruction: Instruction) -> Fragment:
    """Accumulator of which each of two warps keeps eight of the sixteen rows, shape ``(m, n)``."""
    rows = (Digit(2, THREAD, 32), Digit(8, THREAD, 4))
    cols = (Digit(instruction.n // 8, REG, 2), Digit(4, THREAD, 1), Digit(2, REG, 1))
    return Fragment((instruction.m, instruction.n), (rows, cols))


def accumulator_fragment(instruction: Instruction, partition: WarpPartition, threads: int | None = None) -> Fragment:
    """Accumulator of a whole ``M x N`` tile over the partition's warps.

    Registers run over n inside an instruction, then over instructions along N, then along M. Warps run along N first;
    where two warps share a sub-tile along K, they are neighbours.
    """
    inst = instruction.with_n(partition.instruction_n)
    atom = c_atom(inst) if partition.k_groups == 1 else _halved_c_atom(inst)
    tile = atom.repeat(1, partition.n_repeat).repeat(0, partition.m_repeat)
    tile = tile.repeat(1, partition.n_groups, THREAD).repeat(0, partition.m_groups, THREAD)
    return _finish(tile, (partition.M, partition.N), threads)


def a_fragment(instruction: Instruction, partition: WarpPartition, k: int, threads: int | None = None) -> Fragment:
    """A operand ``M x K`` in registers, replicated over the warps along N.

    An accumulator whose N is this K has the same fragment (`feeds_a_operand`), so that it feeds the next product
    without moving a register.
    """
    if partition.k_groups > 1:
        raise LayoutError("warps that share a sub-tile along K read A from shared memory")
    steps = _k_steps(instruction, k)
    tile = a_atom(instruction).repeat(1, steps).repeat(0, partition.m_repeat)
    tile = tile.replicated(partition.n_groups).repeat(0, partition.m_groups, THREAD)
    return _finish(tile, (partition.M, k), threads)


def b_fragment(instruction: Instruction, partition: WarpPartition, k: int, threads: int | None = None) -> Fragment:
    """B operand ``K x N`` in registers, replicated over the warps along M; registers run along N, then along K."""
    steps = _k_steps(instruction, k)
    tile = b_atom(instruction).repeat(1, partition.n_repeat).repeat(0, steps)
    tile = tile.repeat(1, partition.n_groups, THREAD).replicated(partition.m_groups)
    return _finish(tile, (k, partition.N), threads)


def feeds_a_operand(producer: Instruction, consumer: Instruction) -> bool:
    """Whether an accumulator of ``producer``, converted element by element, is an A operand of ``consumer`` as it lies.

    True for 16-bit operands with the same row granularity; 8-bit and tf32 operands group columns differently.
    """
    if producer.m != consumer.m or producer.warps != consumer.warps:
        return False
    n = max(consumer.k, 8)
    return c_atom(producer.with_n(8)).repeat(1, n // 8) == a_atom(consumer).repeat(1, n // consumer.k)


def _k_steps(instruction: Instruction, k: int) -> int:
    if k < 1 or k % instruction.k:
        raise LayoutError(f"K = {k} is no multiple of the k of {instruction.ptx}",
                          f"the next is {round_up(max(k, 1), instruction.k)} "
                          f"({ceil_div(max(k, 1), instruction.k)} steps of {instruction.k})")
    return k // instruction.k


def _finish(tile: Fragment, shape: tuple[int, int], threads: int | None) -> Fragment:
    tile = tile.crop(shape)
    return tile if threads is None else tile.with_threads(threads)
