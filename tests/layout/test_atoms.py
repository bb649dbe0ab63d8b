"""Tensor-core register layouts against the formulas of the PTX ISA, written out a second time per instruction."""

import itertools

import numpy as np
import pytest

from tvm_tile.layout import (
    INSTRUCTIONS,
    MMA,
    WGMMA,
    LayoutError,
    a_atom,
    a_fragment,
    accumulator_fragment,
    allowed_triples,
    b_atom,
    b_fragment,
    c_atom,
    contains,
    feeds_a_operand,
    find_instruction,
    lanes_for_reduce,
    partition,
)

from .strategies import owners

F16 = "float16"
BF16 = "bfloat16"
F32 = "float32"
E4 = "float8_e4m3fn"


def ptx_a(bits, k, lane, i):
    """(row, col) of element a_i, from the figures of mma.m16n8k*."""
    g, t = lane // 4, lane % 4
    if bits == 16 and k == 16:
        return g + (8 if i in (2, 3, 6, 7) else 0), t * 2 + (i & 1) + (8 if i >= 4 else 0)
    if bits == 16 and k == 8:
        return g + (8 if i >= 2 else 0), t * 2 + (i & 1)
    if bits == 32 and k == 8:
        return g + (8 if i in (1, 3) else 0), t + (4 if i >= 2 else 0)
    assert bits == 8 and k == 32
    return g + (8 if 4 <= i < 8 or 12 <= i < 16 else 0), t * 4 + (i & 3) + (16 if i >= 8 else 0)


def ptx_b(bits, k, lane, i):
    """(row, col) of element b_i, row along k."""
    g, t = lane // 4, lane % 4
    if bits == 16 and k == 16:
        return t * 2 + (i & 1) + (8 if i >= 2 else 0), g
    if bits == 16 and k == 8:
        return t * 2 + i, g
    if bits == 32 and k == 8:
        return t + 4 * i, g
    assert bits == 8 and k == 32
    return t * 4 + (i & 3) + (16 if i >= 4 else 0), g


def ptx_c(lane, i):
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


@pytest.mark.parametrize("inst", INSTRUCTIONS[MMA], ids=lambda i: i.ptx)
def test_mma_fragments(inst):
    a, b, c = a_atom(inst), b_atom(inst), c_atom(inst)
    assert (a.shape, b.shape, c.shape) == ((16, inst.k), (inst.k, 8), (16, 8))
    assert a.registers * inst.operand_bits == 32 * inst.a_registers
    assert b.registers * inst.operand_bits == 32 * inst.b_registers
    assert c.registers * inst.accumulator_bits == 32 * inst.c_registers
    for f in (a, b, c):
        assert f.used_threads == 32 and f.replication == 1
    for lane in range(32):
        assert [a.coords(lane, i) for i in range(a.registers)] == [ptx_a(inst.operand_bits, inst.k, lane, i)
                                                                    for i in range(a.registers)]
        assert [b.coords(lane, i) for i in range(b.registers)] == [ptx_b(inst.operand_bits, inst.k, lane, i)
                                                                    for i in range(b.registers)]
        assert [c.coords(lane, i) for i in range(4)] == [ptx_c(lane, i) for i in range(4)]


