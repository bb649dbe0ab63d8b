"""Tile IR -> thread-level TIR for NVIDIA GPUs: realises the decisions of :mod:`tvm_tile.schedule`, decides nothing.

Order of work, one file each: ``program`` (the body as a tree), ``pipeline`` (copies issued ahead), ``ops`` and
``gemm`` (operations as steps), ``memory`` (the shared pool), ``sync`` (barriers), ``kernel`` (code).
"""

from __future__ import annotations

from tvm import tirx

__all__ = ["lower_cuda"]


def lower_cuda(func: tirx.PrimFunc, target) -> tirx.PrimFunc:
    """Realise a tile function on a CUDA target.

    Parameters
    ----------
    func : PrimFunc
        Tile IR, annotated or not: rules decide what no annotation fixes.
    target : tvm.target.Target
        A ``cuda`` target.

    Returns
    -------
    PrimFunc
        Thread-level TIR, ready for the lean pipeline.

    Raises
    ------
    TileError
        For what the target cannot honour.
    """
    from ... import hardware
    from ...errors import TileResourceError
    from ...ir import kernels_of
    from ...ir.visit import walk
    from ...schedule import decide
    from ...schedule.analysis import kernel_views
    from .build import seq
    from .convert import printable
    from .kernel import lower_kernel

    hw = hardware.gpu_of_target(
        str(target.attrs["arch"]), int(target.attrs.get("max_shared_memory_per_block", 0) or 0)
    )
    source = func
    func = decide(source, hw)
    try:
        bodies = [lower_kernel(info, hw, func) for info in kernels_of(func)]
    except TileResourceError as error:
        split = any(view.split for view in kernel_views(func))
        if not split or any(view.split for view in kernel_views(source)):
            raise
        # scratch that only the code's steps know of: two roles side by side have no room for it
        func = decide(source, hw, whole=f"tried, but {error.message.splitlines()[0]}")
        bodies = [lower_kernel(info, hw, func) for info in kernels_of(func)]
    bodies = [printable(body) for body in bodies]
    asserts: list = []
    walk(func.body, (tirx.AssertStmt, asserts.append))
    attrs = {k: v for k, v in func.attrs.items() if k != "s_tir"} if func.attrs is not None else {}
    made = tirx.PrimFunc(func.params, seq([*asserts, *bodies]), func.ret_type)
    for key, value in attrs.items():
        made = made.with_attr(key, value)
    return made
