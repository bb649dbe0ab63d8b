"""What a simulated run did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIELDS = (
    "shared_loads",
    "shared_stores",
    "shared_wavefronts",
    "bank_conflicts",
    "global_loads",
    "global_stores",
    "global_sectors",
    "global_sectors_ideal",
    "global_read_bytes",
    "global_write_bytes",
    "shared_read_bytes",
    "shared_write_bytes",
    "tma_read_bytes",
    "tma_write_bytes",
    "barriers",
    "switches",
    "blocks",
    "threads",
)


@dataclass
class SimulationReport:
    """Counts of one simulated call.

    Attributes
    ----------
    shared_loads, shared_stores, global_loads, global_stores : int
        Warp-level accesses (one instruction of up to 32 lanes).
    shared_wavefronts, bank_conflicts : int
        Passes over the shared-memory banks, and those beyond the fewest possible (also of ldmatrix and stmatrix).
    global_sectors, global_sectors_ideal : int
        32-byte sectors touched, and the fewest that the bytes need.
    global_read_bytes, global_write_bytes, shared_read_bytes, shared_write_bytes : int
        Bytes of thread accesses; TMA and bulk copies are in ``tma_read_bytes`` and ``tma_write_bytes``.
    barriers, switches, blocks, threads : int
        Barriers completed, fiber switches, thread blocks and threads run.
    instructions : dict of str to int
        Executions of each kind, counted once a warp, warpgroup or issuing thread.
    output : str
        What the kernel printed.
    seconds : float
        Wall time of the run.
    """

    shared_loads: int = 0
    shared_stores: int = 0
    shared_wavefronts: int = 0
    bank_conflicts: int = 0
    global_loads: int = 0
    global_stores: int = 0
    global_sectors: int = 0
    global_sectors_ideal: int = 0
    global_read_bytes: int = 0
    global_write_bytes: int = 0
    shared_read_bytes: int = 0
    shared_write_bytes: int = 0
    tma_read_bytes: int = 0
    tma_write_bytes: int = 0
    barriers: int = 0
    switches: int = 0
    blocks: int = 0
    threads: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    output: str = ""
    seconds: float = 0.0

    @classmethod
    def from_counters(cls, values, kinds: str, output: str, seconds: float) -> SimulationReport:
        rows = (line.rsplit("\t", 1) for line in kinds.splitlines() if line)
        return cls(
            **dict(zip(_FIELDS, values, strict=True)),
            instructions={k: int(v) for k, v in rows},
            output=output,
            seconds=seconds,
        )

    def __repr__(self) -> str:
        lines = [
            f"SimulationReport: {self.blocks} blocks, {self.threads} threads, {self.seconds:.3f} s",
            f"  shared: {self.shared_loads} warp loads, {self.shared_stores} warp stores, "
            f"{self.shared_wavefronts} wavefronts, {self.bank_conflicts} bank conflicts",
            f"  global: {self.global_loads} warp loads, {self.global_stores} warp stores, "
            f"{self.global_sectors} sectors "
            f"(at least {self.global_sectors_ideal}), {self.global_read_bytes} B read, "
            f"{self.global_write_bytes} B written",
            f"  TMA and bulk: {self.tma_read_bytes} B read, {self.tma_write_bytes} B written; "
            f"barriers: {self.barriers}",
        ]
        lines += [f"  {count:>10}  {kind}" for kind, count in sorted(self.instructions.items())]
        return "\n".join(lines)
