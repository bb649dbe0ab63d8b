"""Occupancy of a CUDA kernel. Source: the rules of the CUDA occupancy calculator (``cuda_occupancy.h``)."""

from __future__ import annotations

from dataclasses import dataclass

from .base import GPU


@dataclass(frozen=True)
class Occupancy:
    """Blocks that fit on an SM at once.

    Attributes
    ----------
    blocks : int
        Resident blocks an SM; 0 where the kernel cannot be launched at all.
    warps : int
        Resident warps an SM.
    fraction : float
        `warps` over the SM's maximum.
    limiter : str
        What limits the blocks: ``threads``, ``registers``, ``shared`` or ``blocks``.
    limits : tuple of (str, int)
        Blocks that each resource alone would allow.
    """

    blocks: int
    warps: int
    fraction: float
    limiter: str
    limits: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.blocks} blocks, {self.warps} warps an SM ({self.fraction:.0%}), limited by {self.limiter}"


def occupancy(gpu: GPU, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of blocks of ``threads`` with ``registers`` a thread and ``shared_bytes`` (static and dynamic) a block.

    Raises
    ------
    ValueError
        For negative values or no threads; a block that merely does not fit has 0 blocks.
    """
    if threads < 1 or registers < 0 or shared_bytes < 0:
        raise ValueError(f"threads = {threads}, registers = {registers}, shared_bytes = {shared_bytes}")
    warps = -(-threads // gpu.warp_size)
    limits = {
        "threads": gpu.warps_per_sm // warps if threads <= gpu.threads_per_block else 0,
        "registers": _register_blocks(gpu, warps, registers),
        "shared": _shared_blocks(gpu, shared_bytes),
        "blocks": gpu.blocks_per_sm,
    }
    limiter = min(limits, key=lambda name: limits[name])
    blocks = limits[limiter]
    return Occupancy(blocks, blocks * warps, blocks * warps / gpu.warps_per_sm, limiter, tuple(limits.items()))


def _register_blocks(gpu: GPU, warps: int, registers: int) -> int:
    if registers == 0:
        return gpu.blocks_per_sm
    if registers > gpu.registers_per_thread:
        return 0
    unit = gpu.register_allocation
    per_warp = -(-registers * gpu.warp_size // unit) * unit
    # Each sub-partition holds whole warps; a block's warps are dealt evenly to the partitions.
    dealt = -(-warps // gpu.partitions) * gpu.partitions
    if per_warp * dealt > gpu.registers_per_block:
        return 0
    return gpu.registers_per_sm // gpu.partitions // per_warp * gpu.partitions // warps


def _shared_blocks(gpu: GPU, shared_bytes: int) -> int:
    if shared_bytes > gpu.shared_per_block:
        return 0
    unit = gpu.shared_allocation
    taken = -(-(shared_bytes + gpu.shared_reserved_per_block) // unit) * unit
    return gpu.shared_per_sm // taken
