"""Warp partitions from policies."""

import itertools
import json
import math

import pytest

from tvm_tile.layout import (
    MMA,
    WGMMA,
    LayoutError,
    WarpPartition,
    a_fragment,
    accumulator_fragment,
    find_instruction,
    halves_of_k,
    partition,
    policy_names,
    register_policy,
    unregister_policy,
)

from .strategies import owners

MMA16 = find_instruction(MMA, "bfloat16", "bfloat16", "float32", 80)
WG = find_instruction(WGMMA, "bfloat16", "bfloat16", "float32", 90)
WG8 = find_instruction(WGMMA, "int8", "int8", "int32", 90)


def split(policy, m, n, warps, inst=MMA16, **kwargs):
    p = partition(policy, m, n, warps, inst, **kwargs)
    return p.m_warps, p.n_warps


@pytest.mark.parametrize("m, n, warps, expected", [
    (128, 128, 4, (2, 2)), (128, 256, 8, (2, 4)), (256, 128, 8, (4, 2)), (64, 256, 4, (1, 4)), (256, 64, 4, (4, 1)),
    (128, 128, 8, (4, 2)), (128, 128, 1, (1, 1)), (16, 128, 4, (1, 4)), (32, 8, 2, (2, 1)), (64, 512, 8, (1, 8)),
    (192, 96, 6, (3, 2))])
def test_square_honours_the_real_aspect(m, n, warps, expected):
    assert split("Square", m, n, warps) == expected


@pytest.mark.parametrize("m, n, warps", list(itertools.product(
    [16, 64, 96, 128, 256], [8, 24, 64, 128, 512], [1, 2, 4, 6, 8])))
