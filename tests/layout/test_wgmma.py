"""wgmma descriptors, by reading tiles the way the hardware does."""

import itertools

import numpy as np
import pytest

from tvm_tile.layout import LayoutError, SharedLayout, operand_descriptor
from tvm_tile.layout.wgmma import decode, encode


def hardware_read(descriptor, k_major, mn, k, bits):
    """Byte address that the hardware reads for element (mn, k) of an instruction. PTX ISA, canonical layouts."""
    start, leading, stride, span = decode(descriptor)
    width = bits // 8
    per_span = span // width
    if k_major:
        address = start + mn // 8 * stride + mn % 8 * span + k * width
    else:
        address = start + mn // per_span * leading + k // 8 * stride + k % 8 * span + mn % per_span * width
    return address ^ ((address >> 7) & (span // 16 - 1)) << 4


CASES = [(shape, bits, span, True, n) for shape, bits, span, n in [
    ((64, 64), 16, 128, 64), ((128, 128), 16, 128, 64), ((64, 96), 16, 64, 64), ((176, 64), 16, 64, 88),
    ((40, 48), 16, 32, 40), ((128, 128), 8, 128, 128), ((64, 64), 32, 128, 64), ((24, 64), 8, 32, 8),
    ((60, 64), 16, 128, 24)]]
CASES += [(shape, 16, span, False, n) for shape, span, n in [
    ((128, 128), 128, 128), ((64, 64), 128, 64), ((48, 96), 64, 96), ((32, 80), 32, 80), ((64, 256), 128, 64),
    ((40, 64), 128, 64), ((32, 64), 128, 32)]]


@pytest.mark.parametrize("shape, bits, span, k_major, n", CASES)
def test_descriptor_reads_the_tile(shape, bits, span, k_major, n):
    layout = SharedLayout.swizzled((2, *shape), bits, span)
    d = operand_descriptor(layout, n, k_major)
    per_k = 256 // bits
    extent_mn, extent_k = shape if k_major else shape[::-1]
    starts = [m for m in range(0, extent_mn - n + 1, 8)
              if k_major or m % layout.block_columns == 0 or m % layout.block_columns + n <= layout.block_columns]
    checked = 0
    for stage, mn0, k0 in itertools.product(range(2), starts[:4] + starts[-1:], range(0, extent_k - per_k + 1, per_k)):
        start = 4 * 1024 + d.start(mn0, k0, (stage,))
        descriptor = d.bits | start >> 4
        mn, k = np.meshgrid(np.arange(n), np.arange(per_k), indexing="ij")
        row, col = (mn0 + mn, k0 + k) if k_major else (k0 + k, mn0 + mn)
        want = 4 * 1024 + layout.offset(stage, row, col) * bits // 8
        np.testing.assert_array_equal(hardware_read(descriptor, k_major, mn, k, bits), want)
        checked += 1
    assert checked
    assert d.trans == (0 if k_major else 1)
    for step in range(extent_k // per_k):
        assert d.advance(step) * 16 == d.start(0, step * per_k) - d.start(0, 0)


def test_verified_constants():
    """Constants of kernels that run on the hardware."""
    k_major = operand_descriptor(SharedLayout.swizzled((128, 64), 16, 128), 128)
    assert k_major.bits == 0x4000004000010000
    assert [k_major.advance(i) for i in range(4)] == [0, 2, 4, 6]
    wide = operand_descriptor(SharedLayout.swizzled((128, 128), 16, 128), 128)
    assert [wide.advance(i) for i in range(8)] == [i // 4 * 128 * 8 + i % 4 * 2 for i in range(8)]
    v = operand_descriptor(SharedLayout.swizzled((128, 128), 16, 128), 128, k_major=False)
    assert v.bits == (1 << 62) | (64 << 32) | ((128 * 128 >> 4) << 16)
    assert [v.advance(i) for i in range(3)] == [0, 128, 256]


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_encode_round_trip(span):
    assert decode(encode(0x3A400, 0x2000, 1024, span)) == (0x3A400, 0x2000, 1024, span)


def test_what_wgmma_cannot_read_is_refused():
    with pytest.raises(LayoutError, match="is not swizzled"):
        operand_descriptor(SharedLayout.row_major((64, 64), 16), 64)
    with pytest.raises(LayoutError, match="16-bit elements, this tile has 8"):
        operand_descriptor(SharedLayout.swizzled((64, 64), 8, 64), 64, k_major=False)
    d = operand_descriptor(SharedLayout.swizzled((64, 256), 16, 128), 128, k_major=False)
    with pytest.raises(LayoutError, match="crosses a swizzle block of 64"):
        d.start(32, 0)
    with pytest.raises(LayoutError, match="steps are 8 along M/N and 16 along K"):
        d.start(0, 8)
    with pytest.raises(LayoutError, match="of a tile of 256 x 64"):
        d.start(192, 0)
    for bad in ((8, 0, 0, 0), (1 << 18, 0, 0, 0), (0, 0, 0, 48)):
        with pytest.raises(LayoutError):
            encode(*bad)
