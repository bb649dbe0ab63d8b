"""Which lowering realises which tile operation."""

from __future__ import annotations

from tvm import tirx

from ...errors import InternalError
from ...ir.ops import AssertOp, CopyOp, CumsumOp, FillOp, ParallelOp, PrintOp, ReduceOp
from .copy import lower_copy
from .elementwise import has_atomic, lower_elementwise, lower_fill, uniform_atomic
from .program import OpNode, RawNode
from .reduce import lower_reduce
from .scan import lower_cumsum
from .storage import Storage

__all__ = ["lower_op", "lower_raw"]

_LOWERINGS = {
    CopyOp: lower_copy,
    FillOp: lower_fill,
    ParallelOp: lower_elementwise,
    PrintOp: lower_elementwise,
    AssertOp: lower_elementwise,
    ReduceOp: lower_reduce,
    CumsumOp: lower_cumsum,
}


def lower_op(storage: Storage, node: OpNode, hw) -> list:
    """Steps (:class:`MicroNode`, and commits and waits of asynchronous copies) of any operation but a product.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : OpNode
        The operation with its decisions.
    hw : GPU
        The target machine.
    """
    lowering = _LOWERINGS.get(type(node.op))
    if lowering is None:
        raise InternalError(f"no CUDA lowering for {type(node.op).__name__} {node.op.name}", node.op.location)
    return lowering(storage, node, hw)


def lower_raw(storage: Storage, node: RawNode, hw) -> list:
    """Steps of a uniform statement: itself, unless it takes the previous value of an atomic update.

    Every thread runs a uniform statement, but an update happens once a CTA.

    Parameters
    ----------
    storage : Storage
        The kernel's storage.
    node : RawNode
        The statement.
    hw : GPU
        The target machine.
    """
    if isinstance(node.stmt, tirx.Bind) and has_atomic(node.stmt.value):
        return uniform_atomic(storage, node.stmt, hw)
    return [node]
