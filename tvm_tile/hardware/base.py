"""Hardware descriptions: plain numbers and capabilities, no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


def frozen_map(**items: float) -> Mapping[str, float]:
    """Read-only mapping."""
    return MappingProxyType(dict(items))


@dataclass(frozen=True)
class GPU:
    """A CUDA GPU class. Rates are dense peaks at `clock_hz`; sizes in bytes.

    Attributes
    ----------
    sm : int
        Compute capability, 80 for 8.0.
    arch : str
        What nvcc is asked for (``sm_90a`` where arch-specific instructions are used).
    tensor_flops : mapping
        Operand dtype (``tf32`` for rounded float32) -> multiply-adds times 2 a second on the tensor cores.
    features : frozenset of str
        Instructions that exist: ``mma``, ``wgmma``, ``ldmatrix``, ``stmatrix``, ``cp_async``, ``tma``, ``mbarrier``,
        ``setmaxnreg``, ``cluster``, ``redux``.
    operand_dtypes : mapping
        Instruction family -> operand dtypes it multiplies.
    """

    name: str
    sm: int
    arch: str
    sms: int
    clock_hz: float
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    registers_per_thread: int
    registers_per_block: int
    threads_per_block: int
    threads_per_sm: int
    blocks_per_sm: int
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    fp32_flops: float
    tensor_flops: Mapping[str, float]
    features: frozenset[str]
    operand_dtypes: Mapping[str, tuple[str, ...]]
    warp_size: int = 32
    #: Shared memory that the system takes from each resident block.
    shared_reserved_per_block: int = 1024
    shared_allocation: int = 128
    register_allocation: int = 256
    #: SM sub-partitions, each with its share of warps and registers.
    partitions: int = 4
    shared_bytes_per_clock: int = 128
    #: exp2, log2, rcp, ... a clock and SM.
    special_per_clock: int = 16
    shared_banks: int = 32
    kind: str = field(default="cuda", init=False)

    @property
    def warps_per_sm(self) -> int:
        """Resident warps an SM."""
        return self.threads_per_sm // self.warp_size

    @property
    def shared_bandwidth(self) -> float:
        """Bytes a second of all SMs' shared memory."""
        return self.shared_bytes_per_clock * self.sms * self.clock_hz

    def supports(self, feature: str) -> bool:
        """Whether an instruction family exists here."""
        return feature in self.features

    def supports_dtype(self, family: str, dtype: str) -> bool:
        """Whether a tensor-core family multiplies operands of a dtype here."""
        return dtype in self.operand_dtypes.get(family, ())


@dataclass(frozen=True)
class CPU:
    """A CPU as far as it can be found out; what is unknown is None.

    Attributes
    ----------
    vector_bits : int
        Widest vector registers in use (64 where none are known).
    cores : int
        Cores this process may run on.
    l1_bytes, l2_bytes, l3_bytes : int or None
        Data or unified caches seen by one core.
    features : frozenset of str
        Flags of the operating system, lower case (``avx512f``, ``amx_tile``, ``asimd``, ...).
    """

    name: str
    machine: str
    vector_bits: int
    cores: int
    l1_bytes: int | None
    l2_bytes: int | None
    l3_bytes: int | None
    features: frozenset[str]
    kind: str = field(default="llvm", init=False)

    def supports(self, feature: str) -> bool:
        """Whether a CPU flag is set."""
        return feature in self.features

    @property
    def amx_bf16(self) -> bool:
        """The CPU has AMX tiles with bfloat16 products (the process still has to ask the kernel for them)."""
        return {"amx_tile", "amx_bf16"} <= self.features

    @property
    def amx_int8(self) -> bool:
        """The CPU has AMX tiles with 8-bit integer products."""
        return {"amx_tile", "amx_int8"} <= self.features
