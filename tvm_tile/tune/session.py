"""A tuning run: search, build in parallel, measure apart, record at once, verify the winner."""

from __future__ import annotations

import contextlib
import time
from collections import ChainMap, Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import TileError, TileTargetError
from . import records
from .cost_model import CostModel
from .database import Database, locked
from .features import own_features
from .process import Outcome
from .progress import Progress, Silent
from .records import Record
from .report import Report
from .search import Evolution, Rejections, Sweep
from .side_by_side import Result, measure_again
from .space import Problem, Space, machine_of
from .trial import REFUSALS, Trial, failure_kind, first_line, now
from .workshop import Workshop

__all__ = ["run", "tune"]

#: Configurations that are measured again, side by side, to pick the winner: at most so many, and none whose first
#: measurement was slower than the best by more than this factor.
FINALISTS, NEAR = 8, 1.1


def tune(
    op,
    shape: Mapping[str, Any] | None = None,
    target="auto",
    trials: int = 64,
    out: str | Path = "tuning_logs",
    **options,
) -> dict[str, Any]:
    """Search for the fastest configuration of an op and store it for :func:`tvm_tile.compile`.

    Parameters
    ----------
    op : str or OpSpec
        Name of an op of the library, or its description.
    shape : dict, optional
        Shape parameters; those left out take their defaults. An option that is 0 (``num_splits``, ``split_k``) is
        tuned too.
    target : str or tvm.target.Target
        As in :func:`tvm_tile.compile`.
    trials : int
        Configurations to measure, those of earlier runs included.
    out : path
        Store of the records.
    **options
        Those of :func:`run`.

    Returns
    -------
    dict
        The best configuration: values of the op's tunables and open options.

    Raises
    ------
    TileError
        Nothing worked; the message says what failed how often.
    """
    report = run(op, shape, target=target, trials=trials, out=out, **options)
    if report.config is None:
        raise TileError(f"no configuration of {report.title} worked", advice=report.lines()[1:])
    return dict(report.config)


