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
from .context import active as _parsing
from .copy import clear, copy, fill
from .dtypes import infinity, isnan
from .entry import macro, prim_func
from .gemm import gemm
from .kernel import Kernel, annotate_layout, annotate_safe_value, assume, sync_threads, use_swizzle, ws
from .loops import Parallel, Persistent, Pipelined, grid, serial, unroll, vectorized
from .policy import GemmWarpPolicy
from .reduce import (
    all_of,
    any_of,
    cumsum,
    reduce_absmax,
    reduce_abssum,
    reduce_max,
    reduce_min,
    reduce_sum,
)

__all__ = [
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
    "grid",
    "infinity",
    "isnan",
    "macro",
    "prim_func",
    "print",
    "reduce_abssum",
    "reduce_absmax",
    "reduce_max",
    "reduce_min",
    "reduce_sum",
    "reshape",
    "serial",
    "sync_threads",
    "unroll",
    "use_swizzle",
    "vectorized",
    "view",
    "ws",
]


# What TensorIR has and a tile kernel has not: refused while one is parsed, because nothing after the parser expects it.
_NOT_IN_KERNELS = {
    "alloc_buffer": "use T.alloc_shared, T.alloc_fragment or T.alloc_local",
    "sblock_alloc_buffer": "use T.alloc_shared, T.alloc_fragment or T.alloc_local",
    "decl_buffer": "use T.reshape or T.view",
    "match_buffer": 'declare the parameter as A: T.Tensor((M, N), "float16")',
    "sblock": "tile primitives make their blocks themselves",
    "parallel": "use T.Parallel for element-wise work over the threads, T.serial for a loop in order",
    "thread_binding": "use T.Kernel for CTAs and T.Parallel for threads",
    "launch_thread": "use T.Kernel for CTAs and T.Parallel for threads",
    "env_thread": "use T.Kernel for CTAs and T.Parallel for threads",
    "tvm_storage_sync": "use T.sync_threads",
    "Assert": "use T.device_assert or T.assume",
    "While": "write a Python `while` statement",
    "If": "write a Python `if` statement",
    "attr": "use T.annotate_layout or T.annotate_safe_value",
    "evaluate": "call the primitive as a statement",
    "buffer_store": "write A[i, j] = value",
}


def __getattr__(name: str):
    if name == "MultiGPUStrategy":
        raise _TileSyntaxError(
            "T.MultiGPUStrategy is not available yet",
            advice="shard the tensors yourself and run the kernel on each GPU",
        )
    if name in _NOT_IN_KERNELS and _parsing() is not None:
        raise _TileSyntaxError(f"T.{name} is not possible in a tile kernel", advice=_NOT_IN_KERNELS[name])
    try:
        return getattr(_base, name)
    except AttributeError:
        near = _difflib.get_close_matches(name, __all__ + [n for n in dir(_base) if not n.startswith("_")], n=1)
        error = AttributeError(f"the tile language has no T.{name}")
        error.advice = f"did you mean T.{near[0]}?" if near else None
        raise error from None


def __dir__():
    return sorted(set(globals()) | set(dir(_base)))


# Last, because lowering builds on the language's IR: tvm.compile(..., tir_pipeline="tvm_tile") works from here on.
from ..runtime import pipeline as _pipeline  # noqa: E402, F401
