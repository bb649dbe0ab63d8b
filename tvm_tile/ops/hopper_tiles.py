"""Untuned tile sizes of a matrix product on Hopper, from an estimate of cycles a CTA (measured on an H200, 2025-11)."""

from __future__ import annotations

from tvm_tile.hardware import lookup

from .common import next_power_of_two
from .footprint import ITEM_BYTES, cdiv

__all__ = ["hopper_tiles"]

#: (block_M, block_N) in the order of preference among equals (128 x 8192 x 8192: 37.6 us with 64 x 128, 39.4 with
#: 128 x 64).
CANDIDATES = (
    (128, 256), (256, 128), (256, 192), (128, 128), (64, 128), (128, 64), (128, 32), (64, 256), (64, 64), (64, 32),
)  # fmt: skip
#: Bytes a clock and SM that TMA brings from the L2 cache while all SMs load.
L2_RATE = 52
#: The same where rows do not start on 32-byte sectors: each row of a box takes more sectors, and two lines.
L2_RATE_OFF_SECTOR = 28
SECTOR = 32
#: Share of the SMs whose loads take the memory's whole bandwidth.
ENOUGH_SMS = 0.9
#: Clocks of a tile beside its products: first load, last store.
TILE_OVERHEAD = 1500
#: Bytes of a tile's row along K: the widest swizzle.
ROW_BYTES = 128
MOST_STAGES = 8
#: Shared bytes of barriers, and of one box of an epilogue's TMA store in each warpgroup.
BARRIERS, BOX = 1024, 8192


def hopper_tiles(m: int, n: int, k: int, dtype: str) -> dict:
    """The tile with the least estimated time.

    A tile's time is the larger of its products on the tensor cores and its loads from L2, plus a constant; the grid's
    time is that of its waves on the SMs, and not less than reading the operands from memory takes with the SMs in use.

    Parameters
    ----------
    m, n, k : int
        Sizes; a large number for a symbolic one.
    dtype : str
        Element dtype of A and B, of 8 or 16 bits.

    Returns
    -------
    dict
        block_M, block_N, block_K, num_stages, threads.
    """
    machine, size = lookup("sm_90"), ITEM_BYTES[dtype]
    fitting = [t for t in CANDIDATES if t[0] <= max(64, next_power_of_two(m)) and t[1] <= max(32, next_power_of_two(n))]
    best = min(fitting, key=lambda tile: _clocks(machine, m, n, k, dtype, tile))
    block_m, block_n = best
    threads = 128 if block_m == 64 else 256
    # one warpgroup's few products a step: longer steps, fewer barriers
    block_k = (2 if block_m == 64 else 1) * ROW_BYTES // size
    while block_k > ROW_BYTES // size // 2 and block_k // 2 >= k:
        block_k //= 2
    boxes = threads // 128 * 2 * BOX
    stages = (machine.shared_per_block - BARRIERS - boxes) // ((block_m + block_n) * block_k * size)
    return {
        "block_M": block_m,
        "block_N": block_n,
        "block_K": block_k,
        "num_stages": _even(min(stages, MOST_STAGES)),
        "threads": threads,
    }


def _even(stages: int) -> int:
    """Few choices are enough for tuning: 3, 4, 6, 8."""
    return stages if stages <= 4 else stages // 2 * 2


def _clocks(machine, m: int, n: int, k: int, dtype: str, tile: tuple[int, int]) -> float:
    block_m, block_n = tile
    size = ITEM_BYTES[dtype]
    tiles = cdiv(m, block_m) * cdiv(n, block_n)
    waves, active = cdiv(tiles, machine.sms), min(tiles, machine.sms)
    products = machine.tensor_flops[dtype] / 2 / machine.sms / machine.clock_hz  # a clock and SM
    rate = L2_RATE if k * size % SECTOR == 0 else L2_RATE_OFF_SECTOR
    load = (min(block_m, m) + min(block_n, n)) * size / rate
    grid = waves * (k * max(block_m * block_n / products, load) + TILE_OVERHEAD)
    memory = (m + n) * k * size / machine.memory_bandwidth * machine.clock_hz
    return max(grid, memory * max(1.0, ENOUGH_SMS * machine.sms / active))
