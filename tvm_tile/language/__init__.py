"""The tile language: ``import tvm_tile.language as T``.

Everything of ``tvm.script.tirx`` remains available under ``T``; the primitives below add tiles to it.
"""

from __future__ import annotations

import difflib as _difflib

import tvm.script.tirx as _base

from ..errors import TileSyntaxError as _TileSyntaxError
from .alloc import (
    StridedTensor,
    Tensor,
    alloc_fragment,
    alloc_local,
    alloc_shared,
    alloc_var,
    dynamic,
    reshape,
    view,
)
from .atomic import atomic_add, atomic_max, atomic_min, device_assert
from .atomic import print_ as print  # noqa: A004  (the language's own name)
from .copy import clear, copy, fill
from .dtypes import infinity
from .entry import macro, prim_func
from .gemm import gemm
from .kernel import Kernel, annotate_layout, annotate_safe_value, assume, sync_threads, use_swizzle, ws
from .loops import Parallel, Persistent, Pipelined
from .policy import GemmWarpPolicy
from .reduce import (
    all_of,
    any_of,
    cumsum,
    reduce_abssum,
    reduce_absmax,
    reduce_max,
    reduce_min,
    reduce_sum,
)

_PRIMITIVES = [
    "GemmWarpPolicy",
    "Kernel",
    "Parallel",
    "Persistent",
    "Pipelined",
    "StridedTensor",
    "Tensor",
    "all_of",
    "alloc_fragment",
    "alloc_local",
    "alloc_shared",
    "alloc_var",
    "annotate_layout",
    "annotate_safe_value",
    "any_of",
    "assume",
    "atomic_add",
    "atomic_max",
    "atomic_min",
    "clear",
    "copy",
    "cumsum",
    "device_assert",
    "dynamic",
    "fill",
    "gemm",
    "infinity",
    "macro",
    "prim_func",
    "print",
    "reduce_abssum",
    "reduce_absmax",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "reshape",
    "sync_threads",
    "use_swizzle",
    "view",
    "ws",
]

__all__ = list(_PRIMITIVES)


def __getattr__(name: str):
    if name == "MultiGPUStrategy":
        raise _TileSyntaxError(
            "T.MultiGPUStrategy is not available yet", advice="shard the tensors yourself and run the kernel on each GPU"
        )
    try:
        return getattr(_base, name)
    except AttributeError:
        near = _difflib.get_close_matches(name, _PRIMITIVES + [n for n in dir(_base) if not n.startswith("_")], n=1)
        error = AttributeError(f"the tile language has no T.{name}")
        error.advice = f"did you mean T.{near[0]}?" if near else None
        raise error from None


def __dir__():
    return sorted(set(globals()) | set(dir(_base)))
