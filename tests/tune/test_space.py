"""Spaces: footprints against the kernels themselves, legality, traces, identities."""

from __future__ import annotations

import json
import random

import pytest
import tvm_ffi
from tvm.s_tir import Schedule

import tvm_tile
from tests.tune.spaces import Add
from tvm_tile.errors import TileError
from tvm_tile.ir import kernels_of
from tvm_tile.ops import registry
from tvm_tile.tune.advice import advise
from tvm_tile.tune.features import lowered_features, own_features
from tvm_tile.tune.space import Problem, Space, machine_of

SHAPES = {
    "gemm": {"m": 300, "n": 200, "k": 500},
    "flash_attention": {"batch": 2, "heads": 2, "seq": 300, "dim": 72, "causal": True},
    "flash_mla": {"batch": 2, "heads": 48, "kv_len": 300, "dim": 128, "pe_dim": 32},
    "dequant_gemm": {"m": 20, "n": 192, "k": 512},
    "grouped_gemm": {"total": 200, "groups": 3, "n": 96, "k": 128},
    "softmax": {"rows": 20, "columns": 700},
    "rmsnorm": {"rows": 20, "columns": 700},
}


def space_of(op: str, target: str = "sm_90", dtype: str | None = None, **shape) -> Space:
    spec = registry.get(op) if isinstance(op, str) else op
    where = tvm_tile.target(target)
    return Space(Problem.of(spec, shape or SHAPES[op], dtype, where), machine_of(where))


@pytest.mark.parametrize("op", SHAPES)
def test_footprints_are_what_the_kernels_allocate(op):
    rng = random.Random(op)
    space = space_of(op)
    configs = [space.default] + [{n: rng.choice(v) for n, v in space.choices.items()} for _ in range(6)]
    checked = 0
    for config in configs:
        shape, tunables = space.problem.configured(config)
        if space.problem.spec.illegal(shape, space.problem.dtype, "sm_90", tunables):
            continue
        kernel = kernels_of(space.problem.make(config))[0]
        footprint = space.footprint(config)
        found = {"shared": {}, "local.fragment": {}}
        for buffer in kernel.block.alloc_buffers:
            scope = str(buffer.ty.storage_scope)
            if scope in found:
                size = 1
                for extent in buffer.ty.shape:
                    size *= int(extent)
                found[scope][str(buffer.name)] = (size, str(buffer.ty.dtype))
        assert {t.name: (t.elements, t.dtype) for t in footprint.shared} == found["shared"]
        assert {t.name: (t.elements, t.dtype) for t in footprint.fragments} == found["local.fragment"]
        assert footprint.threads == kernel.threads
        grid = 1
        for extent in kernel.grid:
            grid *= int(extent)
        assert footprint.ctas == grid
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("target", ["llvm", "sm_80", "sm_90"])
def test_the_untuned_configuration_is_in_the_space_and_legal(op, target):
    space = space_of(op, target)
    assert space.reason(space.default) is None
    assert all(space.default[n] in v for n, v in space.choices.items())
    shape, tunables = space.problem.configured(space.default)
    default = space.problem.spec.make(SHAPES[op], None, target)
    assert tvm_ffi.structural_equal(space.problem.make(space.default), default)


def test_illegal_configurations_name_their_reason():
    space = space_of("gemm", "sm_80", m=4096, n=4096, k=4096)
    base = {**space.default, "block_M": 128, "block_N": 128, "block_K": 64, "num_stages": 2, "threads": 256}
    assert space.reason(base) is None
    assert space.reason({**base, "block_K": 256, "num_stages": 4}).startswith("shared memory: 524288 > 166912")
    assert space.reason({**base, "block_M": 512, "block_N": 256, "block_K": 32}).startswith("registers: about")
    assert space.reason({**base, "block_M": 32, "block_N": 32, "threads": 384}).startswith("instruction shape")
    split = space_of("gemm", "sm_80", m=64, n=64, k=128, split_k=0)
    assert split.reason({**split.default, "split_k": 8, "block_K": 64}).startswith("split_k: 8 slices of 2 tiles")
    space.refused[space.key(base)] = "compiler: says no"
    assert space.reason(base) == "compiler: says no"


def test_choices_follow_shape_and_target():
    gpu, cpu = space_of("gemm", m=64, n=4096, k=4096), space_of("gemm", "llvm", m=64, n=4096, k=4096)
    assert max(gpu.choices["block_M"]) == 64 and "threads" in gpu.choices
    assert set(cpu.choices) == {"block_M", "block_N", "block_K"}
    assert "num_splits" not in space_of("flash_mla", batch=2).choices
    mla = space_of("flash_mla", batch=2, num_splits=0)
    assert 8 in mla.choices["num_splits"] and mla.problem.shape["num_splits"] == 0
    assert mla.problem.configured({"num_splits": 8})[0]["num_splits"] == 8


