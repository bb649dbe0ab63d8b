"""Containment, register correspondence and reduction plans, against brute force."""

import itertools
import random

import pytest

from tvm_tile.layout import (
    BROADCAST,
    THREAD,
    Digit,
    Fragment,
    LayoutError,
    contains,
    default_fragment,
    lanes_for_reduce,
    register_in,
    replicated_fragment,
    same_owners,
)
from tvm_tile.layout.relations import _provably_contains

from .strategies import inside, owners, random_fragment

SEEDS = range(80)


def same_shape(f, g):
    """Crop both to the common extents."""
    shape = [min(a, b) for a, b in zip(f.shape, g.shape, strict=True)]
    return f.crop(shape), g.crop(shape)


def contains_by_enumeration(holder, reader):
    held = owners(holder)
    for coords, pairs in owners(reader).items():
        if inside(coords, reader.shape) and not {t for t, _ in pairs} <= {t for t, _ in held[coords]}:
            return False
    return True


def variants(seed):
    """Pairs of fragments that are often, but not always, related."""
    rng = random.Random(seed)
    f = random_fragment(rng, 512, 2)
    dim = rng.randrange(2)
    yield f, f
    yield same_shape(f, random_fragment(rng, 512, 2))
    # The same threads with other register orders and splits, and replicated further.
    if not f.is_padded:
        g = Fragment(f.shape, f.digits, f.replicate)
        yield g.replicated(2), g.with_threads(2 * g.used_threads)
        yield g.with_threads(2 * g.used_threads), g.replicated(2)
    row = f.reduce(dim).expand(dim, f.padded_shape[dim]).crop(f.shape)
    yield row, f
    yield f, row
    yield same_shape(f, replicated_fragment(f.shape, f.threads))
    yield same_shape(replicated_fragment(f.shape, f.threads), f)


@pytest.mark.parametrize("seed", SEEDS)
def test_contains(seed):
    for holder, reader in variants(seed):
        expected = contains_by_enumeration(holder, reader)
        assert contains(holder, reader) == expected, (holder, reader)
        assert not _provably_contains(holder, reader, (0, 1)) or expected


@pytest.mark.parametrize("seed", SEEDS)
def test_reduced_value_is_readable_where_it_was_reduced(seed):
    rng = random.Random(seed)
    f = random_fragment(rng)
    for dim in range(f.ndim):
        if f.shape[dim] == f.padded_shape[dim]:
            wide = f.reduce(dim).expand(dim, f.shape[dim])
            assert contains(wide, f)
            assert _provably_contains(wide, f, range(f.ndim)), "the usual case has to be decided without enumeration"


@pytest.mark.parametrize("seed", SEEDS)
def test_register_in(seed):
    seen = 0
    for holder, reader in variants(seed):
        if not contains(holder, reader):
            continue
        for coords, pairs in owners(reader).items():
            for thread, reg in pairs:
                seen += 1
                found = register_in(holder, reader, thread, reg)
                assert 0 <= found < holder.registers
                assert found == holder.register_of(coords) or not inside(coords, reader.shape)
    assert seen


@pytest.mark.parametrize("seed", SEEDS)
def test_projected_reads(seed):
    """``row[i]``, ``a[j, i]`` and ``keep[i, 0]`` in a loop over (i, j)."""
    rng = random.Random(seed)
    f = random_fragment(rng, 512, 2)
    dim = rng.randrange(2)
    other = random_fragment(rng, 128, 1)
    cases = [(f.reduce(1 - dim), (dim,)), (f.transpose(), (1, 0)),
             (f.reduce(1, keepdims=True), (0, BROADCAST)), (f.reduce(0, keepdims=True), (BROADCAST, 1)),
             (replicated_fragment((f.shape[dim],), f.threads), (dim,)),
             (replicated_fragment((1,), f.threads), (BROADCAST,))]
    if other.shape[0] >= f.shape[dim]:
        cases.append((other.crop((f.shape[dim],)), (dim,)))
    visited = {c: pairs for c, pairs in owners(f).items() if inside(c, f.shape)}
    for number, (holder, dims) in enumerate(cases):
        held = owners(holder)
        at = {c: tuple(0 if d == BROADCAST else c[d] for d in dims) for c in visited}
        expected = all({t for t, _ in visited[c]} <= {t for t, _ in held[p]} for c, p in at.items())
        assert contains(holder, f, dims) == expected
        assert expected or number >= 4
        if expected:
            for c, p in at.items():
                for thread, reg in visited[c]:
                    assert register_in(holder, f, thread, reg, dims) == holder.register_of(p)


