"""A tuning run: search, build in parallel, measure apart, record at once, verify the winner."""

from __future__ import annotations

import contextlib
import datetime
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import TileError, TileTargetError
from . import records
from .cost_model import CostModel
from .database import Database, locked
from .features import own_features
from .process import Outcome, Pool
from .progress import Progress, Silent
from .records import Record
from .report import Report
from .search import Evolution, Rejections, Sweep
from .space import Problem, Space, machine_of

__all__ = ["run", "tune"]

#: Errors of a build that mean "this configuration does not exist", not "the compiler failed".
REFUSALS = ("TileError", "TileTypeError", "TileShapeError", "TileResourceError", "TileTargetError", "TileSyntaxError")
#: Configurations that are measured again, side by side, to pick the winner.
FINALISTS = 4


@dataclass
class Trial:
    """One configuration on its way."""

    config: dict[str, Any]
    key: tuple
    library: str
    seconds: float | None = None
    error: str | None = None
    message: str = ""
    built: dict[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """The compiler says that it does not exist: not a trial."""
        return self.error in REFUSALS


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
    cores = thread_count()
    session = Session(
        space,
        where,
        device,
        rpc,
        timeout,
        build_timeout,
        workers or cores,
        batch or max(4, min(8, trials // 4)),
        seed,
        strategy,
        progress or Silent(),
    )
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

    def __init__(
        self, space, target, device, rpc, timeout, build_timeout, workers, batch, seed, strategy, progress
    ) -> None:  # fmt: skip
        self.space, self.problem, self.target = space, space.problem, target
        self.device, self.rpc, self.timeout, self.build_timeout = device, rpc, timeout, build_timeout
        self.workers, self.batch, self.seed, self.strategy = workers, batch, seed, strategy
        self.progress = progress
        self.flops = float(self.problem.spec.flops(self.problem.configured()[0]))
        self.rejections = Rejections()
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.lowered: dict[tuple, dict | None] = {}
        self.best: float | None = None
        self.fresh = 0
        self.interrupted = False
        self._count = 0

    # ---- the run

    def run(self, folder: Path, trials: int, resume: bool | None, machine: str, store: Path) -> Report:
        """Everything."""
        self.start = time.monotonic()
        self.database = Database(folder, self.space, self.target)
        self._earlier(resume)
        self.scratch = Path(tempfile.mkdtemp(prefix="tvm_tile_tune_"))
        # kernels on a CPU use all its cores: a worker that builds keeps to one
        self.builders = Pool(self.workers, {"OMP_NUM_THREADS": "1"} if self.device != "cpu" else None)
        self.runner = Pool(1)
        self.model = CostModel(
            partial(own_features, self.space), self._lowered, budget=max(self.batch, 4 * self.workers), seed=self.seed
        )
        try:
            try:
                self._search(trials)
            except KeyboardInterrupt:
                self.interrupted = True
                self.progress.message("interrupted: checking the best so far (Ctrl-C again to leave at once)")
                self._restart_pools()
            self.progress.finish()
            seconds_per_trial = (time.monotonic() - self.start) / max(1, self.fresh)
            record = None
            with contextlib.suppress(KeyboardInterrupt) if self.interrupted else contextlib.nullcontext():
                record = self._final(machine, store)
        finally:
            self.builders.close()
            self.runner.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
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
        if self.strategy == "sweep":
            search = Sweep(self.space, known, self.rejections, seed=self.seed)
        else:
            search = Evolution(
                self.space, known, self.database.meta, self.model, self.database.target, self.rejections,
                batch=self.batch, seed=self.seed,
            )  # fmt: skip
        for key, seconds in known.items():
            self.model.add(self.database.config(key), seconds, None)
        # the untuned configuration first: what is found is never worse than it
        default = self.space.default
        if self.space.key(default) not in known and self.space.reason(default) is None:
            self._measure_all([default], trials)
        while len(known) < trials:
            configs = search.batch(min(self.batch, trials - len(known)))
            if not configs:
                self.progress.message("every legal configuration is measured")
                break
            done = self._measure_all(configs, trials)
            search.results([t.config for t in done], [t.seconds for t in done])
        self._show(trials)

    def _show(self, trials: int) -> None:
        self.progress.update(
            len(self.database.known), trials, self.fresh, self.best, self.flops, self.failures,
            sum(self.rejections.counts.values()),
        )  # fmt: skip

    # ---- measuring

    def _measure_all(self, configs: list[dict[str, Any]], trials: int) -> list[Trial]:
        """Build in parallel and measure one after another; on other devices than this CPU while others still build."""
        jobs = [self._trial(c) for c in configs]
        waiting: dict[Future, tuple[Trial, str]] = {self._build(t): (t, "build") for t in jobs}
        ready: list[Trial] = []
        done: list[Trial] = []
        while waiting or ready:
            if ready and (self.device != "cpu" or not waiting):
                # on this CPU a build beside it would disturb the measurement, and so would a second measurement
                batch, ready = (ready, []) if self.device != "cpu" else (ready[:1], ready[1:])
                waiting |= {self._measure(t): (t, "measure") for t in batch}
            finished, _ = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                trial, stage = waiting.pop(future)
                outcome = future.result()
                if stage == "build" and outcome.error is None:
                    trial.built = outcome.value
                    self.lowered[trial.key] = trial.built["features"]
                    ready.append(trial)
                    continue
                self._finish(trial, stage, outcome)
                done.append(trial)
            self._show(trials)
        return done

    def _trial(self, config: dict[str, Any]) -> Trial:
        self._count += 1
        return Trial(config, self.space.key(config), str(self.scratch / f"kernel_{self._count}.so"))

    def _build(self, trial: Trial) -> Future:
        return self.builders.submit("build", {**self._task(trial.config), "output": trial.library}, self.build_timeout)

    def _task(self, config: Mapping[str, Any]) -> dict[str, Any]:
        shape, tunables = self.problem.configured(config)
        return {
            "spec": self.problem.spec,
            "shape": shape,
            "dtype": self.problem.dtype,
            "target": target_text(self.target),
            "machine": self.problem.target,
            "config": tunables,
        }

    def _measure(self, trial: Trial, *, seed: int | None = None, check: str = "if best", budget: float = 0.4) -> Future:
        shape, _ = self.problem.configured(trial.config)

        def arguments() -> dict[str, Any]:
            return {
                "spec": self.problem.spec,
                "shape": shape,
                "dtype": self.problem.dtype,
                "library": trial.library,
                "device": self.device,
                "seed": self.seed if seed is None else seed,
                "best": self.best,
                "check": check,
                "budget": budget,
                "rpc": self.rpc,
            }

        return self.runner.submit("measure", arguments, self.timeout + (self.timeout if check == "always" else 0))

    def _finish(self, trial: Trial, stage: str, outcome: Outcome) -> None:
        """Record how a trial ended, at once."""
        trial.error, trial.message = outcome.error, outcome.message
        Path(trial.library).unlink(missing_ok=True)
        if outcome.error is None:
            trial.seconds = float(outcome.value["seconds"])
            self.best = trial.seconds if self.best is None else min(self.best, trial.seconds)
        elif stage == "build" and trial.refused:
            self.space.refused[trial.key] = _first_line(trial.message)
            self.rejections.add(trial.key, _first_line(trial.message))
            return
        elif outcome.error in ("worker", "cancelled"):
            # not the configuration's fault
            raise TileError(outcome.message or "the run was closed")
        else:
            trial.error = _kind(stage, outcome.error)
            self.failures[trial.error] += 1
            self.examples.setdefault(trial.error, _first_line(outcome.message))
        self.fresh += 1
        resources = trial.built.get("resources") or {}
        self.database.add(
            trial.config,
            trial.seconds,
            {
                "error": trial.error,
                "message": _first_line(trial.message),
                "build_seconds": trial.built.get("seconds"),
                "registers": resources.get("registers"),
                "spill_bytes": resources.get("spill_bytes"),
                "shared_bytes": resources.get("shared_bytes"),
                "elapsed": round(time.monotonic() - self.start, 3),
                "date": _now(),
            },
        )
        self.model.add(trial.config, trial.seconds, self.lowered.get(trial.key))

    def _lowered(self, configs: list[dict[str, Any]]) -> list[dict[str, float] | None]:
        """Features of lowered kernels, from the building processes; what the compiler refuses is illegal."""
        wanted = {self.space.key(c): c for c in configs if self.space.key(c) not in self.lowered}
        futures = {k: self.builders.submit("features", self._task(c), self.build_timeout) for k, c in wanted.items()}
        for key, future in futures.items():
            outcome = future.result()
            self.lowered[key] = outcome.value
            if outcome.error in REFUSALS:
                reason = _first_line(outcome.message)
                self.space.refused[key] = reason
                self.rejections.add(key, reason)
        return [self.lowered[self.space.key(c)] for c in configs]

    # ---- the end

    def _restart_pools(self) -> None:
        self.builders.close()
        self.runner.close()
        self.builders, self.runner = Pool(self.workers), Pool(1)

    def _final(self, machine: str, store: Path) -> Record | None:
        """Measure the best few again, side by side with the untuned one, on fresh inputs; the first right one wins."""
        default = self.space.key(self.space.default)
        default_seconds: float | None = None
        wrong: list[dict[str, Any]] = []
        good: list[tuple[float, dict[str, Any]]] = []
        for config, _ in self.database.ranking():
            is_default = self.space.key(config) == default
            if len(good) >= FINALISTS and not (is_default and default_seconds is None):
                continue
            seconds = self._again(config, wrong)
            if seconds is None:
                continue
            good.append((seconds, config))
            if is_default:
                default_seconds = seconds
        if wrong:
            self.database.drop(wrong)
        if not good:
            return None
        seconds, config = min(good, key=lambda g: g[0])
        shape, tunables = self.problem.configured(config)
        full = {**{n: shape[n] for n in self.problem.spec.options if n in config}, **tunables}
        record = Record(
            **{**self.problem.identity, "shape": dict(self.problem.shape)},
            arch=str(self.target.attrs["arch"]) if self.target.kind.name == "cuda" else "llvm",
            machine=machine,
            config=full,
            seconds=seconds,
            default_seconds=default_seconds,
            trials=len(self.database.known),
            date=_now()[:10],
        )
        records.put(store, record)
        return record

    def _again(self, config: dict[str, Any], wrong: list[dict[str, Any]]) -> float | None:
        """Build and measure once more with other inputs; a wrong result is noted."""
        trial = self._trial(config)
        outcome = self._build(trial).result()
        if outcome.error is None:
            best, self.best = self.best, None
            outcome = self._measure(trial, seed=self.seed + 1, check="always", budget=0.8).result()
            self.best = best
            Path(trial.library).unlink(missing_ok=True)
        if outcome.error is None:
            return float(outcome.value["seconds"])
        kind = _kind("measure", outcome.error)
        self.failures[kind] += 1
        self.examples.setdefault(kind, _first_line(outcome.message))
        self.progress.message(
            f"dropped {' '.join(f'{k}={v}' for k, v in config.items())}: {_first_line(outcome.message) or kind}"
        )
        wrong.append(config)
        return None


def target_text(target) -> str:
    """A target as workers rebuild it; on the same machine they find the same CPU features."""
    from ..ir.kernels import plain
    from ..runtime.targets import host_target

    if target.kind.name != "cuda" and str(target) == str(host_target()):
        return "llvm"
    return json.dumps(plain(dict(target.export())))


def _kind(stage: str, error: str) -> str:
    """Kind of failure for people."""
    if error == "WrongResult":
        return "wrong result"
    if error == "sticky":
        return "GPU context lost"
    if error in ("timeout", "crash"):
        return f"{stage} {error}"
    return f"{stage} error"


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:300]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
