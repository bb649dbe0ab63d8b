"""Fragment: ownership, inverse, canonical form, derived layouts, JSON."""

import itertools
import json
import random

import numpy as np
import pytest

from tvm_tile.layout import REG, THREAD, Digit, Fragment, LayoutError, Replica

from .strategies import inside, owners, random_fragment

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_is_owned_as_often_as_claimed(seed):
    f = random_fragment(random.Random(seed))
    found = owners(f)
    assert set(found) == set(itertools.product(*map(range, f.padded_shape)))
    assert all(len(pairs) == f.replication for pairs in found.values())
    assert all(len({t for t, _ in pairs}) == f.replication for pairs in found.values())
    assert f.used_threads * f.registers == len(found) * f.replication


@pytest.mark.parametrize("seed", SEEDS)
def test_owner_and_coords_are_inverse(seed):
    f = random_fragment(random.Random(seed))
    for coords, pairs in owners(f).items():
        assert {f.owner(coords, rep) for rep in range(f.replication)} == pairs
        for thread, reg in pairs:
            assert f.register_of(coords) == reg
            assert tuple(a + b for a, b in zip(f.thread_part(thread), f.reg_part(reg), strict=True)) == coords
            assert f.coords(thread, reg) == coords


@pytest.mark.parametrize("seed", SEEDS)
def test_exactly_one_thread_is_primary(seed):
    f = random_fragment(random.Random(seed))
    primary = [t for t in range(f.threads) if f.is_primary(t)]
    assert all(f.active(t) for t in primary)
    assert [t for t in range(f.threads) if f.active(t)] == list(range(f.used_threads))
    stores = [f.coords(t, r) for t in primary for r in range(f.registers)]
    assert len(stores) == len(set(stores)) == np.prod(f.padded_shape, dtype=int)


@pytest.mark.parametrize("seed", SEEDS)
def test_json_round_trip(seed):
    f = random_fragment(random.Random(seed))
    text = json.dumps(f.to_json())
    again = Fragment.from_json(json.loads(text))
    assert again == f and hash(again) == hash(f) and repr(again) == repr(f)


