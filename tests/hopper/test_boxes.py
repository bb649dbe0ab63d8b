"""Boxes of fragments: what they claim holds for every element."""

import numpy as np
import pytest

from tvm_tile.layout import accumulator_fragment, default_fragment, find_instruction, partition
from tvm_tile.layout.boxes import BOX_ROWS, WARPGROUP, warpgroup_boxes


@pytest.mark.parametrize(
    ("m", "n", "warps", "policy"),
    [
        (64, 64, 4, "Square"), (128, 256, 8, "Square"), (128, 256, 8, "FullRow"), (256, 192, 8, "Square"),
        (192, 64, 12, "FullRow"), (64, 256, 8, "FullCol"), (128, 48, 8, "FullRow"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("columns", [16, 32, 64])
def test_boxes_of_accumulators(m, n, warps, policy, columns):
    instruction = find_instruction("wgmma", "bfloat16", "bfloat16", "float32", 90, 16)
    part = partition(policy, m, n, warps, instruction)
    layout = accumulator_fragment(instruction, part)
    boxes = warpgroup_boxes(layout, columns)
    if part.instruction_n % columns:
        assert boxes is None  # a box would cross the columns of an instruction
        return
    owners = np.zeros((m, n), dtype=int)
    thread = np.arange(WARPGROUP)[:, None]
    register = np.arange(columns * BOX_ROWS // WARPGROUP)[None, :]
    for group in range(warps // 4):
        for first in boxes:
            row, column = layout.coords(group * WARPGROUP, first)
            rows, cols = layout.coords(group * WARPGROUP + thread, first + register)
            np.add.at(owners, (rows, cols), 1)
            assert (owners[row : row + BOX_ROWS, column : column + columns] == 1).all()
    assert (owners == 1).all()


def test_other_fragments_have_none():
    assert warpgroup_boxes(default_fragment((64, 64), 128, 16), 64) is None
