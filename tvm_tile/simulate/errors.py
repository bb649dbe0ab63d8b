"""What the simulator reports, one exception class for each kind of fault."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_tile.errors import TileError

__all__ = [
    "BarrierProtocolError",
    "DataRaceError",
    "DeadlockError",
    "DivergentBarrierError",
    "FaultSite",
    "KernelTrapError",
    "LaunchLimitError",
    "MisalignedAccessError",
    "OutOfBoundsError",
    "PendingAsyncError",
    "ProxyFenceError",
    "RegisterHazardError",
    "SimulationError",
    "UninitializedReadError",
    "UnsupportedInstructionError",
]


@dataclass(frozen=True)
class FaultSite:
    """A place in the generated CUDA source: what happened there, its line (0: unknown) and the line's text."""

    role: str
    line: int
    text: str

    def __str__(self) -> str:
        if not self.line:
            return f"  {self.role}: an unknown line"
        return f"  {self.role}: line {self.line}: {self.text}"


class SimulationError(TileError):
    """A fault of the kernel that the simulator has found.

    Attributes
    ----------
    sites : tuple of FaultSite
        The accesses or waits that are at fault, the one that was caught first.
    kernel : str
        Name of the kernel function.
    """

    def __init__(self, message: str, sites: tuple[FaultSite, ...] = (), kernel: str = ""):
        self.sites = tuple(sites)
        self.kernel = kernel
        text = "\n".join([message, *map(str, self.sites)])
        super().__init__(f"{kernel}: {text}" if kernel else text)

    @property
    def line(self) -> int:
        """Line of the generated source where the fault was caught; 0 when it is not known."""
        return self.sites[0].line if self.sites else 0


class DataRaceError(SimulationError):
    """Two accesses to one location, one of them a write, that nothing orders."""


class ProxyFenceError(SimulationError):
    """An ordinary write that TMA, a bulk copy or wgmma uses with no ``fence.proxy.async`` between."""


class UninitializedReadError(SimulationError):
    """A read of shared, local or global memory that was never written."""


class OutOfBoundsError(SimulationError):
    """An access outside the block's shared memory or outside every tensor."""


class MisalignedAccessError(SimulationError):
    """A vector, matrix or bulk access at an address that is not a multiple of what it needs."""


class DeadlockError(SimulationError):
    """Every thread is blocked and nothing in flight can wake one."""


class DivergentBarrierError(SimulationError):
    """A barrier or warp/warpgroup collective that some of its threads never reach."""


class BarrierProtocolError(SimulationError):
    """A barrier used against its rules: too many arrivals, byte counts that do not agree, no initialisation."""


class RegisterHazardError(SimulationError):
    """wgmma registers touched while an operation is in flight, or without ``wgmma.fence``."""


class PendingAsyncError(SimulationError):
    """A thread leaves the kernel while an asynchronous store may still read its shared memory."""


class KernelTrapError(SimulationError):
    """A trap or a failed device assertion."""


class LaunchLimitError(SimulationError):
    """A launch or tensor map that the device would refuse."""


class UnsupportedInstructionError(SimulationError):
    """An instruction or helper that the simulator does not implement."""


BY_KIND = {
    "race": DataRaceError,
    "proxy": ProxyFenceError,
    "uninitialized": UninitializedReadError,
    "bounds": OutOfBoundsError,
    "misaligned": MisalignedAccessError,
    "deadlock": DeadlockError,
    "divergent": DivergentBarrierError,
    "barrier": BarrierProtocolError,
    "register": RegisterHazardError,
    "pending": PendingAsyncError,
    "trap": KernelTrapError,
    "launch": LaunchLimitError,
    "unsupported": UnsupportedInstructionError,
}
