"""Untuned tiles on Hopper: legal for any shape, and what measurements chose for the classes of shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_tile.hardware import lookup
from tvm_tile.ops.footprint import ITEM_BYTES
from tvm_tile.ops.gemm import default_tiles
from tvm_tile.ops.hopper_tiles import hopper_tiles

SIZES = st.integers(1, 40000)


@given(m=SIZES, n=SIZES, k=SIZES, dtype=st.sampled_from(["bfloat16", "float16", "int8", "float8_e4m3fn"]))
def test_tiles_fit_the_machine(m, n, k, dtype):
    tile = hopper_tiles(m, n, k, dtype)
    machine = lookup("sm_90")
    loads = tile["num_stages"] * (tile["block_M"] + tile["block_N"]) * tile["block_K"] * ITEM_BYTES[dtype]
    boxes = tile["threads"] // 128 * 2 * 8192
    assert loads + boxes + 1024 <= machine.shared_per_block
    assert tile["num_stages"] >= 2
    assert tile["block_M"] % 64 == 0 and tile["block_N"] % 8 == 0
    # accumulators leave registers for everything else
    assert tile["block_M"] * tile["block_N"] // tile["threads"] <= 192
    assert tile["block_K"] * ITEM_BYTES[dtype] >= 64


@pytest.mark.parametrize(
    ("shape", "block_m", "block_n"),
    [
        ((4096, 4096, 4096), 128, 256),
        ((8192, 28672, 8192), 128, 256),
        ((4000, 4104, 1024), 256, 128),  # four full waves instead of five
        ((4000, 4104, 1000), 256, 192),  # rows off sectors: the tile that loads least
        ((128, 8192, 8192), 64, 128),
        ((1, 8192, 8192), 64, 64),  # every SM reads weights
        ((512, 8192, 8192), 128, 256),
    ],
)
def test_classes_of_shapes(shape, block_m, block_n):
    tile = default_tiles(*shape, "bfloat16", "sm_90")
    assert (tile["block_M"], tile["block_N"]) == (block_m, block_n)