def test_trace_alone_holds_the_configuration():
    space = space_of("gemm", m=4096, n=4096, k=4096)
    config = {**space.default, "block_M": 64, "policy": "FullCol", "num_stages": 4}
    trace = space.schedule(config).trace
    assert space.config_of_trace(trace) == config
    # as JSON, as the database stores it
    again = Schedule(space.workload())
    type(trace).apply_json_to_schedule(json.loads(json.dumps(_plain(trace.as_json()))), again)
    assert space.config_of(again) == config
    with pytest.raises(TileError, match="block_M=77"):
        space.schedule({**config, "block_M": 77})


def _plain(value):
    if hasattr(value, "value"):
        return value.value
    return [_plain(v) for v in value] if not isinstance(value, (str, int, float, type(None))) else value


def test_workload_does_not_depend_on_tiles_but_on_everything_static():
    first = space_of("gemm", m=256, n=256, k=256).workload()
    assert tvm_ffi.structural_equal(first, space_of("gemm", m=256, n=256, k=256).workload())
    for other in (space_of("gemm", m=256, n=256, k=512), space_of("gemm", "sm_80", m=256, n=256, k=256)):
        assert not tvm_ffi.structural_equal(first, other.workload())
    assert float(first["main"].attrs["estimated_flops"]) == 2 * 256**3
    spec = registry.get("gemm")
    spec.version += 1
    assert not tvm_ffi.structural_equal(first, space_of(spec, m=256, n=256, k=256).workload())


def test_own_features_tell_resources():
    space = space_of("gemm", dtype="float16", m=4096, n=4096, k=4096)
    config = {**space.default, "block_M": 128, "block_N": 128, "block_K": 64, "num_stages": 3, "threads": 256}
    found = own_features(space, config)
    assert found["shared bytes"] == 3 * (128 + 128) * 64 * 2
    assert found["ctas"] == pytest.approx(10.0, abs=0.01) and found["iterations"] == 64
    assert found["registers"] == 128 * 128 // 256 + 40
    assert found["resident ctas"] == 2 and found["intensity"] == pytest.approx(64.0)
    assert found["padding"] == 1.0
    ragged = own_features(space_of("gemm", m=129, n=4096, k=4096), config)
    assert ragged["padding"] > 1.9


@pytest.mark.parametrize("target", ["llvm", "sm_80"])
def test_lowered_features_grow_with_the_work(target):
    from tvm_tile.lower import lower

    def features(k):
        func = registry.get("gemm").make({"m": 64, "n": 64, "k": k}, "float16", target, block_K=32)
        return lowered_features(lower(func.with_attr("global_symbol", "main"), tvm_tile.target(target)))

    small, large = features(128), features(512)
    assert large["lowered executed"] > small["lowered executed"] > 0
    if target == "sm_80":
        # log2 of 1 + count: four times the tensor-core instructions
        assert large["lowered tensor"] - small["lowered tensor"] == pytest.approx(2.0, abs=0.05)
        assert small["lowered async copy"] > 0 and small["lowered elements shared"] > 0


def test_no_advice_where_the_compiler_finds_slots_itself():
    space = space_of("flash_mla", batch=128, heads=128, kv_len=4096)
    assert [line.split(":")[0] for line in advise(space, space.default)] == ["iterations"]


def test_advice_names_the_values_to_change():
    space = space_of("gemm", dtype="float16", m=4096, n=4096, k=4096)
    base = {**space.default, "block_M": 128, "block_N": 128, "block_K": 64, "num_stages": 4, "threads": 256}

    def text(**changes):
        return "\n".join(advise(space, {**base, **changes}))

    assert "bubbles" not in text() and "shared memory" not in text()
    large = text(block_K=256)
    assert "shared memory: 524288 of 232448 bytes (A_shared 65536 x 4, B_shared 65536 x 4)" in large
    assert "fits with num_stages=3" not in large and "block_K=128" not in large.split("fits with")[0]
    assert "registers: about" in text(block_M=512, block_N=256, num_stages=2, block_K=32)
    assert "try num_stages=" in text(num_stages=0)
    small = space_of("gemm", m=128, n=8192, k=8192, split_k=0)
    assert "grid: 64 CTAs for 132 SMs; try" in "\n".join(advise(small, {**base, "split_k": 1}))
    assert advise(space_of("gemm", "llvm"), space_of("gemm", "llvm").default) == []


def test_an_op_without_choices_is_refused(tmp_path):
    class Nothing(Add):
        def choices(self, shape, dtype, target):
            return {}

    with pytest.raises(TileError, match="nothing to tune"):
        tvm_tile.tune(Nothing(), target="llvm", out=tmp_path)