@pytest.mark.parametrize("base", INSTRUCTIONS[WGMMA], ids=lambda i: i.ptx)
@pytest.mark.parametrize("n", [8, 16, 64, 192, 256])
def test_wgmma_fragments(base, n):
    inst = base.with_n(n)
    d, a = c_atom(inst), a_atom(inst)
    assert d.shape == (64, n) and d.used_threads == 128 and d.registers == n // 2
    assert d.registers * inst.accumulator_bits == 32 * inst.c_registers
    for thread, i in itertools.product(range(128), range(n // 2)):
        warp, lane = thread // 32, thread % 32
        row, col = 16 * warp + lane // 4 + 8 * (i >> 1 & 1), 8 * (i // 4) + 2 * (lane % 4) + (i & 1)
        assert d.coords(thread, i) == (row, col)
    assert a.shape == (64, inst.k) and a.registers * inst.operand_bits == 128
    for thread, i in itertools.product(range(128), range(a.registers)):
        row, col = ptx_a(inst.operand_bits, inst.k, thread % 32, i)
        assert a.coords(thread, i) == (16 * (thread // 32) + row, col)
    with pytest.raises(LayoutError, match="reads B from shared memory"):
        b_atom(inst)


@pytest.mark.parametrize("producer, consumer", [(F16, F16), (BF16, BF16), (F16, BF16)])
@pytest.mark.parametrize("family, sm", [(MMA, 80), (WGMMA, 90)])
def test_accumulator_is_the_next_a_operand(family, sm, producer, consumer):
    """A 16-bit copy of C of one product is A of the next, register by register."""
    first = find_instruction(family, producer, producer, F32, sm)
    second = find_instruction(family, consumer, consumer, F32, sm)
    assert feeds_a_operand(first, second)
    c = c_atom(first.with_n(8)).repeat(1, 2)
    assert c == a_atom(second)
    for m, n, warps in ((64, 64, 4), (128, 96, 8), (128, 128, 4)):
        part = partition("FullRow", m, n, warps, first)
        assert accumulator_fragment(first, part) == a_fragment(second, partition("FullRow", m, 40, warps, second), n)


def test_other_operands_need_a_conversion():
    for family, sm in ((MMA, 90), (WGMMA, 90)):
        f32 = find_instruction(family, BF16, BF16, F32, sm)
        for dtype, acc in ((E4, F32), ("int8", "int32"), ("tf32", F32)):
            assert not feeds_a_operand(f32, find_instruction(family, dtype, dtype, acc, sm))
    assert not feeds_a_operand(find_instruction(MMA, BF16, BF16, F32, 90), find_instruction(WGMMA, BF16, BF16, F32, 90))


@pytest.mark.parametrize("policy", ["Square", "FullRow", "FullCol"])
@pytest.mark.parametrize("family, sm, warps", [(MMA, 80, 4), (MMA, 80, 8), (WGMMA, 90, 4), (WGMMA, 90, 8)])
def test_tile_fragments(policy, family, sm, warps):
    inst = find_instruction(family, BF16, BF16, F32, sm)
    m, n, k = 128, 96 if policy != "FullCol" else 128, 48
    part = partition(policy, m, n, warps, inst)
    c = accumulator_fragment(inst, part, 32 * warps + 32)
    assert c.shape == (m, n) and c.used_threads == 32 * warps and c.threads == 32 * warps + 32 and c.replication == 1
    assert set(owners(c)) == set(itertools.product(range(m), range(n)))
    # Each group owns one contiguous block, and its elements' rows of A.
    a = a_fragment(inst, part, k)
    assert a.replication == part.n_groups
    group_threads = 32 * inst.warps
    for group in range(part.m_groups * part.n_groups):
        row0, col0 = group // part.n_groups * part.group_m, group % part.n_groups * part.group_n
        threads = range(group * group_threads, (group + 1) * group_threads)
        mine = {c.coords(t, r) for t in threads for r in range(c.registers)}
        assert mine == set(itertools.product(range(row0, row0 + part.group_m), range(col0, col0 + part.group_n)))
        rows = {a.coords(t, r) for t in threads for r in range(a.registers)}
        assert rows == set(itertools.product(range(row0, row0 + part.group_m), range(k)))
    if family == MMA:
        b = b_fragment(inst, part, k)
        assert b.replication == part.m_groups and b.shape == (k, n)
        for warp in range(warps):
            col0 = warp % part.n_groups * part.group_n
            mine = {b.coords(t, r) for t in range(32 * warp, 32 * warp + 32) for r in range(b.registers)}
            assert mine == set(itertools.product(range(k), range(col0, col0 + part.group_n)))


def test_mma_with_the_fragments_multiplies_matrices():
    """Execute a whole tile product with mma.sync on registers laid out by the fragments, against numpy."""
    rng = np.random.default_rng(11)
    inst = find_instruction(MMA, BF16, BF16, F32, 80)
    m, n, k, warps = 64, 48, 32, 4
    part = partition("Square", m, n, warps, inst)
    fa, fb, fc = a_fragment(inst, part, k), b_fragment(inst, part, k), accumulator_fragment(inst, part)
    big_a, big_b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    ra = np.array([[big_a[fa.coords(t, r)] for r in range(fa.registers)] for t in range(32 * warps)])
    rb = np.array([[big_b[fb.coords(t, r)] for r in range(fb.registers)] for t in range(32 * warps)])
    rc = np.zeros((32 * warps, fc.registers))
    aa, ba, ca = a_atom(inst), b_atom(inst), c_atom(inst)
    for warp, i, j, s in itertools.product(range(warps), range(part.m_repeat), range(part.n_repeat), range(k // 16)):
        a, b = np.full((16, 16), np.nan), np.full((16, 8), np.nan)
        for lane in range(32):
            t = 32 * warp + lane
            for e in range(8):
                a[aa.coords(lane, e)] = ra[t, (i * (k // 16) + s) * 8 + e]
            for e in range(4):
                b[ba.coords(lane, e)] = rb[t, (s * part.n_repeat + j) * 4 + e]
        d = a @ b
        for lane in range(32):
            for e in range(4):
                rc[32 * warp + lane, (i * part.n_repeat + j) * 4 + e] += d[ca.coords(lane, e)]
    got = np.full((m, n), np.nan)
    for t, r in itertools.product(range(32 * warps), range(fc.registers)):
        got[fc.coords(t, r)] = rc[t, r]
    np.testing.assert_allclose(got, big_a @ big_b, rtol=1e-12, atol=1e-12)


def test_row_statistics_stay_inside_quads():
    """Softmax's reductions: rows of an accumulator need two shuffles and no shared memory with FullRow."""
    for family, sm in ((MMA, 80), (WGMMA, 90)):
        inst = find_instruction(family, BF16, BF16, F32, sm)
        c = accumulator_fragment(inst, partition("FullRow", 64, 64, 4, inst))
        plan = lanes_for_reduce(c, 1)
        assert plan.lane_masks == (1, 2) and not plan.needs_shared and plan.result.registers == 2
        assert contains(plan.result, c, (0,))
    inst = find_instruction(MMA, BF16, BF16, F32, 80)
    plan = lanes_for_reduce(accumulator_fragment(inst, partition("FullCol", 64, 64, 4, inst)), 1)
    assert plan.needs_shared and plan.ranks == 4


def test_padding_for_few_heads():
    """8 query heads on m = 16 (tilelang 1191): padded rows are owned, outside the shape, and predicated."""
    inst = find_instruction(MMA, BF16, BF16, F32, 80)
    c = accumulator_fragment(inst, partition("FullCol", 8, 64, 4, inst, pad=True))
    assert c.shape == (8, 64) and c.padded_shape == (16, 64) and c.bounds() == ((0, 8),)


def test_dtype_triples():
    assert (BF16, BF16, F16) not in allowed_triples(MMA, 90)
    assert (E4, E4, F32) not in allowed_triples(MMA, 80) and (E4, E4, F32) in allowed_triples(MMA, 90)
    assert allowed_triples(WGMMA, 80) == () and allowed_triples(WGMMA, 100) == ()
    with pytest.raises(LayoutError, match=r"no mma for A int8, B int8, accumulator float16 .*\(int8, int8, int32\)"):
        find_instruction(MMA, "int8", "int8", F16, 80)
    with pytest.raises(LayoutError, match="no wgmma at all"):
        find_instruction(WGMMA, F16, F16, F32, 80)
    with pytest.raises(LayoutError, match="K = 24 is no multiple .* multiple of 16"):
        find_instruction(WGMMA, F16, F16, F32, 90, k=24)
    assert find_instruction(MMA, F16, F16, F32, 80, k=24).k == 8
    assert find_instruction(MMA, F16, F16, F32, 80, k=32).k == 16
    with pytest.raises(LayoutError, match="no n = 40"):
        find_instruction(WGMMA, "int8", "int8", "int32", 90).with_n(40)
    with pytest.raises(LayoutError, match="K = 20"):
        a_fragment(find_instruction(MMA, F16, F16, F32, 80), partition("FullRow", 16, 8, 1, INSTRUCTIONS[MMA][0]), 20)


def test_ptx_names():
    assert find_instruction(MMA, BF16, BF16, F32, 80).ptx == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert find_instruction(MMA, "tf32", "tf32", F32, 80).ptx == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    assert (find_instruction(MMA, "int8", "uint8", "int32", 80).ptx
            == "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32")
    assert (find_instruction(WGMMA, E4, "float8_e5m2", F32, 90).with_n(128).ptx
            == "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2")
