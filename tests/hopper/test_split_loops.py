"""Loops cut where a uniform branch changes: every iteration once, in order, with the side of the branch it takes."""

import math

import pytest
import torch
import tvm
from tvm import tirx
from tvm.ir import Var

import tvm_tile.language as T
from tvm_tile.ir.visit import substitute
from tvm_tile.lower.cuda import overlap
from tvm_tile.lower.cuda.program import LoopNode
from tvm_tile.lower.cuda.split_loops import ranges, split_at_branch
from tvm_tile.ops import flash_attention

from .harness import decided, simulated

k, m, n = (Var(name, "int32") for name in "kmn")

#: Conditions over the loop variable k and the parameters m and n, and what they mean.
CONDITIONS = [
    (k < m, lambda k, m, n: k < m),
    (k >= m, lambda k, m, n: k >= m),
    (m <= k, lambda k, m, n: m <= k),
    (m > k, lambda k, m, n: m > k),
    (k * 3 + 1 < m, lambda k, m, n: 3 * k + 1 < m),
    (k * 3 - 1 >= m, lambda k, m, n: 3 * k - 1 >= m),
    (n - k * 2 > m, lambda k, m, n: n - 2 * k > m),
    (n - k * 2 <= m, lambda k, m, n: n - 2 * k <= m),
    (tirx.EQ(k, m), lambda k, m, n: k == m),
    (tirx.NE(k, m), lambda k, m, n: k != m),
    (tirx.EQ(k * 2, m), lambda k, m, n: 2 * k == m),
    (tirx.And(k >= m, k < n), lambda k, m, n: m <= k < n),
    (tirx.Or(k < m, k >= n), lambda k, m, n: k < m or k >= n),
    (tirx.Or(tirx.Or(k * 4 + 4 > m, k * 4 > n), k < 2), lambda k, m, n: 4 * k + 4 > m or 4 * k > n or k < 2),
    (tirx.Not(tirx.Or(k < m, k >= n)), lambda k, m, n: not (k < m or k >= n)),
    (tirx.And(tirx.Not(k < m), tirx.And(k < n, k < 5)), lambda k, m, n: m <= k < n and k < 5),
]


def value(expression, values: dict) -> int:
    """An integer expression with all its variables given."""
    at = {var: tirx.const(number, "int32") for var, number in values.items()}
    return int(tvm.sym.Analyzer().simplify(substitute(tirx.convert(expression), at)))


@pytest.mark.parametrize("number", range(len(CONDITIONS)))
def test_ranges_cover_the_loop(number):
    condition, meaning = CONDITIONS[number]
    start, extent = Var("first", "int32"), Var("trips", "int32")
    binds, parts = ranges(condition, k, start, extent)
    assert 2 <= len(parts) <= 3
    for first in (0, 1):
        for trips in (-1, 0, 1, 2, 5):
            for low in (-3, 0, 1, 2, 4, 9):
                for high in (-1, 0, 2, 3, 9):
                    values = {start: first, extent: trips, m: low, n: high}
                    for bind in binds:
                        values[bind.var] = value(bind.value, values)
                    got = []
                    for begin, length, taken in parts:
                        begin = value(begin, values)
                        got += [(i, taken) for i in range(begin, begin + max(value(length, values), 0))]
                    assert got == [(i, meaning(i, low, high)) for i in range(first, first + trips)], (values, parts)


@pytest.mark.parametrize(
    "condition",
    [
        tirx.EQ(tirx.floormod(k, 2), 0),  # changes all the time
        tirx.floordiv(k, 2) < m,  # not affine
        k * k < m,
        m < n,  # does not depend on the loop
        tirx.And(tirx.NE(k, m), tirx.NE(k, n)),  # fails at two points
        k < tirx.BufferLoad(tirx.decl_buffer((4,), "int32"), [0]),  # may change
        k * m < n,
        k < (1 << 30) + m,  # could overflow
    ],
)
def test_other_conditions_stay(condition):
    assert ranges(condition, k, 0, 8) == ([], [])


