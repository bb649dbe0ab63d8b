"""The simulator for tile functions: the same source and the same call as a compiled kernel, without a GPU."""

from __future__ import annotations

import tvm
from tvm import tirx

from ..errors import TileTypeError
from ..lower import is_tile_function
from .kernel import SimulatedKernel

__all__ = ["simulate"]


def simulate(
    func: tirx.PrimFunc | tvm.IRModule,
    target="sm_90",
    *,
    seed: int = 0,
    checks: bool = True,
    strict_warp: bool = False,
    timeout: float = 300.0,
) -> SimulatedKernel:
    """Compile a tile function for a GPU and run it on the CPU, checked; call the result like ``compile(...)``'s.

    The function goes through the pipeline that :func:`tvm_tile.compile` uses, host code included; only nvcc and the
    driver are replaced.

    Parameters
    ----------
    func : PrimFunc or IRModule
        A function of the language, or a module of such functions (name one at the call with ``entry=``).
    target : str or tvm.target.Target
        ``"sm_80"``, ``"sm_90"`` or a CUDA Target.
    seed, checks, strict_warp, timeout
        As in :func:`tvm_tile.simulate.simulate_module`.

    Returns
    -------
    SimulatedKernel
        ``kernel(a, b, c)`` takes torch, NumPy or DLPack tensors on the CPU, writes outputs in place and returns a
        :class:`SimulationReport`.

    Raises
    ------
    TileError
        What the compiler refuses; TileTypeError for a function that is not of the language.
    UnsupportedInstructionError
        For CUDA code that the simulator does not implement.
    ToolchainError
        Where there is no g++.

    Examples
    --------
    >>> import torch, tvm_tile
    >>> a, b, c = torch.randn(20, 40).half(), torch.randn(30, 40).half(), torch.empty(20, 30).half()
    >>> kernel = tvm_tile.simulate.simulate(tvm_tile.ops.gemm(20, 30, 40, block_M=32, block_N=32), "sm_80")
    >>> report = kernel(a, b, c)
    >>> torch.allclose(c.float(), a.float() @ b.float().T, atol=1e-2, rtol=1e-2)
    True
    >>> report.blocks
    1
    """
    from ..runtime.pipeline import NAME
    from ..runtime.targets import target as resolve

    if isinstance(func, tirx.PrimFunc):
        named = func.attrs is not None and "global_symbol" in func.attrs
        func = tvm.IRModule({str(func.attrs["global_symbol"]) if named else "main": func})
    if not isinstance(func, tvm.IRModule):
        raise TileTypeError(
            f"simulate takes a tile function or a module of them, not {type(func).__name__}",
            advice="call the factory first: simulate(factory(...)); or decorate the function with @T.prim_func",
        )
    for gvar, one in func.functions.items():
        if not (isinstance(one, tirx.PrimFunc) and is_tile_function(one)):
            raise TileTypeError(
                f"{gvar.name_hint} is not a tile function",
                advice="simulate_module takes thread-level functions, compile everything else",
            )
    module = tvm.IRModule(
        {gvar.name_hint: one.with_attr("global_symbol", gvar.name_hint) for gvar, one in func.functions.items()}
    )
    return SimulatedKernel(
        module, resolve(target), seed=seed, checks=checks, strict_warp=strict_warp, pipeline=NAME, timeout=timeout
    )
