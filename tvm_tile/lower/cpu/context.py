"""State of one kernel while its code is written: storage of its buffers, scratch memory, what the prologue must do."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm import tirx
from tvm.ir import Var

from .builder import Builder, const_int, splat
from .convert import storage_dtype
from .storage import Storage, row_major
from .target import CpuFeatures


@dataclass
class KernelContext:
    """One kernel's buffers.

    Attributes
    ----------
    features : CpuFeatures
        What the target has.
    storages : dict
        Program buffer -> :class:`Storage`; tensors and on-chip buffers.
    prologue : Builder
        Allocations and clearing, written in front of the CTA's code.
    uses_amx : bool
        Whether tiles must be configured.
    """

    features: CpuFeatures
    storages: dict[Var, Storage]
    prologue: Builder = field(default_factory=Builder)
    uses_amx: bool = False
    _scratch: dict[str, Var] = field(default_factory=dict)

    def allocate(self, buffer: Var, panel=None, transposed: bool = False, bytewise: bool = False) -> Storage:
        """Memory for an on-chip buffer of the program."""
        shape = [int(e) for e in buffer.ty.shape]
        if panel is not None:
            flat = self._alloc(panel.count, panel.flat_dtype, buffer.name, zero=panel.ragged)
            storage = Storage(buffer, flat, [], panel=panel, transposed=transposed)
        else:
            count = 1
            for extent in shape:
                count *= extent
            dtype = storage_dtype(str(buffer.ty.dtype))
            if bytewise:
                count, dtype = count * (tirx.const(0, dtype).ty.dtype.bits // 8), "uint8"
            storage = Storage(buffer, self._alloc(count, dtype, buffer.name), row_major(shape), bytewise=bytewise)
        self.storages[buffer] = storage
        return storage

    def scratch(self, key: str, dtype: str, count: int, zero: bool = False) -> Var:
        """Scratch memory that one operation uses at a time; the same key gives the same memory.

        ``zero`` clears it once, when the CTA starts: the operation keeps the padding at zero by never writing it.
        """
        if key not in self._scratch:
            self._scratch[key] = self._alloc(count, dtype, "scratch", zero)
        return self._scratch[key]

    def scratch_storage(self, buffer: Var, key: str) -> Storage:
        """Scratch memory as a program buffer (for code that goes through the program's own statements)."""
        shape = [const_int(e) for e in buffer.ty.shape]
        count = 1
        for extent in shape:
            count *= extent
        dtype = storage_dtype(str(buffer.ty.dtype))
        storage = Storage(buffer, self.scratch(f"{key}_{dtype}", dtype, count), row_major(shape))
        self.storages[buffer] = storage
        return storage

    def alias(self, buffer: Var, base: Storage) -> Storage:
        """Another shape over the memory of ``base``; another element type goes through the bytes of both."""
        shape = [int(e) for e in buffer.ty.shape]
        storage = Storage(buffer, base.flat, row_major(shape), bytewise=base.bytewise)
        self.storages[buffer] = storage
        return storage

    def _alloc(self, count: int, dtype: str, name: str, zero: bool = False) -> Var:
        b = self.prologue
        flat = b.alloc(count, dtype, name)
        if zero:
            lanes = 64 // max(1, tirx.const(0, dtype).ty.dtype.bits // 8)
            with b.loop(count // lanes, "z") as i:
                b.vstore(flat, splat(0, dtype, lanes), i * lanes, lanes)
            for i in range(count // lanes * lanes, count):
                b.store(flat, tirx.const(0, dtype), i)
        return flat
