"""NVIDIA Ampere A100 class, compute capability 8.0.

Source: NVIDIA A100 architecture whitepaper and data sheet (SXM4 80 GB), CUDA programming guide, "Compute Capabilities".
"""

from __future__ import annotations

from types import MappingProxyType

from .base import GPU, frozen_map

SM_80 = GPU(
    name="sm_80",
    sm=80,
    arch="sm_80",
    sms=108,
    clock_hz=1.41e9,
    shared_per_block=166912,  # 163 KB
    shared_per_sm=167936,  # 164 KB
    registers_per_sm=65536,
    registers_per_thread=255,
    registers_per_block=65536,
    threads_per_block=1024,
    threads_per_sm=2048,
    blocks_per_sm=32,
    memory_bytes=80 * 2**30,
    memory_bandwidth=2.039e12,
    l2_bytes=40 * 2**20,
    fp32_flops=19.5e12,
    tensor_flops=frozen_map(float16=312e12, bfloat16=312e12, tf32=156e12, int8=624e12, uint8=624e12),
    features=frozenset({"mma", "ldmatrix", "cp_async", "mbarrier", "redux"}),
    operand_dtypes=MappingProxyType({"mma": ("float16", "bfloat16", "tf32", "int8", "uint8")}),
)
