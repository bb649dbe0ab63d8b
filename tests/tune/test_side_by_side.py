"""Winners measured in turns, and a search that goes on while earlier trials are measured."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import tvm_tile
from tests.tune.spaces import Add
from tvm_tile import cli
from tvm_tile.ops import registry
from tvm_tile.tune import records
from tvm_tile.tune.process import Outcome
from tvm_tile.tune.progress import Silent
from tvm_tile.tune.records import Record
from tvm_tile.tune.session import Session
from tvm_tile.tune.side_by_side import measure_again
from tvm_tile.tune.space import Problem, Space, machine_of
from tvm_tile.tune.trial import Trial
from tvm_tile.tune.workshop import Workshop

SHAPE = {"m": 192, "n": 256, "k": 320}


class Modes(Add):
    """A decision that makes kernels slow or wrong."""

    modes = ("good", "wrong")

    def choices(self, shape, dtype, target):
        return {"block": [16, 32, 64], "mode": ["good", "wrong"]}


def add_space() -> Space:
    target = tvm_tile.target("llvm")
    return Space(Problem.of(Modes(), {"n": 3000}, "float32", target), machine_of(target))


def test_wrong_results_are_told_apart_and_the_rest_is_measured_in_turns():
    configs = {
        "a": {"block": 16, "mode": "good"},
        "b": {"block": 32, "mode": "wrong"},
        "c": {"block": 64, "mode": "good"},
    }
    with Workshop(add_space(), tvm_tile.target("llvm"), "cpu") as workshop:
        results = {r.name: r for r in measure_again(workshop, configs, rounds=3)}
        assert results["b"].error == "wrong result" and "differs from the reference" in results["b"].message
        assert results["b"].seconds is None and results["b"].ratio is None
        fine = [results["a"], results["c"]]
        assert all(r.error is None and not r.message and r.seconds > 0 for r in fine)
        assert min(r.ratio for r in fine) == 1.0
        # what fails only in company keeps its own figure, and says so
        workshop.together = lambda *_, **__: Outcome(error="crash", message="the process ended")
        alone = {r.name: r for r in measure_again(workshop, configs, rounds=3)}
        assert alone["a"].error is None and alone["a"].seconds > 0 and "measured alone" in alone["a"].message
        assert not list(workshop.scratch.iterdir())


def gemm_record(store, config: dict) -> None:
    spec = registry.get("gemm")
    machine = records.cpu_name()
    records.put(
        store,
        Record("gemm", spec.version, spec.identity(SHAPE), "float32", "cpu", "llvm", machine, config, 1.0, 2.0, 3),
    )


def test_log_compare_measures_the_winners_of_stores_and_the_untuned(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    gemm_record(one, {"block_M": 256, "block_N": 256, "block_K": 256})
    gemm_record(two, {"block_M": 32, "block_N": 32, "block_K": 16})
    shape = ["--shape", *(f"{k}={v}" for k, v in SHAPE.items()), "--dtype", "float32", "--target", "llvm"]
    argv = ["log", "compare", "gemm", *shape, "--out", str(one), "--with", str(two), "--rounds", "5"]
    assert cli.main([*argv, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["name"] for r in results] == [str(one), str(two), "untuned"]
    assert results[1]["config"]["block_K"] == 16
    assert min(r["ratio"] for r in results) == 1.0 and all(r["seconds"] > 0 for r in results), results
    assert cli.main(argv) == 0
    assert "of the fastest" in capsys.readouterr().out
    assert cli.main(["log", "compare", "gemm", "--shape", "m=1", "--out", str(one), "--target", "llvm"]) == 1
    assert "has no record of gemm m=1" in capsys.readouterr().err


class Pretend:
    """A workshop of another device: several configurations are on their way at once, and none is built."""

    device, workers = "rpc", 4

    def __init__(self, space: Space) -> None:
        self.space = space
        self.pool = ThreadPoolExecutor(self.workers)
        self.lock = threading.Lock()
        self.now, self.most, self.asked = 0, 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_exc) -> None:
        self.pool.shutdown()

    def trial(self, config) -> Trial:
        return Trial(dict(config), self.space.key(config), "/nonexistent/kernel.so")

    def features(self, config) -> Future:
        future: Future = Future()
        future.set_result(Outcome(value={"lowered nothing": 0.0}))
        return future

    def try_out(self, trial, best, *, features=True) -> Future:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.asked.append(trial.key)
        return self.pool.submit(self._try, trial)

    def _try(self, trial):
        time.sleep(0.002 * (1 + trial.key[0] % 3))
        with self.lock:
            self.now -= 1
        if trial.config["block_K"] == 32:
            return "build", Outcome(error="TileShapeError", message="test: refused")
        trial.built = {"features": {"lowered nothing": 0.0}}
        return "measure", Outcome(value={"seconds": sum(map(hash, map(str, trial.key))) % 997 + 1.0})


@pytest.mark.parametrize(("strategy", "trials"), [("evolution", 24), ("sweep", 24), ("sweep", 10_000)])
def test_search_goes_on_while_trials_are_on_their_way(tmp_path, strategy, trials):
    target = tvm_tile.target("sm_90")
    values = {
        "block_M": [64, 128], "block_N": [128], "block_K": [32, 64], "threads": [256], "policy": ["Square"],
        "panel": [1, 8],
    }  # fmt: skip
    space = Space(Problem.of(registry.get("gemm"), {"m": 4096, "n": 4096, "k": 4096}, "bfloat16", target),
                  machine_of(target), values)  # fmt: skip
    pretend = Pretend(space)
    session = Session(space, target, 4, 0, strategy, Silent(), lambda: pretend)
    session._final = lambda *_: None
    report = session.run(tmp_path / "gemm", trials, True, "board", tmp_path)
    assert len(set(pretend.asked)) == len(pretend.asked)
    # the search was asked again before the batch in flight was done
    assert pretend.most > 4 if strategy == "sweep" else pretend.most > 1
    assert not session.flying
    buildable = [c for c in space.legal if c["block_K"] != 32]
    assert report.measured == report.fresh == min(trials, len(buildable))
    assert report.rejected["test"] > 0
    assert all(s is not None for s in session.database.known.values())
