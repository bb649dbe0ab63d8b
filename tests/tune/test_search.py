"""The search on made-up times: it needs no kernels to show whether it finds what is fast."""

from __future__ import annotations

import math
import random
import statistics

import pytest

import tvm_tile
from tests.tune.spaces import Add
from tvm_tile.errors import TileError
from tvm_tile.ops import registry
from tvm_tile.tune.cost_model import CostModel
from tvm_tile.tune.database import Database
from tvm_tile.tune.features import own_features
from tvm_tile.tune.search import Evolution, Rejections, Sweep
from tvm_tile.tune.space import Problem, Space, import_meta_schedule, machine_of

SHAPE = {"m": 4096, "n": 4096, "k": 4096}


def make_space(**values) -> Space:
    target = tvm_tile.target("sm_90")
    return Space(Problem.of(registry.get("gemm"), SHAPE, "bfloat16", target), machine_of(target), values)


def seconds(space: Space, config) -> float:
    """A landscape with interactions: waves of CTAs, L2 traffic, depth of the pipeline, warps a tile."""
    footprint = space.footprint(config)
    waves = math.ceil(footprint.ctas / space.machine.sms)
    compute = footprint.flops / 3.5e12 * (1.0 + 0.4 * (config["threads"] != footprint.products[0][0] * 2))
    load = footprint.load_bytes / 3e10 / (1 + 0.1 * math.log2(config["panel"]))
    bubbles = 1 + 0.6 / max(1, footprint.stages) ** 2
    policy = {"Square": 1.0, "FullRow": 1.04, "FullCol": 1.15}[config["policy"]]
    return waves * footprint.iterations * max(compute, load) * bubbles * policy


def searched(space: Space, tmp_path, trials: int, seed: int) -> float:
    target = tvm_tile.target("sm_90")
    database = Database(tmp_path / str(seed), space, target)
    model = CostModel(lambda c: own_features(space, c), lambda cs: [{"lowered nothing": 0.0}] * len(cs), seed=seed)
    rejections = Rejections()
    search = Evolution(
        space, database.known, database.meta, model, database.target, rejections, batch=8, seed=seed
    )  # fmt: skip
    while len(database.known) < trials:
        configs = search.batch(min(8, trials - len(database.known)))
        assert configs
        times = []
        for config in configs:
            assert space.reason(config) is None and space.key(config) not in database.known
            times.append(seconds(space, config))
            database.add(config, times[-1], {"error": None, "elapsed": 0.0})
            model.add(config, times[-1], {"lowered nothing": 0.0})
    assert len(database.known) == trials and sum(rejections.counts.values()) > 0
    return database.ranking()[0][1]


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_64_trials_come_near_the_best_of_the_whole_space(tmp_path, seeds):
    space = make_space()
    best = min(seconds(space, c) for c in space.legal)
    found = [searched(space, tmp_path, 64, seed) for seed in range(seeds)]
    rng = random.Random(0)
    chance = statistics.median(min(seconds(space, c) for c in rng.sample(space.legal, 64)) for _ in range(50))
    assert max(found) < chance
    if seeds > 1:
        assert statistics.median(best / f for f in found) >= 0.98, [best / f for f in found]


def test_a_small_space_is_used_up_without_repetition(tmp_path):
    space = make_space(block_M=[128], block_N=[128], block_K=[64], threads=[256], policy=["Square"], panel=[8])
    size = len(space.legal)
    assert 4 <= size <= 64 and searched(space, tmp_path, size, 0) == min(seconds(space, c) for c in space.legal)


def test_sweep_visits_every_legal_configuration_once():
    space = make_space(block_K=[64], panel=[8], policy=["Square"])
    known: dict = {}
    sweep = Sweep(space, known, Rejections())
    seen = []
    while configs := sweep.batch(50):
        seen += [space.key(c) for c in configs]
        known |= {space.key(c): 1.0 for c in configs}
    assert sorted(seen) == sorted(space.key(c) for c in space.legal)


