"""What the language promises and the parser cannot see statement by statement.

Checked here: iterations of ``T.Parallel`` are independent, per-thread scratch does not leave the loop that wrote it,
every annotated block reads back.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import TensorLoad, Var

from ..errors import SourceLocation, TileSyntaxError, TileTypeError
from .kernels import kernels_of
from .ops import ParallelOp, tile_ops
from .races import check_independent, scratch_of
from .visit import walk

__all__ = ["verify"]

# What a call can pass to a function; Python has no narrow floats.
_SCALARS = {"bool", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


def verify(func: tirx.PrimFunc) -> None:
    """Check a function of tile IR.

    Parameters
    ----------
    func : PrimFunc
        Tile IR in normal form.

    Raises
    ------
    TileError
        Where iterations of T.Parallel depend on each other; for a scalar parameter that no call can pass.
    InternalError
        Where a block is not one that the language makes.
    """
    _check_scalars(func)
    for kernel in kernels_of(func):
        roots = _roots(kernel.block.body)
        scratch = []
        for op in tile_ops(kernel.block.body):
            if isinstance(op, ParallelOp) and op.axes:
                check_independent(op, roots)
                scratch += scratch_of(op)
        if scratch:
            _check_scratch_stays_inside(kernel, scratch)


def _check_scalars(func: tirx.PrimFunc) -> None:
    for param in func.params:
        if tirx.is_buffer_var(param):
            continue
        dtype = str(param.ty.dtype)
        if dtype in _SCALARS or dtype == "handle":
            continue
        raise TileTypeError(
            f"{param.name}: a scalar parameter cannot have dtype {dtype}",
            SourceLocation.from_span(func.span),
            f"declare {param.name}: T.float32 and cast it in the kernel: T.cast({param.name}, {dtype!r})",
        )


def _roots(body) -> dict[Var, Var]:
    """Alias (T.reshape, T.view) -> the buffer that owns the memory."""
    roots: dict[Var, Var] = {}

    def on_alias(alias):
        source = alias.data.args[0]
        roots[alias.buffer] = roots.get(source, source)

    walk(body, (tirx.DeclBuffer, on_alias))
    return roots


def _check_scratch_stays_inside(kernel, scratch) -> None:
    """What T.Parallel leaves in per-thread memory differs from thread to thread: nothing outside may read it."""
    inside: list = []
    for op in tile_ops(kernel.block.body):
        if isinstance(op, ParallelOp) and op.axes:
            walk(op.realize.block, (TensorLoad, inside.append))
    every: list[TensorLoad] = []
    walk(kernel.block.body, (TensorLoad, every.append))
    for load in every:
        for buffer, where in scratch:
            if load.source.same_as(buffer) and not any(load.same_as(other) for other in inside):
                raise TileSyntaxError(
                    f"{buffer.name} is per-thread memory that T.Parallel writes; its value differs from thread to "
                    f"thread and "
                    f"cannot be read as {load} outside of the loop",
                    where,
                    "use a fragment or a shared tile for results of T.Parallel",
                )