@pytest.mark.parametrize("seed", SEEDS)
def test_splitting_digits_changes_nothing(seed):
    """Canonical form: a digit written as two nested ones is the same layout."""
    rng = random.Random(seed)
    f = random_fragment(rng)
    split = []
    for dim in f.digits:
        digits = []
        for d in dim:
            inner = rng.choice([s for s in range(1, d.size + 1) if d.size % s == 0])
            digits += [Digit(d.size // inner, d.place, d.stride * inner), Digit(inner, d.place, d.stride),
                       Digit(1, THREAD, 1)]
        split.append(tuple(digits))
    again = Fragment(f.shape, tuple(split), f.replicate, f.threads)
    assert again == f and hash(again) == hash(f)


@pytest.mark.parametrize("seed", SEEDS)
def test_different_maps_are_different_fragments(seed):
    f, g = random_fragment(random.Random(seed), 64, 2), random_fragment(random.Random(seed + 1000), 64, 2)
    same_map = f.shape == g.shape and f.threads == g.threads and owners(f) == owners(g)
    assert (f == g) == same_map


@pytest.mark.parametrize("seed", SEEDS)
def test_numpy_indices_agree_with_ints(seed):
    f = random_fragment(random.Random(seed))
    threads, regs = np.meshgrid(np.arange(f.used_threads), np.arange(f.registers), indexing="ij")
    coords = [np.broadcast_to(c, threads.shape) for c in f.coords(threads, regs)]
    owner_t, owner_r = (np.broadcast_to(v, threads.shape) for v in f.owner(coords))
    for t, r in itertools.product(range(f.used_threads), range(f.registers)):
        assert tuple(int(c[t, r]) for c in coords) == f.coords(t, r)
        assert (int(owner_t[t, r]), int(owner_r[t, r])) == f.owner(f.coords(t, r))


@pytest.mark.parametrize("seed", SEEDS)
def test_transpose(seed):
    rng = random.Random(seed)
    f = random_fragment(rng)
    perm = list(range(f.ndim))
    rng.shuffle(perm)
    g = f.transpose(perm)
    assert g.shape == tuple(f.shape[p] for p in perm)
    for t, r in itertools.product(range(f.used_threads), range(f.registers)):
        assert g.coords(t, r) == tuple(f.coords(t, r)[p] for p in perm)
    assert f.transpose().transpose() == f


@pytest.mark.parametrize("place", [REG, THREAD])
@pytest.mark.parametrize("seed", SEEDS)
def test_repeat(seed, place):
    rng = random.Random(seed)
    f = random_fragment(rng)
    f = f.crop(f.padded_shape) if not f.is_padded else Fragment(f.padded_shape, f.digits, f.replicate, f.threads)
    dim, n = rng.randrange(f.ndim), rng.choice([1, 2, 3])
    g = f.repeat(dim, n, place)
    assert g.shape[dim] == n * f.shape[dim]
    for t, r, i in itertools.product(range(f.used_threads), range(f.registers), range(n)):
        expected = list(f.coords(t, r))
        expected[dim] += i * f.shape[dim]
        where = (t + i * f.used_threads, r) if place == THREAD else (t, r + i * f.registers)
        assert g.coords(*where) == tuple(expected)


def test_repeat_of_a_padded_dimension_is_refused():
    f = Fragment((3,), ((Digit(4, THREAD, 1),),))
    with pytest.raises(LayoutError, match=r"padded \(3 of 4\)"):
        f.repeat(0, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_replicated(seed):
    f = random_fragment(random.Random(seed))
    g = f.replicated(3)
    assert g.replication == 3 * f.replication
    for t, r, i in itertools.product(range(f.used_threads), range(f.registers), range(3)):
        assert g.coords(t + i * f.used_threads, r) == f.coords(t, r)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("keepdims", [False, True])
def test_reduce_keeps_the_threads_of_every_element(seed, keepdims):
    rng = random.Random(seed)
    f = random_fragment(rng)
    dim = rng.randrange(f.ndim)
    g = f.reduce(dim, keepdims)
    expected: dict = {}
    for coords, pairs in owners(f).items():
        key = list(coords)
        if keepdims:
            key[dim] = 0
        else:
            del key[dim]
        expected.setdefault(tuple(key), set()).update(t for t, _ in pairs)
    assert {c: {t for t, _ in pairs} for c, pairs in owners(g).items()} == expected
    assert g.registers == len({tuple(c for i, c in enumerate(f.reg_part(r)) if i != dim) for r in range(f.registers)})


@pytest.mark.parametrize("seed", SEEDS)
def test_expand_and_broadcast(seed):
    rng = random.Random(seed)
    f = random_fragment(rng, 256, 1)
    held = {c: {t for t, _ in pairs} for c, pairs in owners(f).items()}
    for g, at in ((f.expand(0, 5), 0), (f.expand(-1, 5), 1)):
        assert g.shape[at] == 5 and g.used_threads == f.used_threads and g.registers == 5 * f.registers
        for coords, pairs in owners(g).items():
            assert {t for t, _ in pairs} == held[(coords[1 - at],)]
    row = f.expand(1, 1)
    assert row.shape == (f.shape[0], 1)
    assert row.broadcast_to((f.shape[0], 5)) == f.expand(1, 5)
    assert f.broadcast_to((5, f.shape[0])) == f.expand(0, 5)
    with pytest.raises(LayoutError, match="does not broadcast"):
        f.expand(0, 2).broadcast_to((3, f.shape[0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_reshape_keeps_row_major_order(seed):
    rng = random.Random(seed)
    f = random_fragment(rng)
    if f.padded_shape[1:] != f.shape[1:]:
        with pytest.raises(LayoutError, match="pads it"):
            f.reshape((int(np.prod(f.shape)),))
        return
    flat = f.reshape((int(np.prod(f.shape)),))
    for t, r in itertools.product(range(f.used_threads), range(f.registers)):
        index = 0
        for c, n in zip(f.coords(t, r), f.padded_shape, strict=True):
            index = index * n + c
        assert flat.coords(t, r) == (index,)
    if not f.is_padded:
        assert flat.reshape(f.shape) == f
        assert f.reshape((1, *f.shape, 1)).reshape(f.shape) == f


def test_reshape_that_cuts_a_digit_is_refused():
    f = Fragment((6, 4), ((Digit(6, THREAD, 1),), (Digit(4, REG, 1),)))
    assert f.reshape((2, 12)).shape == (2, 12)
    with pytest.raises(LayoutError, match=r"cannot reshape \(6, 4\) to \(8, 3\)"):
        f.reshape((8, 3))
    with pytest.raises(LayoutError, match="24 and 25 elements"):
        f.reshape((25,))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_vector_width(seed, bits):
    f = random_fragment(random.Random(seed))
    for dim in range(f.ndim):
        width = f.vector_width(dim, bits)
        assert width * bits <= 128 and width & (width - 1) == 0
        for t, r in itertools.product(range(f.used_threads), range(0, f.registers, width)):
            base = f.coords(t, r)
            assert base[dim] % width == 0
            for v in range(width):
                assert f.coords(t, r + v) == tuple(c + v * (i == dim) for i, c in enumerate(base))
        doubled = 2 * width
        if doubled * bits <= 128 and f.registers % doubled == 0 and width < f.registers:
            # A wider vector must not have been possible.
            assert any(f.coords(0, r + v)[dim] - f.coords(0, r)[dim] != v or f.coords(0, r)[dim] % doubled
                       for r in range(0, f.registers, doubled) for v in range(doubled))


def test_bounds_name_the_padded_dimensions():
    f = Fragment((5, 4), ((Digit(8, THREAD, 1),), (Digit(4, REG, 1),)), (), 16)
    assert f.bounds() == ((0, 5),) and f.is_padded and f.padded_shape == (8, 4)
    assert {c for c in owners(f) if inside(c, f.shape)} == set(itertools.product(range(5), range(4)))
    assert "padded to 8x4" in repr(f) and "8 of 16 threads" in repr(f)


@pytest.mark.parametrize("digits, replicate, threads, message", [
    (((Digit(4, THREAD, 1), Digit(2, THREAD, 2)),), (), 0, "gap or overlap"),
    (((Digit(4, REG, 2),),), (), 0, "register digits"),
    (((Digit(4, THREAD, 1),),), (Replica(2, 8),), 0, "next stride has to be 4"),
    (((Digit(4, THREAD, 1),),), (), 2, "needs 4 threads, the CTA has 2"),
    (((Digit(2, THREAD, 1),),), (), 0, "cover 2 of 4"),
    (((Digit(4, "x", 1),),), (), 0, "is placed in"),
    (((Digit(4, THREAD, 0),),), (), 0, "positive"),
])
def test_malformed_fragments_are_refused(digits, replicate, threads, message):
    with pytest.raises(LayoutError, match=message):
        Fragment((4,), digits, replicate, threads)


def test_generated_index_code_is_lean():
    """A digit at stride 1 needs no division, one at the top no modulo: what the index functions do is counted."""

    class Counting(int):
        ops = 0

        def _count(self, value):
            Counting.ops += 1
            return Counting(value)

        def __add__(self, other):
            return self._count(int(self) + int(other))

        __radd__ = __add__

        def __mul__(self, other):
            return self._count(int(self) * int(other))

        __rmul__ = __mul__

        def __floordiv__(self, other):
            return self._count(int(self) // int(other))

        def __mod__(self, other):
            return self._count(int(self) % int(other))

    f = Fragment((8, 16), ((Digit(8, THREAD, 4),), (Digit(4, THREAD, 1), Digit(4, REG, 1))))
    assert f.coords(Counting(13), Counting(2)) == (3, 6)
    assert Counting.ops == 4  # t // 4; t % 4, * 4, + r
