"""Tile IR -> plain TIR for one target. The targets' lowerings live in sub-packages and are imported when used."""

from __future__ import annotations

import importlib

from ..errors import TileTargetError

__all__ = ["LOWERINGS", "is_tile_function", "lower"]

LOWERINGS = ("optimised", "reference")


def is_tile_function(func) -> bool:
    """Whether the PrimFunc is tile IR: it has an SBlock annotated ``tile.kernel``."""
    from ..ir import is_tile_function as answer

    return answer(func)


def _load(module: str, function: str, what: str):
    try:
        loaded = importlib.import_module(module, __name__)
        return getattr(loaded, function)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name or "").startswith(__package__):
            raise
        raise TileTargetError(f"this version of tvm_tile has no lowering for {what}") from None


def lower(func, target, lowering: str = "optimised"):
    """Realise a tile function on a target.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        Tile IR.
    target : tvm.target.Target
        ``llvm`` or ``cuda``.
    lowering : str
        ``"optimised"``, or ``"reference"``: the serial meaning of the tile IR, without any optimisation, on a CPU. It
        is the oracle that every other path is tested against.

    Returns
    -------
    tvm.tirx.PrimFunc
        Plain TIR with thread bindings on a GPU; no SBlock is left.

    Raises
    ------
    TileTargetError
        A lowering or target that does not exist.
    """
    kind = target.kind.name
    if lowering not in LOWERINGS:
        raise TileTargetError(f"unknown lowering {lowering!r}", advice=f"the lowerings are {', '.join(LOWERINGS)}")
    if kind == "llvm":
        # decide() does it for GPUs: a layout that no instruction can read is refused on every target
        from ..schedule import check_layouts

        check_layouts(func)
    if lowering == "reference":
        if kind != "llvm":
            raise TileTargetError(
                f"the reference lowering runs on a CPU, and the target is {kind}", advice="use target='llvm' with it"
            )
        return _load(".cpu", "lower_reference", "the CPU")(func)
    if kind == "llvm":
        return _load(".cpu", "lower_cpu", "the CPU")(func, target)
    if kind == "cuda":
        return _load(".cuda", "lower_cuda", "CUDA GPUs")(func, target)
    raise TileTargetError(f"tile kernels compile for llvm and cuda, not for {kind!r}")
