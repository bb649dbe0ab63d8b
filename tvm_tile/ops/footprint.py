"""What one configuration of an op takes of a machine, from its sizes alone: no kernel is parsed to find out.

The specs of the ops answer it from the same numbers that their kernels allocate with; a test compares the two. The
tuner rejects configurations by it before anything is built, and its cost model and the advice of ``tvm-tile inspect``
read it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ITEM_BYTES", "Footprint", "Tile", "cdiv"]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip

#: Registers a thread beside the fragments: addresses, counters, operands of instructions.
OTHER_REGISTERS = 40


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Tile:
    """One on-chip tile.

    Attributes
    ----------
    name : str
        The buffer's name in the kernel.
    elements : int
        Of one copy.
    dtype : str
        Element dtype.
    staged : bool
        A pipelined loop loads it: there is one copy a stage.
    late : bool
        Live only after the loop, so that it can take the place of tiles that are not.
    converted : bool
        A fragment that is another one in a narrower dtype, made piece by piece where it is used: it takes registers of
        the other as these become free.
    """

    name: str
    elements: int
    dtype: str
    staged: bool = False
    late: bool = False
    converted: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of one copy."""
        return self.elements * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Footprint:
    """One configuration of an op.

    Attributes
    ----------
    threads, stages : int
        CTA size and pipeline depth.
    shared, fragments : tuple of Tile
        Shared tiles, and tiles that the CTA's threads hold together in registers.
    products : tuple of (int, int, int)
        (M, N, K) of the tile products of one iteration.
    ctas, iterations : int
        Size of the grid, and trips of the main loop of one CTA (the mean where CTAs differ).
    load_bytes, flops : int
        Of one iteration: bytes loaded from global memory, operations of the products.
    slots : int
        Copies of staged tiles that the compiler finds room for whatever the stages, 0 where it does not look for any.
    """

    threads: int
    stages: int
    shared: tuple[Tile, ...]
    fragments: tuple[Tile, ...]
    products: tuple[tuple[int, int, int], ...]
    ctas: int
    iterations: int
    load_bytes: int
    flops: int
    slots: int = 0

    @property
    def copies(self) -> int:
        """Copies of a staged tile."""
        return max(1, self.stages)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that is live together."""
        loop = sum(t.bytes * (self.copies if t.staged else 1) for t in self.shared if not t.late)
        return max(loop, sum(t.bytes for t in self.shared if t.late))

    def with_stages(self, stages: int) -> Footprint:
        """The same with another pipeline depth."""
        return replace(self, stages=stages)

    @property
    def fragment_registers(self) -> int:
        """Registers a thread that the fragments take when they are spread evenly and all live."""
        return sum(cdiv(t.bytes, 4 * self.threads) for t in self.fragments if not t.converted)

    @property
    def registers(self) -> int:
        """Registers a thread, an estimate."""
        return self.fragment_registers + OTHER_REGISTERS

    def unfit(self, machine) -> str | None:
        """Why a machine of :mod:`tvm_tile.hardware` cannot run it well; None where it can.

        On a GPU: more threads or shared memory than a CTA may have, more registers than a thread may have, a product
        that is smaller than the instruction. A CPU has no such limits.
        """
        if machine.kind != "cuda":
            return None
        if self.threads > machine.threads_per_block:
            return f"threads: {self.threads} > {machine.threads_per_block}"
        if self.shared_bytes > machine.shared_per_block:
            return f"shared memory: {self.shared_bytes} > {machine.shared_per_block} bytes"
        limit = min(machine.registers_per_thread, machine.registers_per_block // self.threads)
        if self.registers > limit:
            return f"registers: about {self.registers} > {limit} a thread"
        for m, n, _ in self.products:
            if m * n * machine.warp_size < 16 * 8 * self.threads:
                return f"instruction shape: {self.threads // machine.warp_size} warps for a product of {m} x {n}"
        return None
