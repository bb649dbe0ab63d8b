"""Shared layouts: bijection, the hardware's own swizzle, bank conflicts, the choice between them."""

import itertools
import json

import numpy as np
import pytest

from tvm_tile.layout import (
    INSTRUCTIONS,
    MMA,
    Access,
    LayoutError,
    SharedLayout,
    accumulator_fragment,
    choose,
    column_access,
    conflicts,
    copy_fragment,
    default_fragment,
    find_instruction,
    fragment_accesses,
    load_a,
    load_b,
    partition,
    row_vector_access,
    store_c,
    wavefronts,
    why_not_swizzled,
)

LAYOUTS = [
    SharedLayout.row_major((13,), 32), SharedLayout.row_major((5, 7), 16), SharedLayout.padded((9, 24), 16, 8),
    SharedLayout.row_major((2, 3, 5, 7), 8), SharedLayout.padded((3, 4, 6), 32, 1),
    *(SharedLayout.swizzled(shape, 16, span) for shape in [(64, 64), (60, 64), (1, 64), (16, 256), (3, 12, 128)]
      for span in (128, 64, 32)),
    SharedLayout.swizzled((64, 96), 16, 64), SharedLayout.swizzled((40, 80), 16, 32),
    SharedLayout.swizzled((16, 128), 8, 128), SharedLayout.swizzled((16, 64), 32, 128),
    SharedLayout.swizzled((8, 32), 64, 64), SharedLayout.swizzled((16, 256), 4, 128),
    SharedLayout.swizzled((2, 2, 10, 64), 16, 128),
]


