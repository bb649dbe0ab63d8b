"""Kernels that no rule was written for: right on CPUs and in the simulator, and specialised on Hopper like the ops."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import tvm_tile
from tvm_tile import hardware, ir
from tvm_tile.ir.ops import GemmOp
from tvm_tile.schedule import decide
from tvm_tile.schedule.decisions import read_instruction, read_roles
from tvm_tile.simulate import simulate

FOLDER = Path(__file__).parents[2] / "examples" / "variations"
FILES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "variation")
SEEDS = {"sm_80": 0, "sm_90": 1}


@pytest.fixture(scope="module")
def modules():
    """The examples as modules: they import what they share by its name, as scripts do."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in ("variation", *FILES)}
    finally:
        sys.path.remove(str(FOLDER))
        for name in ("variation", *FILES):
            sys.modules.pop(name, None)


def _variations(modules, name):
    return modules[name].VARIATIONS


def test_there_are_variations():
    assert len([f for f in FILES if f.startswith("attention")]) >= 5
    assert len([f for f in FILES if f.startswith("gemm")]) >= 5


@pytest.mark.parametrize("name", FILES)
def test_on_the_cpu(modules, name):
    common = modules["variation"]
    for variation in _variations(modules, name):
        kernel = tvm_tile.compile(variation.kernel(**variation.small, **variation.tiles), "llvm")
        tensors = common.arguments(variation, variation.small, "cpu", 0)
        assert common.verify(variation, variation.small, tensors) == float("inf")  # a kernel that did nothing fails
        kernel(*tensors)
        assert common.verify(variation, variation.small, tensors) <= 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", FILES)
def test_in_the_simulator(modules, name, arch):
    common = modules["variation"]
    for variation in _variations(modules, name):
        kernel = simulate(variation.kernel(**variation.small, **variation.tiles), arch, seed=SEEDS[arch])
        tensors = common.arguments(variation, variation.small, "cpu", 1)
        kernel(*tensors, undefined=(len(tensors) - 1,))
        assert common.verify(variation, variation.small, tensors) <= 1


@pytest.mark.parametrize("name", FILES)
def test_hopper_takes_the_specialised_path(modules, name):
    """wgmma, and TMA loads of a producer warpgroup into a ring a loop, from the source as it stands."""
    for variation in _variations(modules, name):
        for config in (variation.large, {**variation.small, **variation.tiles}):
            (kernel,) = ir.kernels_of(decide(variation.kernel(**config), hardware.lookup("sm_90")))
            roles = read_roles(kernel.block)
            assert roles is not None and any(ring["slots"] > 1 for ring in roles["rings"]), variation.name
            products = [op for op in ir.tile_ops(kernel.block.body) if isinstance(op, GemmOp)]
            assert {read_instruction(op.annotations).family for op in products} == {"wgmma"}, variation.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", FILES)
def test_on_a_gpu(modules, name):
    common = modules["variation"]
    for variation in _variations(modules, name):
        # odd sizes with the default tiles, which the timed shape is a multiple of
        kernel = tvm_tile.compile(variation.kernel(**variation.small))
        tensors = common.arguments(variation, variation.small, "cuda", 2)
        kernel(*tensors)
        torch.cuda.synchronize()
        assert common.verify(variation, variation.small, tensors) <= 1
