"""ldmatrix and stmatrix address patterns, by executing the instructions' definition on numpy tiles."""

import numpy as np
import pytest

from tvm_tile.layout import INSTRUCTIONS, MMA, LayoutError, a_atom, b_atom, c_atom, load_a, load_b, store_c

MMAS = INSTRUCTIONS[MMA]


def ldmatrix(move, stored):
    """Registers (lane, element) that the instruction delivers from a stored tile."""
    per_word = move.elements // 4
    out = np.full((32, move.count * per_word), -1, stored.dtype)
    for i in range(move.count):
        rows = []
        for r in range(8):
            row, col = move.address(8 * i + r)
            rows.append(stored[row, col:col + move.elements])
        matrix = np.array(rows)
        matrix = matrix.T if move.trans else matrix
        for lane in range(32):
            word = lane % 4 * per_word
            out[lane, i * per_word:(i + 1) * per_word] = matrix[lane // 4, word:word + per_word]
    return out


def stmatrix(move, registers, stored):
    for i in range(move.count):
        matrix = np.array([[registers[4 * r + c // 2, 2 * i + c % 2] for c in range(8)] for r in range(8)])
        matrix = matrix.T if move.trans else matrix
        for r in range(8):
            row, col = move.address(8 * i + r)
            stored[row, col:col + 8] = matrix[r]


def expected(fragment, tile):
    return np.array([[tile[fragment.coords(lane, r)] for r in range(fragment.registers)] for lane in range(32)])


def forms(inst):
    for trans in (False, True):
        if not trans or inst.operand_bits == 16:
            yield trans


@pytest.mark.parametrize("inst", MMAS, ids=lambda i: i.ptx)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_load_a(inst, count):
    for trans in forms(inst):
        if count < inst.a_registers:
            with pytest.raises(LayoutError, match="does not cover"):
                load_a(inst, count, trans)
            continue
        move = load_a(inst, count, trans)
        atoms = count // inst.a_registers
        tile = np.arange(16 * atoms * inst.k).reshape(16 * atoms, inst.k)
        assert move.extent == (tile.T if trans else tile).shape
        got = ldmatrix(move, tile.T if trans else tile)
        assert (got == expected(a_atom(inst).repeat(0, atoms), tile)).all()


@pytest.mark.parametrize("inst", MMAS, ids=lambda i: i.ptx)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_load_b(inst, count):
    for trans in forms(inst):
        if count < inst.b_registers:
            with pytest.raises(LayoutError, match="does not cover"):
                load_b(inst, count, trans)
            continue
        move = load_b(inst, count, trans)
        atoms = count // inst.b_registers
        tile = np.arange(inst.k * 8 * atoms).reshape(inst.k, 8 * atoms)
        stored = tile if trans else tile.T
        assert move.extent == stored.shape
        assert (ldmatrix(move, stored) == expected(b_atom(inst).repeat(1, atoms), tile)).all()


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_store_c(count, trans):
    move = store_c(count, trans)
    f = c_atom(MMAS[0]).repeat(1, count // 2)
    tile = np.arange(16 * 4 * count).reshape(16, 4 * count)
    stored = np.full(move.extent, -1)
    stmatrix(move, expected(f, tile), stored)
    assert ((stored.T if trans else stored) == tile).all()


@pytest.mark.parametrize("move", [load_a(MMAS[0]), load_b(MMAS[0]), load_b(MMAS[0], 4), load_b(MMAS[0], 4, True),
                                  load_a(MMAS[0], trans=True), store_c(2)], ids=lambda m: m.ptx)
def test_idle_lanes_stay_in_bounds(move):
    lanes = np.arange(32)
    rows, cols = (np.broadcast_to(v, lanes.shape) for v in move.address(lanes))
    assert rows.min() >= 0 and rows.max() < move.extent[0]
    assert cols.min() >= 0 and cols.max() + move.elements <= move.extent[1]


def test_names_and_limits():
    f16 = MMAS[0]
    assert load_b(f16, 4, True).ptx == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
    assert store_c().ptx == "stmatrix.sync.aligned.m8n8.x4.shared.b16"
    int8 = next(i for i in MMAS if i.a_dtype == "int8")
    with pytest.raises(LayoutError, match="moves 16-bit elements, int8 has 8"):
        load_a(int8, trans=True)
    with pytest.raises(LayoutError, match="feeds mma.sync"):
        load_a(INSTRUCTIONS["wgmma"][0])
