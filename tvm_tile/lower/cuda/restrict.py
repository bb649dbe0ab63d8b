"""Which kernels may promise that nobody else touches their tensors (``__restrict__``).

The promise lets nvcc keep a value in a register across a barrier. Where threads of a CTA exchange values through a
global tensor, a thread would then never see what another one has written.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad
from tvm.tirx import AttrStmt, BufferStore, is_buffer_var

from ...ir import KernelInfo
from ...ir.visit import walk
from .build import const

__all__ = ["mark_exchange", "restrict_pointers"]

_MARK = "tvm_tile.exchange"
_NOALIAS = "tirx.noalias"


def mark_exchange(info: KernelInfo, code):
    """Device code, marked where its kernel loads from a global tensor that it also stores to."""
    return AttrStmt(const(0), _MARK, const(1), code) if _exchanges(info.block.body) else code


def restrict_pointers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of the split module; a marked kernel loses the promise."""
    found: list = []
    walk(func.body, (AttrStmt, lambda node: found.append(node) if str(node.attr_key) == _MARK else None))
    return func.without_attr(_NOALIAS) if found and _NOALIAS in func.attrs else func


def _exchanges(body) -> bool:
    loaded, stored = set(), set()
    walk(
        body,
        (TensorLoad, lambda load: loaded.add(load.source)),
        (BufferStore, lambda store: stored.add(store.buffer)),
    )
    return any(is_buffer_var(b) and str(b.ty.storage_scope) == "global" for b in loaded & stored)
