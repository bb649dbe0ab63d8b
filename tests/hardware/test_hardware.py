"""Hardware descriptions, CPU detection, occupancy."""

import dataclasses

import pytest

from tvm_tile.hardware import CPU, GPU, SM_80, SM_90, lookup, names, occupancy, this_cpu
from tvm_tile.hardware.cpu import detect, parse_cpuinfo, parse_size, vector_bits
from tvm_tile.layout import MMA, WGMMA, supported


def test_capacities():
    assert SM_80.shared_per_block == 163 * 1024 and SM_90.shared_per_block == 227 * 1024 == 232448
    for gpu in (SM_80, SM_90):
        assert gpu.shared_per_sm == gpu.shared_per_block + gpu.shared_reserved_per_block
        assert gpu.warps_per_sm == 64
        with pytest.raises(dataclasses.FrozenInstanceError):
            gpu.sms = 1
        with pytest.raises(TypeError):
            gpu.tensor_flops["float16"] = 0
    assert SM_90.shared_bandwidth == 128 * 132 * 1.83e9


def test_capabilities_agree_with_the_instruction_tables():
    """One truth: operand dtypes here are those that layout's instructions have on the class."""
    for gpu in (SM_80, SM_90):
        for family in (MMA, WGMMA):
            table = {d for i in supported(family, gpu.sm) for d in (i.a_dtype, i.b_dtype)}
            assert table == set(gpu.operand_dtypes.get(family, ()))
            assert gpu.supports(family) == bool(table)
            assert table <= set(gpu.tensor_flops)
    assert not SM_80.supports_dtype("mma", "float8_e4m3fn") and SM_90.supports_dtype("wgmma", "float8_e4m3fn")
    assert SM_90.supports("tma") and not SM_80.supports("stmatrix") and SM_80.supports("cp_async")


def test_lookup():
    assert lookup("SM_90") is SM_90 and lookup("sm_90a") is SM_90 and lookup("a100") is SM_80
    assert lookup("h100").memory_bandwidth < lookup("h200").memory_bandwidth
    assert isinstance(lookup("llvm"), CPU) and lookup("cpu") is this_cpu()
    assert all(isinstance(lookup(n), (GPU, CPU)) for n in names())
    with pytest.raises(KeyError, match="sm_100.*known are sm_80"):
        lookup("sm_100")


@pytest.mark.parametrize("gpu, threads, registers, shared, blocks, limiter", [
    # Values of NVIDIA's occupancy calculator.
    (SM_80, 256, 32, 0, 8, "threads"),
    (SM_80, 256, 64, 0, 4, "registers"),
    (SM_80, 256, 128, 0, 2, "registers"),
    (SM_80, 128, 255, 0, 2, "registers"),
    (SM_80, 128, 32, 48 * 1024, 3, "shared"),
    (SM_80, 128, 32, 166912, 1, "shared"),
    (SM_80, 32, 16, 0, 32, "blocks"),
    (SM_90, 384, 168, 232448, 1, "registers"),
    (SM_90, 128, 168, 100 * 1024, 2, "shared"),
    (SM_90, 1024, 64, 0, 1, "registers"),
    (SM_90, 1024, 65, 0, 0, "registers"),
    (SM_90, 1025, 16, 0, 0, "threads"),
    (SM_90, 128, 256, 0, 0, "registers"),
    (SM_90, 128, 32, 232449, 0, "shared"),
])
def test_occupancy(gpu, threads, registers, shared, blocks, limiter):
    found = occupancy(gpu, threads, registers, shared)
    assert (found.blocks, found.limiter) == (blocks, limiter)
    assert found.warps == blocks * -(-threads // 32) and found.fraction == found.warps / 64
    assert f"{blocks} blocks" in str(found)


def test_occupancy_falls_with_every_resource():
    for gpu in (SM_80, SM_90):
        for low, high in (((64, 32, 0), (128, 32, 0)), ((128, 32, 0), (128, 96, 0)), ((128, 32, 0), (128, 32, 65536))):
            assert occupancy(gpu, *low).blocks > occupancy(gpu, *high).blocks
    with pytest.raises(ValueError):
        occupancy(SM_80, 0, 32, 0)


def test_this_cpu():
    cpu = this_cpu()
    assert cpu.cores >= 1 and cpu.vector_bits in (64, 128, 256, 512) and cpu.name and cpu.kind == "llvm"


def test_cpu_detection_reads_files(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: sse2 avx2 avx512f amx_tile amx_bf16\n\n"
                    "processor\t: 1\nmodel name\t: Other\nflags\t: sse2\n")
    for index, (level, kind, size) in enumerate([("1", "Data", "48K"), ("1", "Instruction", "32K"),
                                                 ("2", "Unified", "2M"), ("3", "Unified", "?")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    cpu = detect(info, tmp_path)
    assert (cpu.name, cpu.vector_bits) == ("Fast CPU", 512)
    assert (cpu.l1_bytes, cpu.l2_bytes, cpu.l3_bytes) == (48 * 1024, 2 * 2**20, None)
    assert cpu.amx_bf16 and not cpu.amx_int8 and cpu.supports("avx2")


def test_cpu_detection_without_files(tmp_path):
    cpu = detect(tmp_path / "none", tmp_path / "none")
    assert cpu.l1_bytes is None and not cpu.features and cpu.cores >= 1 and cpu.name
    assert not cpu.amx_bf16


def test_arm_spelling():
    name, flags = parse_cpuinfo("processor : 0\nFeatures : fp asimd sve\n")
    assert name is None and vector_bits(flags, "aarch64") == 128
    assert vector_bits(frozenset(), "riscv64") == 64
    assert [parse_size(s) for s in ("32K", "1M", "64", "x", "")] == [32768, 2**20, 64, None, None]