def grids(layout):
    return np.meshgrid(*map(np.arange, layout.shape), indexing="ij")


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_offset_is_injective_and_coords_inverts_it(layout):
    grid = grids(layout)
    offsets = layout.offset(*grid)
    assert len(np.unique(offsets)) == offsets.size
    assert offsets.min() >= 0 and offsets.max() < layout.size
    for got, want in zip(layout.coords(offsets), grid, strict=True):
        np.testing.assert_array_equal(got, want)
    assert layout.bytes * 8 >= layout.size * layout.dtype_bits
    for coords in list(np.ndindex(*layout.shape))[::37]:
        assert layout.offset(*coords) == offsets[coords]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_chunks_are_contiguous(layout):
    per = layout.chunk_elements
    if layout.columns % per:
        return
    grid = grids(layout)
    chunk_start = layout.chunk_offset(*grid[:-1], grid[-1] // per)
    np.testing.assert_array_equal(layout.offset(*grid), chunk_start + grid[-1] % per)
    if layout.span:
        assert (chunk_start * layout.dtype_bits % 128 == 0).all()


def hardware_swizzle(address, span):
    """The address bits that CU_TENSOR_MAP_SWIZZLE_* exchanges."""
    return address ^ ((address >> 7) & (span // 16 - 1)) << 4 if span else address


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if not la.pad and la.columns * la.dtype_bits % 128 == 0],
                         ids=repr)
def test_layout_is_what_tma_writes(layout):
    """Each TMA box writes its elements in order and swizzles address bits: that has to be the layout."""
    lead = (0,) * (len(layout.shape) - 2)
    covered = set()
    for row, column, rows, columns, offset in layout.tma_boxes():
        assert rows <= 256 and columns <= 256 and columns * layout.dtype_bits % 128 == 0
        assert layout.span == 0 or columns * layout.dtype_bits == layout.span * 8
        assert offset * layout.dtype_bits // 8 % layout.alignment == 0
        for r, c in itertools.product(range(rows), range(columns)):
            bits = (offset + r * columns + c) * layout.dtype_bits
            address = hardware_swizzle(bits // 8, layout.span)
            coords = (row + r, column + c) if len(layout.shape) > 1 else (column + c,)
            assert layout.offset(*lead, *coords) * layout.dtype_bits == address * 8 + bits % 8
            covered.add(coords)
    assert len(covered) == layout.rows * layout.columns


@pytest.mark.parametrize("rows", [1, 256, 257, 600])
def test_tma_boxes_of_tall_tiles(rows):
    layout = SharedLayout.swizzled((rows, 128), 16, 128)
    boxes = layout.tma_boxes()
    assert sum(b[2] * b[3] for b in boxes) == rows * 128 and layout.tma_swizzle == 3


def test_tma_limits():
    with pytest.raises(LayoutError, match="padded by 8"):
        SharedLayout.padded((8, 64), 16, 8).tma_boxes()
    with pytest.raises(LayoutError, match="multiple of 16 bytes"):
        SharedLayout.row_major((8, 9), 16).tma_boxes()
    with pytest.raises(LayoutError, match="at most 256 columns"):
        SharedLayout.row_major((8, 512), 16).tma_boxes()


# ---- bank conflicts -----------------------------------------------------------------------------------------------


def test_wavefronts_of_known_patterns():
    assert wavefronts([4 * i for i in range(32)], 4) == (1, 1)
    assert wavefronts([128 * i for i in range(32)], 4) == (32, 1)
    assert wavefronts([256 * i for i in range(16)] + [None] * 16, 4) == (16, 1)
    assert wavefronts([0] * 32, 4) == (1, 1), "a broadcast is free"
    assert wavefronts([i for i in range(32)], 1) == (1, 1)
    assert wavefronts([8 * i for i in range(32)], 8) == (2, 2)
    assert wavefronts([16 * i for i in range(32)], 16) == (4, 4)
    assert wavefronts([128 * i for i in range(32)], 16) == (32, 4)
    assert wavefronts([None] * 32, 16) == (0, 0)


def test_row_major_conflicts_and_swizzle_does_not():
    plain = SharedLayout.row_major((64, 64), 16)
    f16 = INSTRUCTIONS[MMA][0]
    assert conflicts(plain, load_a(f16).access()) == 4 * 7
    assert conflicts(plain, column_access(plain)) == 31
    swizzled = SharedLayout.swizzled((64, 64), 16, 128)
    assert conflicts(swizzled, load_a(f16).access()) == 0
    assert conflicts(swizzled, column_access(swizzled)) == 3, "8 rows differ in their chunk, 32 rows share 8 of them"


CHOICES = [(shape, bits) for bits in (8, 16, 32) for shape in [
    (64, 64), (128, 32), (16, 128), (32, 16), (64, 96), (48, 80), (64, 72), (64, 40), (64, 8), (128, 256), (2, 32, 64)]]


@pytest.mark.parametrize("shape, bits", CHOICES)
def test_chosen_layout_has_no_conflicts(shape, bits):
    """ldmatrix everywhere in the tile (all forms), stmatrix, and 16-byte rows."""
    choice = choose(shape, bits, ("ldmatrix", "vector"))
    layout = choice.layout
    if layout.columns * bits % 128:
        assert not choice.swizzled
        return
    lead = (0,) * (len(shape) - 2)
    for inst in INSTRUCTIONS[MMA]:
        if inst.operand_bits != bits:
            continue
        moves = [load_a(inst), load_b(inst), load_b(inst, 4)]
        if bits == 16:
            moves += [load_a(inst, trans=True), load_b(inst, 4, True), store_c(), store_c(2)]
        for move in moves:
            rows, columns = move.extent
            for r in range(0, layout.rows - rows + 1, 8):
                for c in range(0, layout.columns - columns + 1, move.elements):
                    assert conflicts(layout, move.access(r, c, lead)) == 0, (layout, move, r, c)
    if layout.pad == 0:
        assert conflicts(layout, row_vector_access(layout)) == 0


@pytest.mark.parametrize("policy", ["Square", "FullRow"])
def test_epilogue_and_copies_of_fragments(policy):
    """An accumulator stored pair by pair, and a coalesced copy, into the swizzled tile."""
    inst = find_instruction(MMA, "bfloat16", "bfloat16", "float32", 80)
    layout = choose((128, 128), 16, "vector").layout
    c = accumulator_fragment(inst, partition(policy, 128, 128, 8, inst))
    accesses = fragment_accesses(c, 16)
    assert len(accesses) == c.registers // 2 and all(a.bytes == 4 for a in accesses)
    assert conflicts(layout, accesses) == 0
    assert conflicts(SharedLayout.row_major((128, 128), 16), accesses) == 7 * len(accesses)
    copy = default_fragment((128, 128), 256, 16)
    assert conflicts(layout, fragment_accesses(copy, 16)) == 0
    assert all(a.bytes == 16 for a in fragment_accesses(copy, 16))


@pytest.mark.parametrize("layout", [la for la in LAYOUTS if la.span] + [
    SharedLayout.swizzled((8, 576), 16, 128), SharedLayout.swizzled((4, 96), 16, 64)], ids=repr)
@pytest.mark.parametrize("threads", [32, 96, 128, 256])
def test_copies_have_no_conflicts(layout, threads):
    """Copies stay inside a column block; they own each element once all the same."""
    f = copy_fragment(layout, threads)
    owned = {f.coords(t, r) for t in range(f.used_threads) for r in range(f.registers)}
    assert set(np.ndindex(*layout.shape)) <= owned and len(owned) == f.used_threads * f.registers

    def cost(fragment):
        return sum(conflicts(layout, fragment_accesses(fragment, layout.dtype_bits, warp))
                   for warp in range(-(-fragment.used_threads // 32)))

    if f.used_threads & (f.used_threads - 1) == 0 and f.vector_width(-1, layout.dtype_bits) * layout.dtype_bits == 128:
        assert cost(f) == 0
    else:  # odd thread counts straddle rows
        assert cost(f) <= cost(default_fragment(layout.shape, threads, layout.dtype_bits))


def test_default_order_would_conflict_across_column_blocks():
    layout = SharedLayout.swizzled((64, 96), 16, 64)
    assert conflicts(layout, fragment_accesses(default_fragment((64, 96), 96, 16), 16)) > 0
    assert conflicts(layout, fragment_accesses(copy_fragment(layout, 96), 16)) == 0


def test_fragment_accesses_leave_padding_out():
    f = default_fragment((3, 5), 32, 32)
    accesses = fragment_accesses(f, 32)
    touched = [lane for a in accesses for lane in a.lanes if lane is not None]
    assert sorted(touched) == list(itertools.product(range(3), range(5)))


def test_misaligned_accesses_are_refused():
    layout = SharedLayout.padded((8, 64), 16, 1)
    with pytest.raises(LayoutError, match="not aligned to 16 bytes"):
        conflicts(layout, load_a(INSTRUCTIONS[MMA][0]).access())
    with pytest.raises(LayoutError, match="do not divide into"):
        row_vector_access(SharedLayout.row_major((8, 9), 16))


# ---- choice and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, bits, span", [((64, 64), 16, 128), ((64, 96), 16, 64), ((64, 80), 16, 32),
                                               ((64, 576), 16, 128), ((64, 32), 16, 64), ((8, 16), 16, 32),
                                               ((64, 64), 8, 64), ((64, 32), 32, 128)])
def test_widest_swizzle_is_chosen(shape, bits, span):
    choice = choose(shape, bits, ("wgmma", "tma", "ldmatrix"))
    assert choice.swizzled and choice.layout.span == span and str(span) in choice.reason
    assert choice.layout.alignment == 8 * span


def test_what_cannot_be_swizzled_is_reported():
    assert "144 bytes, no multiple of 32; use a multiple of 16 columns" in why_not_swizzled((64, 72), 16)
    assert "one dimension" in why_not_swizzled((64,), 16)
    with pytest.raises(LayoutError, match="wgmma reads swizzled tiles only"):
        choose((64, 72), 16, "wgmma")
    choice = choose((64, 40), 16, "ldmatrix")
    assert not choice.swizzled and choice.layout.pad == 0 and "80 bytes" in choice.reason
    choice = choose((64, 24), 32, "word")
    assert choice.layout == SharedLayout.swizzled((64, 24), 32, 32)
    choice = choose((64, 6), 32, "word")
    assert choice.layout.pad == 1 and conflicts(choice.layout, column_access(choice.layout)) == 0
    assert choose((64, 9), 16, "word").layout == SharedLayout.row_major((64, 9), 16)
    assert choose((64, 6), 32, ("word", "tma")).layout.pad == 0, "TMA cannot write padded rows"
    assert choose((128,), 32, "word").layout == SharedLayout.row_major((128,), 32)
    choice = choose((4, 576), 16, "ldmatrix")
    assert not choice.swizzled and choice.layout.pad == 8 and "4 rows are too few" in choice.reason
    assert choose((4, 576), 16, "tma").swizzled
    assert choose((1, 64), 16, "vector").layout == SharedLayout.row_major((1, 64), 16)
    assert choose((4, 64), 16, "vector").layout.bytes == 4 * 128
    with pytest.raises(LayoutError, match="no 128-byte swizzle"):
        SharedLayout.swizzled((64, 96), 16, 128)
    with pytest.raises(LayoutError, match="unknown access"):
        choose((64, 64), 16, "ldmatirx")


@pytest.mark.parametrize("make", [lambda: SharedLayout((4, 64), 16, 128, 8), lambda: SharedLayout((4, 64), 16, 48),
                                  lambda: SharedLayout((0, 64), 16), lambda: SharedLayout((4, 4), 12),
                                  lambda: SharedLayout((4, 64), 16).offset(1),
                                  lambda: Access("x", ((0, 0),), 12)])
def test_nonsense_is_refused(make):
    with pytest.raises(LayoutError):
        make()


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_json_round_trip(layout):
    again = SharedLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and hash(again) == hash(layout)
