"""Default fragments: any shape, any thread count."""

import itertools
import random

import pytest

from tvm_tile.layout import LayoutError, default_fragment, replicated_fragment

from .strategies import owners

SHAPES = [(1,), (7,), (64,), (1000,), (576,), (1, 1), (60, 60), (64, 64), (128, 24), (33, 7), (5, 1), (1, 5), (3, 5, 7),
          (2, 16, 32), (2, 3, 4, 6)]
THREADS = [1, 8, 16, 31, 32, 96, 128]


@pytest.mark.parametrize("shape, threads", list(itertools.product(SHAPES, THREADS)))
def test_covers_every_element_once(shape, threads):
    for bits in (8, 16, 32):
        f = default_fragment(shape, threads, bits)
        assert f.shape == shape and f.threads == threads and f.replication == 1
        found = owners(f)
        assert set(itertools.product(*map(range, shape))) <= set(found)
        assert all(len(p) == 1 for p in found.values())


@pytest.mark.parametrize("shape, threads", list(itertools.product(SHAPES, THREADS)))
def test_work_is_spread(shape, threads):
    """No thread has more than about twice its share (odd extents cannot always be split evenly)."""
    f = default_fragment(shape, threads, 32)
    count = 1
    for n in shape:
        count *= n
    share = -(-count // threads)
    assert f.registers <= max(4, 2 * share)


def test_full_tiles_are_coalesced_vectors():
    f = default_fragment((128, 64), 128, 16)
    assert f.vector_width(1, 16) == 8 and f.used_threads == 128 and not f.is_padded
    assert [f.coords(t, 0) for t in (0, 1, 7, 8)] == [(0, 0), (0, 8), (0, 56), (1, 0)]
    assert default_fragment((128, 64), 128, 16, max_vector_bits=64).vector_width(1, 16) == 4
    assert default_fragment((64,), 64, 16).registers == 1, "threads before vectors"


def test_random_shapes():
    rng = random.Random(3)
    for _ in range(60):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3)))
        f = default_fragment(shape, rng.randint(1, 300), rng.choice([8, 16, 32, 64]))
        seen = set(owners(f))
        assert set(itertools.product(*map(range, shape))) <= seen


def test_large_shapes_are_quick():
    f = default_fragment((65536, 3, 4099), 1024, 16)
    assert f.registers < 2 * 65536 * 3 * 4099 / 1024


def test_replicated():
    f = replicated_fragment((3, 5), 33)
    assert f.replication == 33 and f.registers == 15 and f.register_of((2, 4)) == 14
    assert default_fragment((), 32, 32).replication == 32
    assert [t for t in range(33) if f.is_primary(t)] == [0]


@pytest.mark.parametrize("shape, threads", [((0, 4), 32), ((4,), 0)])
def test_nonsense_is_refused(shape, threads):
    with pytest.raises(LayoutError, match="at least 1"):
        default_fragment(shape, threads, 32)