def test_values_of_an_iteration_stay():
    assert ranges(k < m, k, 0, 8, {m}) == ([], [])


def test_constant_ranges_disappear():
    """A branch for the first iteration alone, of a loop that begins behind it, leaves one loop."""
    binds, parts = ranges(tirx.EQ(k, 0), k, 1, 7)
    assert not binds
    assert [(int(first), int(length), taken) for first, length, taken in parts] == [(1, 7, False)]


def switched(kind: str):
    """Two products an iteration, and a branch on the scores between them."""

    @T.prim_func
    def main(
        Q: T.Tensor((64, 64), "float16"), K: T.Tensor((512, 64), "float16"), V: T.Tensor((512, 64), "float16"),
        Out: T.Tensor((64, 64), "float32"), trips: T.int32, low: T.int32, high: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=128) as bx:
            Q_s = T.alloc_shared((64, 64), "float16")
            K_s = T.alloc_shared((64, 64), "float16")
            V_s = T.alloc_shared((64, 64), "float16")
            scores = T.alloc_fragment((64, 64), "float32")
            rounded = T.alloc_fragment((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.copy(Q[bx * 64, 0], Q_s)
            T.clear(acc)
            for i in T.Pipelined(trips, num_stages=2):
                T.copy(K[i * 64, 0], K_s)
                T.gemm(Q_s, K_s, scores, transpose_B=True, clear_accum=True)
                outside = T.Or(i < low, i >= high)
                if kind == "interval":
                    outside = T.And(i >= low, i < high)
                elif kind == "once":
                    outside = i == low
                elif kind == "late":
                    outside = i * 2 > low
                if outside:
                    for r, c in T.Parallel(64, 64):
                        scores[r, c] = scores[r, c] * 2 + 1
                else:
                    if i >= high:
                        for r, c in T.Parallel(64, 64):
                            scores[r, c] = -scores[r, c]
                T.copy(scores, rounded)
                T.copy(V[i * 64, 0], V_s)
                T.gemm(rounded, V_s, acc)
            T.copy(acc, Out[bx * 64, 0])

    return main


MEANING = {
    "ends": lambda i, low, high: i < low or i >= high,
    "interval": lambda i, low, high: low <= i < high,
    "once": lambda i, low, high: i == low,
    "late": lambda i, low, high: 2 * i > low,
}


@pytest.fixture
def split(monkeypatch):
    """How many loops each loop became."""
    counts: list[int] = []

    def counting(loop):
        made = split_at_branch(loop)
        counts.append(sum(isinstance(n, LoopNode) for n in made))
        return made

    monkeypatch.setattr(overlap, "split_at_branch", counting)
    return counts


@pytest.mark.parametrize("kind", MEANING)
def test_switched_products(kind, split):
    func = decided(switched(kind))
    kernel = simulated(func)
    assert split == [2 if kind == "late" else 3]
    generator = torch.Generator().manual_seed(3)
    q, keys, values = (torch.randn(rows, 64, generator=generator).half() / 8 for rows in (64, 512, 512))
    for trips, low, high in [
        (0, 0, 0), (1, 0, 0), (1, 1, 1), (2, 1, 2), (2, 0, 1), (3, 1, 2), (4, 2, 2), (5, 3, 1), (6, 2, 4), (6, -1, 9),
    ]:  # fmt: skip
        want = torch.zeros(64, 64, dtype=torch.float64)
        for i in range(trips):
            tile = slice(i * 64, i * 64 + 64)
            scores = q.double() @ keys[tile].double().T
            if MEANING[kind](i, low, high):
                scores = scores * 2 + 1
            elif i >= high:
                scores = -scores
            want += scores.float().half().double() @ values[tile].double()
        out = torch.full((64, 64), math.nan)
        kernel(q, keys, values, out, trips, low, high)
        assert torch.isfinite(out).all()
        # a score may be rounded to the neighbouring float16
        torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3, msg=f"{trips, low, high}")


def attention(q, keys, values, causal: bool, window: int | None):
    """Attention of one head in float64, and which rows see a key."""
    rows, columns = len(q), len(keys)
    position = torch.arange(rows)[:, None] + columns - rows
    key = torch.arange(columns)[None, :]
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= (key > position - window) & (key < position + window)
    scores = (q.double() @ keys.double().T * q.shape[1] ** -0.5).masked_fill(~seen, -math.inf)
    weights = torch.where(seen.any(1, keepdim=True), scores.softmax(1), 0)
    return weights @ values.double()


@pytest.mark.parametrize(
    ("causal", "window", "parts"),
    [(True, None, 2), (True, 70, 3), (True, 8, 3), (False, 50, 3), (False, None, 2)],
)
def test_attention_with_masks_at_the_ends(causal, window, parts, split):
    """Ragged lengths, no key for some rows, and so few keys that parts of the loop are empty."""
    tiles = {"block_M": 64, "block_N": 32, "num_stages": 2, "threads": 128}
    func = flash_attention(1, 1, None, None, 64, causal=causal, window=window, lse=False, target="sm_90", **tiles)
    kernel = simulated(decided(func))
    assert split == [parts]
    generator = torch.Generator().manual_seed(5)
    for rows, columns in [(150, 150), (70, 231), (90, 40), (1, 33)]:
        q, keys, values = (torch.randn(1, s, 1, 64, generator=generator).half() for s in (rows, columns, columns))
        out = torch.full_like(q, math.nan)
        kernel(q, keys, values, out)
        want = attention(q[0, :, 0], keys[0, :, 0], values[0, :, 0], causal, window)
        torch.testing.assert_close(out[0, :, 0].double(), want, rtol=5e-3, atol=3e-3, msg=f"{rows, columns}")


def test_variable_lengths_keep_the_second_branch(split):
    """The branch that clears rows of V stands in the masked part alone; a sequence may be empty."""
    tiles = {"block_M": 64, "block_N": 32, "num_stages": 2, "threads": 128}
    func = flash_attention(3, 1, None, None, 64, causal=True, varlen=True, lse=False, target="sm_90", **tiles)
    kernel = simulated(decided(func))
    assert split == [2]
    lengths = [(70, 100), (0, 10), (65, 65)]
    cu_q = torch.tensor([0, 70, 70, 135], dtype=torch.int32)
    cu_k = torch.tensor([0, 100, 110, 175], dtype=torch.int32)
    generator = torch.Generator().manual_seed(6)
    q, keys, values = (torch.randn(s, 1, 64, generator=generator).half() for s in (135, 175, 175))
    out = torch.full_like(q, math.nan)
    kernel(q, keys, values, cu_q, cu_k, out)
    for number, (rows, columns) in enumerate(lengths):
        here, there = int(cu_q[number]), int(cu_k[number])
        tile = slice(there, there + columns)
        want = attention(q[here : here + rows, 0], keys[tile, 0], values[tile, 0], True, None)
        torch.testing.assert_close(out[here : here + rows, 0].double(), want, rtol=5e-3, atol=3e-3)


@pytest.mark.parametrize(
    "options",
    [{"bias": True, "causal": True, "block_M": 128}, {"block_M": 192, "threads": 384, "window": 60}],
    ids=["loads", "registers"],
)
def test_loops_without_room_stay_whole(options, split):
    """Addresses of plain loads, and fragments that fill the registers: the parts of a loop would spill."""
    tiles = {"block_M": 128, "block_N": 128, "num_stages": 2, "threads": 256, **options}
    func = flash_attention(1, 1, None, None, 64, lse=False, target="sm_90", **tiles)
    simulated(decided(func))
    assert split == []
