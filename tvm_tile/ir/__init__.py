"""Tile IR: plain TensorIR whose annotated SBlocks are tile operations.

Each operation is one loop nest around one SBlock annotated ``tile.op``; its serial execution is its meaning. The
functions here read the blocks back as dataclasses (:mod:`tvm_tile.ir.ops`), guard out-of-bounds accesses
(:mod:`tvm_tile.ir.bounds`), bring parsed functions to normal form (:mod:`tvm_tile.ir.normalize`) and check what the
language promises (:mod:`tvm_tile.ir.verify`).
"""

from __future__ import annotations

from .kernels import KernelInfo, is_tile_function, kernels_of
from .ops import (
    AssertOp,
    Axis,
    CopyOp,
    CumsumOp,
    FillOp,
    GemmOp,
    ParallelOp,
    PrintOp,
    ReduceOp,
    Region,
    SyncOp,
    TileOp,
    read_op,
    tile_ops,
)
from .verify import verify

__all__ = [
    "AssertOp",
    "Axis",
    "CopyOp",
    "CumsumOp",
    "FillOp",
    "GemmOp",
    "KernelInfo",
    "ParallelOp",
    "PrintOp",
    "ReduceOp",
    "Region",
    "SyncOp",
    "TileOp",
    "is_tile_function",
    "kernels_of",
    "read_op",
    "tile_ops",
    "verify",
]
