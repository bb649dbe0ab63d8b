"""Registers, spills, shared memory and occupancy of a compiled kernel."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

__all__ = ["KernelResources", "Resources"]


@dataclass(frozen=True)
class KernelResources:
    """One CUDA kernel: registers a thread, spilled bytes a thread, shared bytes a block, threads a block."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    occupancy: float | None = None


@dataclass(frozen=True)
class Resources:
    """What a compiled function takes of its machine; the maximum over its CUDA kernels.

    Parameters
    ----------
    target : str
        ``"sm_90a"``, ``"llvm"`` and the like.
    registers : int or None
        Registers a thread; None on a CPU.
    spill_bytes : int or None
        Bytes a thread that the compiler spilled to local memory (stores plus loads); None on a CPU.
    shared_bytes : int or None
        Shared memory a block, static plus dynamic, in bytes; None on a CPU.
    threads : int
        Threads a block; on a CPU the worker threads.
    occupancy : float or None
        Share of an SM's thread slots that resident blocks fill (0 to 1), the least over the kernels.
    kernels : list of KernelResources
        Each CUDA kernel by itself.
    warnings : list of str
        The compiler's own warnings (spills, serialised instructions, ignored directives).
    """

    target: str
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    threads: int = 0
    occupancy: float | None = None
    kernels: list[KernelResources] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of_kernels(cls, target: str, kernels: list[KernelResources], warnings: list[str]) -> Resources:
        """The summary of a function's kernels."""
        occupancies = [k.occupancy for k in kernels if k.occupancy is not None]
        return cls(
            target,
            max((k.registers for k in kernels), default=0),
            max((k.spill_bytes for k in kernels), default=0),
            max((k.shared_bytes for k in kernels), default=0),
            max((k.threads for k in kernels), default=0),
            min(occupancies) if occupancies else None,
            kernels,
            warnings,
        )

    def to_json(self) -> dict:
        """A JSON-able dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Resources:
        """The inverse of :meth:`to_json`."""
        data = dict(data)
        data["kernels"] = [KernelResources(**k) for k in data.get("kernels", [])]
        return cls(**data)

    def __str__(self) -> str:
        if self.registers is None:
            return f"{self.target}: {self.threads} worker threads (registers and shared memory are a GPU's)"
        lines = []
        for k in self.kernels:
            occupancy = "" if k.occupancy is None else f", occupancy {k.occupancy:.0%}"
            spills = f"{k.spill_bytes} bytes spilled" if k.spill_bytes else "no spills"
            lines.append(
                f"{k.name} on {self.target}: {k.threads} threads, {k.registers} registers a thread, {spills}, "
                f"{k.shared_bytes} bytes of shared memory a block{occupancy}"
            )
        return "\n".join(lines + [f"warning: {w}" for w in self.warnings])
