"""NVIDIA Hopper class, compute capability 9.0: H100 SXM5, and H200 (the same chip with faster, larger memory).

Source: NVIDIA H100 architecture whitepaper, H100 and H200 data sheets (dense rates), CUDA programming guide.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from .base import GPU, frozen_map

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_DTYPES = ("float16", "bfloat16", "tf32", "int8", "uint8", *_FP8)

H100 = GPU(
    name="h100",
    sm=90,
    arch="sm_90a",
    sms=132,
    clock_hz=1.83e9,
    shared_per_block=232448,  # 227 KB
    shared_per_sm=233472,  # 228 KB
    registers_per_sm=65536,
    registers_per_thread=255,
    registers_per_block=65536,
    threads_per_block=1024,
    threads_per_sm=2048,
    blocks_per_sm=32,
    memory_bytes=80 * 2**30,
    memory_bandwidth=3.35e12,
    l2_bytes=50 * 2**20,
    fp32_flops=67e12,
    tensor_flops=frozen_map(float16=989e12, bfloat16=989e12, tf32=494e12, int8=1979e12, uint8=1979e12,
                            float8_e4m3fn=1979e12, float8_e5m2=1979e12),
    features=frozenset({"mma", "wgmma", "ldmatrix", "stmatrix", "cp_async", "tma", "mbarrier", "setmaxnreg", "cluster",
                        "redux"}),
    operand_dtypes=MappingProxyType({"mma": _DTYPES, "wgmma": _DTYPES}),
)

H200 = replace(H100, name="h200", memory_bytes=141 * 10**9, memory_bandwidth=4.8e12)

SM_90 = replace(H200, name="sm_90")
"""The class by its capability name: an H200's figures. H100 differs in memory only."""