def test_values_narrow_a_space_and_are_checked():
    space = make_space(block_M=[64], policy=["FullRow"])
    assert set(space.choices["block_M"]) == {64, space.default["block_M"]}
    assert "FullRow" in space.choices["policy"] and "FullCol" not in space.choices["policy"]
    with pytest.raises(TileError, match="block_M=65 is not one of"):
        _ = make_space(block_M=[65]).choices
    with pytest.raises(TileError, match="no decision 'block_Q'"):
        _ = make_space(block_Q=[65]).choices


def test_mutators_change_one_decision_or_a_declared_pair():
    from tvm_tile.tune import search

    ms = import_meta_schedule()
    space, rng = make_space(), random.Random(1)
    start = space.default
    trace = space.schedule(start).trace
    pairs = list(space.problem.spec.coupled)
    pairs = [p for p in pairs if all(n in space.choices for n in p)]
    one, two = search._one_decision(ms, rng), search._two_decisions(ms, rng, list(space.choices), pairs)
    changed_pairs = set()
    for _ in range(60):
        config = space.config_of_trace(one.apply(trace))
        assert sum(config[n] != start[n] for n in config) == 1
        config = space.config_of_trace(two.apply(trace))
        changed = tuple(n for n in config if config[n] != start[n])
        assert any(set(changed) == set(p) for p in pairs)
        changed_pairs.add(frozenset(changed))
    assert len(changed_pairs) == len(pairs)


def test_model_ranks_unseen_configurations():
    space = make_space()
    rng = random.Random(3)
    train, test = rng.sample(space.legal, 60), rng.sample(space.legal, 60)
    model = CostModel(lambda c: own_features(space, c), lambda cs: [None] * len(cs))
    assert len(set(model.predict(test))) > 1 and not model.trained
    for config in train:
        model.add(config, seconds(space, config), None)
    assert model.trained
    model.add(test[0], None, None)
    scores = model.predict(test)
    pairs = [(i, j) for i in range(60) for j in range(i)]
    right = sum((scores[i] > scores[j]) == (seconds(space, test[i]) < seconds(space, test[j])) for i, j in pairs)
    assert right / len(pairs) > 0.75


def test_model_asks_for_a_bounded_number_of_lowerings_and_scores_refused_ones_last(tmp_path):
    space = make_space()
    asked = []

    def lowered(configs):
        asked.append(len(configs))
        return [None if c["num_stages"] == 0 else {"lowered executed": 1.0} for c in configs]

    model = CostModel(lambda c: own_features(space, c), lowered, budget=32)
    rng = random.Random(5)
    for config in rng.sample(space.legal, 20):
        model.add(config, seconds(space, config), {"lowered executed": 1.0})
    configs = rng.sample(space.legal, 64)
    for _ in range(3):
        model.predict(configs)
    assert sum(asked) <= 32 and asked[0] == 16
    model.new_round()
    none = [c for c in space.legal if c["num_stages"] == 0][:8]
    assert model.predict(none).max() == 0.0
    model.save(tmp_path / "model.json")
    again = CostModel(lambda c: own_features(space, c), lowered)
    again.load(tmp_path / "model.json")
    assert again.trained and again.rows == model.rows


def test_a_space_without_a_legal_configuration_gives_none(tmp_path):
    class Never(Add):
        def illegal(self, shape, dtype, target, config):
            return "test rule: never"

    target = tvm_tile.target("llvm")
    space = Space(Problem.of(Never(), {"n": 8}, None, target), machine_of(target))
    database = Database(tmp_path, space, target)
    model = CostModel(lambda c: own_features(space, c), lambda cs: [None] * len(cs))
    rejections = Rejections()
    search = Evolution(space, database.known, database.meta, model, database.target, rejections)
    assert search.batch(8) == [] and rejections.counts["test rule"] == 5
