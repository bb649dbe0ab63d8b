"""What base alignment the vector accesses of each tensor rely on: function attribute ``tile.alignment``."""

from __future__ import annotations

import tvm_ffi

from .analysis import GLOBAL
from .decisions import read_ring_loads, read_vector
from .rule import Decision, NotApplicable, Rule, TileSchedule

__all__ = ["alignment"]

#: Bytes that the base of a tensor with a tensor map is aligned to.
TENSOR_MAP = 16


def _apply(sch: TileSchedule, hw):
    needed: dict[str, int] = {}
    for _, site in sch.sites():
        vector = read_vector(site.op.annotations)
        last = len(site.op.axes) - 1
        for access in site.of(GLOBAL):
            moved = any(t is not None and t.axis == last for t in access.terms[-1:])
            if vector > 1 and moved:
                size = tvm_ffi.dtype(str(access.buffer.ty.dtype)).itemsize
                needed[access.buffer.name] = max(needed.get(access.buffer.name, 0), vector * size)
    for kernel in sch.kernels:
        mapped = read_ring_loads(kernel.info.block)
        for site in kernel.sites:
            if site.name in mapped:
                name = site.op.src.buffer.name
                needed[name] = max(needed.get(name, 0), TENSOR_MAP)
    sch.set_attribute("tile.alignment", needed)
    if not needed:
        return NotApplicable("no vector accesses to tensors")
    text = ", ".join(f"{name} {size} bytes" for name, size in sorted(needed.items()))
    return Decision("", "alignment", text, "the widest vector access of each tensor; checked at the call")


alignment = Rule("alignment", _apply)
