"""A few configurations measured again side by side: how a run's winner is picked, and how stores are compared.

A machine's clock changes by more than two good configurations differ, so figures of different moments do not rank them.
Here each is built, checked against the reference on fresh inputs, and then all are timed in turns in one process.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TileError, TileTargetError
from . import records
from .space import Problem, Space, machine_of
from .trial import failure_kind, first_line
from .workshop import Workshop

__all__ = ["Result", "compare_stores", "measure_again"]

#: Measurements of each, in turns.
ROUNDS = 15


@dataclass
class Result:
    """One configuration of a comparison.

    Attributes
    ----------
    name : str
        What it is called there.
    config : dict
        The configuration.
    seconds : float or None
        Of a call; None where it failed.
    ratio : float or None
        Its time over that of the fastest, from figures of the same rounds.
    error : str or None
        Kind of failure.
    message : str
        Its text, or why the figure is not one of a comparison.
    """

    name: str
    config: dict[str, Any]
    seconds: float | None = None
    ratio: float | None = None
    error: str | None = None
    message: str = ""


def measure_again(workshop: Workshop, configs: Mapping[str, Mapping], *, rounds: int = ROUNDS) -> list[Result]:
    """Build, check and time named configurations of a space.

    Parameters
    ----------
    workshop : Workshop
        Of the space.
    configs : dict
        Name -> configuration.
    rounds : int
        Measurements of each.

    Returns
    -------
    list of Result
        In the order of ``configs``; a wrong result is a failure.
    """
    seed = workshop.seed + 1
    results = {name: Result(name, dict(config)) for name, config in configs.items()}
    trials = {name: workshop.trial(config) for name, config in configs.items()}
    builds = {name: workshop.build(trial, features=False) for name, trial in trials.items()}

    good: list[str] = []
    for name, build in builds.items():
        outcome, stage = build.result(), "build"
        if outcome.error is None:
            # alone first: one that hangs or crashes takes no other with it
            outcome = workshop.measure(trials[name], seed=seed, check="always").result()
            stage = "measure"
        if outcome.error is not None:
            results[name].error = failure_kind(stage, outcome.error)
            results[name].message = first_line(outcome.message)
            continue
        results[name].seconds = float(outcome.value["seconds"])
        good.append(name)
    if workshop.device != "rpc" and len(good) > 1:
        _in_turns(workshop, [results[n] for n in good], [trials[n] for n in good], seed, rounds)
    for trial in trials.values():
        Path(trial.library).unlink(missing_ok=True)
    measured = [r for r in results.values() if r.seconds is not None]
    if measured and all(r.ratio is None for r in measured):
        fastest = min(r.seconds for r in measured)
        for result in measured:
            result.ratio = result.seconds / fastest
    return list(results.values())


def _in_turns(workshop: Workshop, results: list[Result], trials: list, seed: int, rounds: int) -> None:
    outcome = workshop.together(trials, seed=seed, rounds=rounds)
    if outcome.error is not None:
        # each was right alone: its figure stays, and says that it is of another moment
        for result in results:
            result.message = f"measured alone, together: {outcome.error} {first_line(outcome.message)}"
        return
    if workshop.device == "cpu":
        # other work on the machine only ever adds to a sample
        scores = [min(samples) for samples in outcome.value]
    else:
        # a GPU's clock changes from round to round, for all of a round alike
        first = outcome.value[0]
        scores = [statistics.median(s / f for s, f in zip(samples, first, strict=True)) for samples in outcome.value]
    typical = min if workshop.device == "cpu" else statistics.median
    for result, samples, score in zip(results, outcome.value, scores, strict=True):
        result.seconds, result.ratio = typical(samples), score / min(scores)


def compare_stores(
    spec,
    shape: Mapping[str, Any] | None,
    dtype: str | None,
    target,
    stores: list[Path],
    *,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> tuple[Problem, list[Result]]:
    """The winners of several stores for one shape on this machine, and the untuned configuration, side by side.

    Parameters
    ----------
    spec : OpSpec
        The op.
    shape, dtype
        As in :func:`tvm_tile.tune.run`.
    target : tvm.target.Target
        Whose machine is here.
    stores : list of path
        Each has a record of exactly this shape.

    Returns
    -------
    (Problem, list of Result)
        One result a store, by its path, and ``untuned``.
    """
    from ..runtime.tvm_setup import thread_count

    problem = Problem.of(spec, shape, dtype, target)
    machine = records.device_folder(target)
    if machine is None:
        raise TileTargetError(f"there is no GPU of {target.attrs['arch']} here to measure on")
    space = Space(problem, machine_of(target))
    configs: dict[str, Mapping[str, Any]] = {}
    for store in stores:
        found = [
            r for r in records.all_records(store, spec.name)
            if r.machine == machine
            and {"kernel": r.kernel, "version": r.version, "shape": r.shape, "dtype": r.dtype, "target": r.target}
            == problem.identity
        ]  # fmt: skip
        if not found:
            raise TileError(f"{store} has no record of {problem.title} on {machine}", advice="tvm-tile log best")
        configs[str(store)] = {name: found[0].config[name] for name in space.choices}
    configs["untuned"] = space.default
    cuda = target.kind.name == "cuda"
    workers = min(len(configs), thread_count())
    with Workshop(space, target, "cuda" if cuda else "cpu", workers=workers, seed=seed) as workshop:
        return problem, measure_again(workshop, configs, rounds=rounds)
