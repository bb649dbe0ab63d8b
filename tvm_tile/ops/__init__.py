"""The kernel library, written in the tile language: factories that return PrimFuncs, and their catalogue.

>>> import tvm_tile
>>> func = tvm_tile.ops.gemm(64, 64, 64, dtype="float32")
>>> [p.name for p in func.params]
['A', 'B', 'C']
>>> tvm_tile.ops.registry.get("gemm").dtypes[0]
'float16'
"""

from . import registry
from .dequant_gemm import dequant_gemm
from .flash_attention import flash_attention
from .flash_mla import flash_mla
from .gemm import gemm
from .grouped_gemm import grouped_gemm
from .normalize import rmsnorm, softmax

__all__ = [
    "dequant_gemm",
    "flash_attention",
    "flash_mla",
    "gemm",
    "grouped_gemm",
    "registry",
    "rmsnorm",
    "softmax",
]