def test_square_is_the_best_possible_split(m, n, warps):
    possible = [(a, warps // a) for a in range(1, warps + 1)
                if warps % a == 0 and m % (16 * a) == 0 and n % (8 * (warps // a)) == 0]
    if not possible:
        with pytest.raises(LayoutError, match="no split of"):
            split("Square", m, n, warps)
        return
    chosen = split("Square", m, n, warps)

    def key(s):
        return round(abs(math.log(m / s[0] / (n / s[1]))), 9), m * s[1] + n * s[0]

    assert chosen in possible and key(chosen) == min(map(key, possible))


def test_full_policies():
    assert split("FullRow", 128, 64, 8) == (8, 1)
    assert split("FullCol", 64, 64, 8) == (1, 8)
    assert split("FullRow", 128, 64, 8, WG) == (8, 1)
    p = partition("FullCol", 64, 512, 8, WG)
    assert (p.m_warps, p.n_warps, p.m_groups, p.n_groups) == (4, 2, 1, 2)
    assert (p.instruction_n, p.n_repeat, p.group_n, p.warps) == (256, 1, 256, 8)
    assert split("Tile64x64", 128, 192, 6) == (2, 3)
    assert split("Tile64x64", 128, 64, 8, WG) == (8, 1)


@pytest.mark.parametrize("policy, m, n, warps, inst", [
    (p, m, n, w, i) for p in ("Square", "FullRow", "FullCol") for m, n, w, i in
    [(128, 256, 8, MMA16), (128, 384, 4, MMA16), (256, 512, 8, WG), (128, 160, 4, WG), (128, 80, 8, WG8)]])
def test_groups_cover_the_tile(policy, m, n, warps, inst):
    p = partition(policy, m, n, warps, inst)
    assert (p.padded_m, p.padded_n) == (m, n) and p.warps == warps
    assert p.m_groups * p.n_groups * inst.warps == warps
    assert p.instruction_n in inst.valid_n and p.instruction_n <= 256
    assert WarpPartition.from_json(json.loads(json.dumps(p.to_json()))) == p
    assert p.operand_bytes(64, 16, 16) == (m * p.n_groups + n * p.m_groups) * 64 * 2


def test_instruction_n_is_the_largest_that_divides():
    assert partition("FullRow", 64, 512, 4, WG).instruction_n == 256
    assert partition("FullRow", 64, 264, 4, WG).instruction_n == 88
    assert partition("FullRow", 64, 40, 4, WG8).instruction_n == 8
    assert partition("FullRow", 64, 160, 4, WG8).instruction_n == 160


@pytest.mark.parametrize("policy, m, n, warps, inst, message", [
    ("FullRow", 64, 64, 8, MMA16, r"FullRow: 8 x 1 warps do not fit a 64x64 tile with mma: M has to be a multiple of "
                                  r"128.*splits that fit: 1 x 8, 2 x 4, 4 x 2"),
    ("FullCol", 64, 32, 8, MMA16, "N of 64.*splits that fit"),
    ("Square", 16, 8, 4, MMA16, "no split of 4 warps fits a 16x8 tile.*use 32 threads or a larger tile"),
    ("Square", 128, 128, 6, WG, "6 warps do not form warpgroups of 4.*multiple of 128 threads"),
    ("Square", 8, 128, 4, MMA16, r"M = 8 is no multiple of 16.*use M = 16"),
    ("Square", 32, 128, 4, WG, r"M = 32 is no multiple of 64, the m of wgmma"),
    ("Square", 64, 12, 4, MMA16, r"N = 12 is no multiple of 8.*use N = 16"),
    ("FullRow", 64, 64, 8, WG, "2 x 1 warpgroups do not fit"),
    ("Tile64x64", 128, 128, 8, MMA16, r"each warp of 8 warps.*use 4 warps \(128 threads\)"),
    ("Tile64x64", 128, 128, 8, WG, r"each warpgroup of 8 warps.*use 16 warps \(512 threads\)"),
    ("Squre", 64, 64, 4, MMA16, "unknown warp policy 'Squre'.*Square, FullRow, FullCol, Tile64x64"),
    ("Square", 0, 64, 4, MMA16, "have to be positive"),
])
def test_impossible_partitions_say_what_to_change(policy, m, n, warps, inst, message):
    with pytest.raises(LayoutError, match=message) as caught:
        partition(policy, m, n, warps, inst)
    assert isinstance(caught.value, ValueError) and caught.value.advice


def test_padding_fits_every_builtin_policy():
    for policy, m, n, warps in itertools.product(("Square", "FullRow", "FullCol"), (1, 8, 16, 33, 100), (1, 8, 60),
                                                 (1, 2, 4, 8)):
        p = partition(policy, m, n, warps, MMA16, pad=True)
        assert p.padded_m >= m and p.padded_n >= n and (p.M, p.N) == (m, n)
    p = partition("Square", 8, 64, 4, MMA16, pad=True)
    assert (p.padded_m, p.padded_n, p.m_warps, p.n_warps) == (16, 64, 1, 4)
    p = partition("Square", 8, 64, 4, WG, pad=True)
    assert (p.padded_m, p.instruction_n) == (64, 64)


def test_user_policies_are_checked():
    known = policy_names()  # other tests may have registered some
    assert known[:4] == ("Square", "FullRow", "FullCol", "Tile64x64")
    register_policy("tall", lambda m, n, warps, instruction: (warps // 2, 2))
    try:
        assert policy_names() == (*known, "tall")
        assert split("tall", 128, 64, 8) == (4, 2)
        assert split("tall", 128, 64, 8, WG) == (4, 2)
        with pytest.raises(LayoutError, match="m_warps = 2, but the 4 warps of a warpgroup lie along M"):
            split("tall", 64, 64, 4, WG)
        with pytest.raises(LayoutError, match="do not fit"):
            split("tall", 32, 64, 8)
        for bad, message in [((3, 2), "3 x 2 warps for 8"), ((8,), "two positive ints"), (None, "two positive ints"),
                             ((8.0, 1), "two positive ints"), ((-8, -1), "two positive ints")]:
            register_policy("tall", lambda *_, value=bad: value)
            with pytest.raises(LayoutError, match=message):
                split("tall", 128, 64, 8)
    finally:
        unregister_policy("tall")
    with pytest.raises(LayoutError, match="unknown warp policy"):
        split("tall", 128, 64, 8)
    for name, fn in (("Square", lambda *_: (1, 1)), ("", lambda *_: (1, 1)), ("x", 3)):
        with pytest.raises(LayoutError):
            register_policy(name, fn)
    with pytest.raises(LayoutError):
        unregister_policy("Square")


@pytest.mark.parametrize("m, n, warps, expected", [
    (64, 32, 8, (4, 1)),  # rows whole, where splits read equally much
    (64, 64, 8, (2, 2)), (16, 64, 4, (1, 2)), (128, 16, 16, (8, 1)), (32, 8, 2, (1, 1))])
def test_halves_of_k_read_less(m, n, warps, expected):
    whole = partition("Square", m, n, warps, MMA16)
    part = halves_of_k(whole, MMA16)
    assert (part.m_groups, part.n_groups, part.k_groups, part.warps) == (*expected, 2, warps)
    assert (part.padded_m, part.padded_n) == (m, n)
    assert part.operand_bytes(64, 16, 16) < whole.operand_bytes(64, 16, 16)
    assert WarpPartition.from_json(json.loads(json.dumps(part.to_json()))) == part
    held = accumulator_fragment(MMA16, part)
    found = owners(held)
    assert held.used_threads == warps * 32 and held.replication == 1
    assert len(found) == m * n and all(len(places) == 1 for places in found.values())
    for (row, _), places in found.items():
        ((thread, _),) = places
        assert thread // 32 % 2 == row // 8 % 2  # of a pair one warp keeps the upper rows of each instruction
    with pytest.raises(LayoutError, match="read A from shared memory"):
        a_fragment(MMA16, part, 64)


def test_no_halves_of_k():
    assert halves_of_k(partition("Square", 64, 64, 8, WG), WG) is None
    assert halves_of_k(partition("Square", 64, 64, 1, MMA16), MMA16) is None
    assert halves_of_k(partition("Square", 24, 64, 4, MMA16, pad=True), MMA16) is None
