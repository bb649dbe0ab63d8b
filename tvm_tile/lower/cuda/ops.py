"""Which lowering realises which tile operation."""

from __future__ import annotations

from ...errors import InternalError
from ...ir.ops import AssertOp, CopyOp, CumsumOp, FillOp, ParallelOp, PrintOp, ReduceOp
from .copy import lower_copy
from .elementwise import lower_elementwise, lower_fill
from .program import OpNode
from .reduce import lower_reduce
from .scan import lower_cumsum
from .storage import Storage

__all__ = ["lower_op"]

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