@pytest.mark.parametrize("dim", [0, 1])
def test_register_in_is_constant_for_constant_registers(dim):
    """A row or column vector read in its matrix' layout: a thread in the index would move arrays out of registers."""
    f = default_fragment((64, 64), 128, 16)
    for reg in range(f.registers):
        assert isinstance(register_in(f.reduce(1 - dim), f, object(), reg, (dim,)), int)


def test_contains_needs_equal_shapes():
    f = replicated_fragment((4, 5), 32)
    for other, dims in ((replicated_fragment((4, 6), 32), None), (replicated_fragment((4,), 32), None),
                        (replicated_fragment((4,), 32), (1,)), (replicated_fragment((4,), 32), (2,)),
                        (replicated_fragment((4,), 32), (0, 1)), (replicated_fragment((4,), 32), (BROADCAST,))):
        with pytest.raises(LayoutError):
            contains(other, f, dims)


def test_same_owners_ignores_register_order():
    f = default_fragment((8, 64), 32, 32)
    g = f.transpose()
    assert same_owners(f, f) and not same_owners(f.reshape((512,)), g.reshape((512,)))


# ---- reductions ---------------------------------------------------------------------------------------------------


def run_reduction(fragment, dim, values):
    """Execute a plan literally: registers, butterfly shuffles, shared memory. values: element -> int; sum."""
    plan = lanes_for_reduce(fragment, dim)
    threads = fragment.threads
    partial = [[0] * plan.result.registers for _ in range(threads)]
    for t in range(threads):
        for out, sources in enumerate(plan.registers):
            for reg in sources:
                coords = fragment.coords(t, reg)
                active = t < fragment.used_threads
                partial[t][out] += values.get(coords, 0) if active else 10**9  # surplus threads hold rubbish
    for mask in plan.lane_masks:
        old = [list(p) for p in partial]
        for t in range(threads):
            other = t ^ mask
            assert t // 32 == other // 32
            for out in range(plan.result.registers):
                partial[t][out] = old[t][out] + (old[other][out] if other < threads else 10**9)
    if plan.needs_shared:
        scratch = {}
        for t in range(threads):
            if plan.writes(t):
                slot = (plan.group(t), plan.rank(t))
                assert slot not in scratch, "two threads write one slot"
                assert 0 <= slot[0] < plan.groups and 0 <= slot[1] < plan.ranks
                scratch[slot] = list(partial[t])
        for t in range(fragment.used_threads):
            group = [scratch[plan.group(t), k] for k in range(plan.ranks)]
            partial[t] = [sum(column) for column in zip(*group, strict=True)]
    return plan, partial


@pytest.mark.parametrize("seed", SEEDS)
def test_reduction_plan(seed):
    rng = random.Random(seed)
    f = random_fragment(rng)
    values = {c: rng.randrange(1000) for c in owners(f) if inside(c, f.shape)}
    for dim in range(f.ndim):
        plan, partial = run_reduction(f, dim, values)
        expected: dict = {}
        for coords, value in values.items():
            key = coords[:dim] + coords[dim + 1:]
            expected[key] = expected.get(key, 0) + value
        for t, reg in itertools.product(range(f.used_threads), range(plan.result.registers)):
            coords = plan.result.coords(t, reg)
            if inside(coords, plan.result.shape):
                assert partial[t][reg] == expected[coords]


@pytest.mark.parametrize("shape, threads", [((576,), 128), ((768,), 128), ((4, 576), 96), ((60, 24), 48), ((1,), 32),
                                            ((33, 7), 31), ((128, 1), 256), ((3, 5, 7), 64)])
def test_reductions_of_default_fragments(shape, threads):
    """Tiles that do not divide by the threads, and more threads than elements."""
    f = default_fragment(shape, threads, 32)
    rng = random.Random(5)
    values = {c: rng.randrange(1000) for c in owners(f) if inside(c, shape)}
    for dim in range(len(shape)):
        plan, partial = run_reduction(f, dim, values)
        for coords, pairs in owners(plan.result).items():
            if inside(coords, plan.result.shape):
                expected = sum(v for c, v in values.items() if c[:dim] + c[dim + 1:] == coords)
                assert all(partial[t][r] == expected for t, r in pairs)


def test_digits_that_cross_warps_are_split():
    f = Fragment((256,), ((Digit(128, THREAD, 1), Digit(2, "r", 1)),))
    plan = lanes_for_reduce(f, 0)
    assert plan.lane_masks == (1, 2, 4, 8, 16)
    assert [tuple(d) for d in plan.shared_digits] == [(4, 32)] and plan.ranks == 4 and plan.groups == 1
    plan = lanes_for_reduce(Fragment((24,), ((Digit(24, THREAD, 1),),)), 0)
    assert plan.lane_masks == (1, 2, 4) and [tuple(d) for d in plan.shared_digits] == [(3, 8)]
