"""Buffers that a rewriting adds to a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.ir import Var
from tvm.s_tir import SBlockRealize

from ..ir.normalize import rebuild_block

__all__ = ["new_buffer", "with_buffers"]


def new_buffer(shape: Sequence[int], dtype: str, name: str, scope: str, taken: set[str]) -> Var:
    """A buffer of a name that no other has.

    Parameters
    ----------
    shape, dtype, scope
        Of the buffer.
    name : str
        What it is called, with a number behind it where that is taken.
    taken : set of str
        Names in use; the new one is added.
    """
    number, unique = 1, name
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return tirx.decl_buffer(tuple(shape), dtype, unique, scope=scope, layout=None)


def with_buffers(realize: SBlockRealize, buffers: Sequence[Var], unused: Var | None = None) -> SBlockRealize:
    """A kernel block that allocates more buffers, and ``unused`` no more."""
    old = [b for b in realize.block.alloc_buffers if unused is None or not b.same_as(unused)]
    block = rebuild_block(realize.block, alloc_buffers=[*old, *buffers])
    return SBlockRealize(realize.iter_values, realize.predicate, block, realize.span)
