"""What the code generator may use on a target: vector registers and matrix units, read from the target's features."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm.target import codegen

from .amx import request_permission
from .fma import VectorUnit


@dataclass(frozen=True)
class CpuFeatures:
    """Vector unit and AMX units of an LLVM target.

    ``amx_bf16`` and ``amx_int8`` say that the target has the instructions; kernels that use them ask the operating
    system for permission when they start.
    """

    vector: VectorUnit
    amx_bf16: bool = False
    amx_int8: bool = False


def features_of(target: tvm.target.Target) -> CpuFeatures:
    """Read the features of an LLVM target (its CPU name and its explicit attributes)."""
    triple = str(target.attrs.get("mtriple", "")) or str(codegen.llvm_get_system_triple())

    def has(name: str) -> bool:
        return bool(codegen.target_has_features(name, target))

    if triple.startswith(("aarch64", "arm64")):
        return CpuFeatures(VectorUnit(128, 32))
    if not triple.startswith(("x86_64", "i686", "i386")):
        return CpuFeatures(VectorUnit(128, 16))
    tile = has("amx-tile") and "linux" in triple and request_permission()
    amx = (tile and has("amx-bf16"), tile and has("amx-int8"))
    if has("avx512f") and has("avx512bw") and has("avx512vl"):
        return CpuFeatures(VectorUnit(512, 32), *amx)
    if has("avx"):
        return CpuFeatures(VectorUnit(256, 16), *amx)
    return CpuFeatures(VectorUnit(128, 16), *amx)