def run(
    op,
    shape: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    target="auto",
    trials: int = 64,
    out: str | Path = "tuning_logs",
    resume: bool | None = True,
    strategy: str = "evolution",
    timeout: float = 20.0,
    build_timeout: float = 120.0,
    workers: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    rpc_tracker: str | None = None,
    rpc_key: str = "tvm_tile",
    machine: str | None = None,
    values: Mapping[str, list] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Tune with all options; see :func:`tune`.

    Parameters
    ----------
    resume : bool or None
        Go on with the trials of earlier runs (True), throw them away (False), or refuse where there are any (None).
    strategy : str
        ``evolution``, or ``sweep`` for every legal configuration in random order.
    timeout, build_timeout : float
        Seconds for measuring and for building one configuration; the process that takes longer is killed.
    workers : int, optional
        Building processes, all cores by default.
    batch : int, optional
        Configurations between two rounds of the search.
    seed : int
        Of the search and of the inputs.
    rpc_tracker, rpc_key : str, optional
        ``host:port`` of a TVM tracker, and the key of the machines to measure on.
    machine : str, optional
        Name of the machine in the store; by default that of the GPU or CPU here, with a tracker its key.
    values : dict, optional
        Decision -> the only values to try, for a smaller space; the untuned value stays.
    progress : Progress, optional
        Where to show what happens; nothing by default.

    Raises
    ------
    TileError
        Arguments that do not fit, a machine that is not here, or a folder in use by another run.
    """
    from ..ops import registry
    from ..runtime.targets import target as resolve
    from ..runtime.tvm_setup import thread_count

    if trials < 1:
        raise TileError(f"trials must be at least 1, not {trials}")
    if strategy not in ("evolution", "sweep"):
        raise TileError(f"unknown strategy {strategy!r}", advice="it is evolution or sweep")
    spec = registry.get(op) if isinstance(op, str) else op
    where = resolve(target)
    problem = Problem.of(spec, shape, dtype, where)
    space = Space(problem, machine_of(where), dict(values or {}))
    if not space.choices:
        raise TileError(f"{spec.name} has nothing to tune on {problem.target}")
    kind = where.kind.name
    rpc = _tracker(rpc_tracker, rpc_key, timeout, "cuda" if kind == "cuda" else "cpu")
    name = machine or (records.slug(rpc_key) if rpc else records.device_folder(where))
    if name is None:
        raise TileTargetError(
            f"there is no GPU of {where.attrs['arch']} here to measure on",
            advice="use --rpc-tracker, or another target",
        )
    device = "rpc" if rpc else "cuda" if kind == "cuda" else "cpu"
    cores = workers or thread_count()
    session = Session(
        space, where, batch or max(4, min(8, trials // 4)), seed, strategy, progress or Silent(),
        partial(
            Workshop, space, where, device, rpc=rpc, timeout=timeout, build_timeout=build_timeout, workers=cores,
            seed=seed,
        ),
    )  # fmt: skip
    folder = Path(out) / name / spec.name
    with locked(folder):
        return session.run(folder, trials, resume, name, Path(out))


def _tracker(address: str | None, key: str, timeout: float, kind: str) -> dict[str, Any] | None:
    if address is None:
        return None
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise TileError(f"the tracker's address must be host:port, not {address!r}")
    return {"host": host, "port": int(port), "key": key, "timeout": timeout, "kind": kind}


class Session:
    """One run; made by :func:`run`."""

    def __init__(self, space, target, batch, seed, strategy, progress, workshop) -> None:
        self.space, self.problem, self.target, self.batch = space, space.problem, target, batch
        self.seed, self.strategy, self.progress, self._open_workshop = seed, strategy, progress, workshop
        self.flops = float(self.problem.spec.flops(self.problem.configured()[0]))
        self.rejections = Rejections()
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.lowered: dict[tuple, dict | None] = {}
        #: Configuration's key -> (future, trial), of those that are on their way.
        self.flying: dict[tuple, tuple[Future, Trial]] = {}
        self.best: float | None = None
        self.fresh = 0
        self.interrupted = False

    # ---- the run

    def run(self, folder: Path, trials: int, resume: bool | None, machine: str, store: Path) -> Report:
        """Everything."""
        self.start = time.monotonic()
        self.database = Database(folder, self.space, self.target)
        self._earlier(resume)
        with self._open_workshop() as self.workshop:
            self.model = CostModel(
                partial(own_features, self.space), self._lowered,
                budget=max(self.batch, 4 * self.workshop.workers), seed=self.seed,
            )  # fmt: skip
            try:
                self._search(trials)
            except KeyboardInterrupt:
                self.interrupted = True
                self.progress.message("interrupted: checking the best so far (Ctrl-C again to leave at once)")
                self.flying.clear()
                self.workshop.restart()
            self.progress.finish()
            seconds_per_trial = (time.monotonic() - self.start) / max(1, self.fresh)
            record = None
            with contextlib.suppress(KeyboardInterrupt) if self.interrupted else contextlib.nullcontext():
                record = self._final(machine, store)
        legal = self.space.legal
        return Report(
            title=f"{self.problem.title} on {machine}",
            config=None if record is None else record.config,
            seconds=None if record is None else record.seconds,
            default_seconds=None if record is None else record.default_seconds,
            measured=len(self.database.known),
            fresh=self.fresh,
            failures=self.failures,
            rejected=self.rejections.counts,
            examples={**self.rejections.examples, **self.examples},
            seconds_per_trial=seconds_per_trial,
            space=self.space.size,
            legal=-1 if legal is None else len(legal),
            interrupted=self.interrupted,
            folder=folder,
            record=record,
            flops=self.flops,
        )

    def _earlier(self, resume: bool | None) -> None:
        """What earlier runs left: kept, thrown away or refused."""
        known = self.database.known
        if not known:
            return
        if resume is None:
            raise TileError(
                f"{self.database.folder} has {len(known)} trials of {self.problem.title}",
                advice="--resume goes on with them, --restart throws them away",
            )
        if resume is False:
            self.database.forget()
            return
        self.best = min((s for s in known.values() if s is not None), default=None)
        for trial in self.database.trials():
            if trial.get("error"):
                self.failures[trial["error"]] += 1
                self.examples.setdefault(trial["error"], trial.get("message", ""))
        self.progress.message(f"going on after {len(known)} trials")

    def _search(self, trials: int) -> None:
        known = self.database.known
        taken = ChainMap(known, self.flying)
        if self.strategy == "sweep":
            search = Sweep(self.space, taken, self.rejections, seed=self.seed)
        else:
            search = Evolution(
                self.space, taken, self.database.meta, self.model, self.database.target, self.rejections,
                batch=self.batch, seed=self.seed,
            )  # fmt: skip
        for key, seconds in known.items():
            self.model.add(self.database.config(key), seconds, None)
        # the untuned configuration first: what is found is never worse than it
        default = self.space.default
        if self.space.key(default) not in known and self.space.reason(default) is None:
            self._launch([default])
        while True:
            while (room := min(self._room(), trials - len(taken))) > 0 and (configs := search.batch(room)):
                self._launch(configs)
            # what the compiler refuses is no trial: the end is only known when nothing is on its way
            if not self.flying:
                break
            wait([future for future, _ in self.flying.values()], timeout=0.5, return_when=FIRST_COMPLETED)
            for future, trial in list(self.flying.values()):
                if future.done():
                    self._finish(trial, *future.result())
                    del self.flying[trial.key]
            self._show(trials)
        if len(known) < trials:
            self.progress.message("every legal configuration is measured")
        self._show(trials)

    def _room(self) -> int:
        """For how many more configurations to ask the search now."""
        workers, flying = self.workshop.workers, len(self.flying)
        if self.workshop.device == "cpu":
            return 0 if flying else self.batch
        if self.strategy == "sweep":
            return 2 * workers - flying
        # enough for every worker, but no more: the fewer are on their way, the more does the search know
        return self.batch if flying + self.batch <= max(self.batch * 3 // 2, workers) else 0

    def _show(self, trials: int) -> None:
        self.progress.update(
            len(self.database.known), trials, self.fresh, self.best, self.flops, self.failures,
            sum(self.rejections.counts.values()),
        )  # fmt: skip

    # ---- measuring

    def _launch(self, configs: list[dict[str, Any]]) -> None:
        for config in configs:
            trial = self.workshop.trial(config)
            future = self.workshop.try_out(trial, lambda: self.best, features=trial.key not in self.lowered)
            self.flying[trial.key] = (future, trial)

    def _finish(self, trial: Trial, stage: str, outcome: Outcome) -> None:
        """Record how a trial ended, at once."""
        trial.error, trial.message = outcome.error, outcome.message
        Path(trial.library).unlink(missing_ok=True)
        if trial.built.get("features") is not None:
            self.lowered[trial.key] = trial.built["features"]
        if outcome.error is None:
            trial.seconds = float(outcome.value["seconds"])
            self.best = trial.seconds if self.best is None else min(self.best, trial.seconds)
        elif stage == "build" and trial.refused:
            self.space.refused[trial.key] = first_line(trial.message)
            self.rejections.add(trial.key, first_line(trial.message))
            return
        elif outcome.error in ("worker", "cancelled"):
            # not the configuration's fault
            raise TileError(outcome.message or "the run was closed")
        else:
            trial.error = failure_kind(stage, outcome.error)
            self.failures[trial.error] += 1
            self.examples.setdefault(trial.error, first_line(outcome.message))
        self.fresh += 1
        resources = trial.built.get("resources") or {}
        self.database.add(
            trial.config,
            trial.seconds,
            {
                "error": trial.error,
                "message": first_line(trial.message),
                "build_seconds": trial.built.get("seconds"),
                "measure_seconds": (outcome.value or {}).get("wall_seconds") if stage == "measure" else None,
                "registers": resources.get("registers"),
                "spill_bytes": resources.get("spill_bytes"),
                "shared_bytes": resources.get("shared_bytes"),
                "elapsed": round(time.monotonic() - self.start, 3),
                "date": now(),
            },
        )
        self.model.add(trial.config, trial.seconds, self.lowered.get(trial.key))

    def _lowered(self, configs: list[dict[str, Any]]) -> list[dict[str, float] | None]:
        """Features of lowered kernels, from the building processes; what the compiler refuses is illegal."""
        wanted = {self.space.key(c): c for c in configs if self.space.key(c) not in self.lowered}
        futures = {key: self.workshop.features(config) for key, config in wanted.items()}
        for key, future in futures.items():
            outcome = future.result()
            self.lowered[key] = outcome.value
            if outcome.error in REFUSALS:
                reason = first_line(outcome.message)
                self.space.refused[key] = reason
                self.rejections.add(key, reason)
        return [self.lowered[self.space.key(c)] for c in configs]

    # ---- the end

    def _final(self, machine: str, store: Path) -> Record | None:
        """Measure the best few and the untuned one again, side by side, on fresh inputs; the fastest right one wins."""
        default = self.space.key(self.space.default)
        default_seconds: float | None = None
        good: list[Result] = []
        tested: set[tuple] = set()
        while not good:
            entries = [(c, s) for c, s in self.database.ranking() if self.space.key(c) not in tested]
            chosen = [c for c, s in entries[:FINALISTS] if s <= NEAR * entries[0][1]]
            if not chosen:
                return None
            if default not in map(self.space.key, chosen):
                chosen += [c for c, _ in entries if self.space.key(c) == default]
            tested |= {self.space.key(c) for c in chosen}
            results = measure_again(self.workshop, {str(self.space.key(c)): c for c in chosen})
            for message in {r.message for r in results if r.error is None and r.message}:
                self.progress.message(message)
            wrong = [r for r in results if r.error is not None]
            for result in wrong:
                self.failures[result.error] += 1
                self.examples.setdefault(result.error, result.message)
                text = " ".join(f"{k}={v}" for k, v in result.config.items())
                self.progress.message(f"dropped {text}: {result.message or result.error}")
            if wrong:
                self.database.drop([r.config for r in wrong])
            good = [r for r in results if r.error is None]
            for result in good:
                if self.space.key(result.config) == default:
                    default_seconds = result.seconds
        best = min(good, key=lambda result: result.ratio)
        shape, tunables = self.problem.configured(best.config)
        full = {**{n: shape[n] for n in self.problem.spec.options if n in best.config}, **tunables}
        record = Record(
            **{**self.problem.identity, "shape": dict(self.problem.shape)},
            arch=str(self.target.attrs["arch"]) if self.target.kind.name == "cuda" else "llvm",
            machine=machine,
            config=full,
            seconds=best.seconds,
            default_seconds=default_seconds,
            trials=len(self.database.known),
            date=now()[:10],
        )
        records.put(store, record)
        return record
