"""Where configurations of one space are built and measured: worker processes, and a folder for the kernels."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .process import Outcome, Pool
from .space import Space
from .trial import Trial, target_text

__all__ = ["Workshop"]


class Workshop:
    """Building processes, and one that measures.

    Parameters
    ----------
    space : Space
        Whose configurations.
    target : tvm.target.Target
        To build for.
    device : str
        ``cpu``, ``cuda`` or ``rpc``: where to measure.
    rpc : dict, optional
        The tracker, see :func:`.measure.measure`.
    timeout, build_timeout : float
        Seconds for measuring and for building one configuration; the process that takes longer is killed.
    workers : int
        Building processes.
    seed : int
        Of the inputs.
    """

    def __init__(
        self,
        space: Space,
        target,
        device: str,
        *,
        rpc: Mapping[str, Any] | None = None,
        timeout: float = 20.0,
        build_timeout: float = 120.0,
        workers: int = 1,
        seed: int = 0,
    ) -> None:
        self.space, self.problem, self.device, self.rpc = space, space.problem, device, rpc
        self.timeout, self.build_timeout, self.workers, self.seed = timeout, build_timeout, workers, seed
        self._target = target_text(target)
        self._count, self._generation = 0, 0
        self._lock = threading.Lock()
        self.scratch = Path(tempfile.mkdtemp(prefix="tvm_tile_tune_"))
        self._start()

    def _start(self) -> None:
        self._generation += 1
        # builds on their way, and what to call for those that wait for the last of them
        self._building, self._built = 0, []
        # kernels on a CPU use all its cores: a worker that builds keeps to one
        self.builders = Pool(self.workers, {"OMP_NUM_THREADS": "1"} if self.device != "cpu" else None)
        self.runner = Pool(1)
        if self.device == "cuda":
            # the driver's start, the inputs and their reference take seconds: meanwhile the first kernels are built
            shape, _ = self.problem.configured(self.space.default)
            self.runner.submit("prepare", {**self._call(shape), "seed": self.seed}, 10 * self.timeout)

    def restart(self) -> None:
        """New processes; what the old ones were doing is lost."""
        self.builders.close()
        self.runner.close()
        self._start()

    def close(self) -> None:
        """End the processes and remove the kernels."""
        self.builders.close()
        self.runner.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def trial(self, config: Mapping[str, Any]) -> Trial:
        """A configuration with a place for its kernel."""
        self._count += 1
        return Trial(dict(config), self.space.key(config), str(self.scratch / f"kernel_{self._count}.so"))

    def try_out(self, trial: Trial, best: Callable[[], float | None], *, features: bool = True) -> Future:
        """Build a configuration and measure it; the future's result is ``("build" or "measure", outcome)``.

        Kernels are measured one after another, on other devices than this CPU while others are still being built. On
        this CPU a build would disturb the measurement, and so measuring waits for the last build.
        """
        done: Future = Future()
        generation = self._generation

        def measured(future: Future) -> None:
            done.set_result(("measure", future.result()))

        def built(future: Future) -> None:
            outcome = future.result()
            if generation != self._generation:  # of processes that were ended
                return
            if outcome.error is None:
                trial.built = outcome.value
            else:
                done.set_result(("build", outcome))
            with self._lock:
                self._building -= 1
                if outcome.error is None:
                    self._built.append(lambda: self.measure(trial, best).add_done_callback(measured))
                go = self.device != "cpu" or self._building == 0
                start, self._built = (self._built, []) if go else ([], self._built)
            for each in start:
                each()

        with self._lock:
            self._building += 1
        self.build(trial, features=features).add_done_callback(built)
        return done

    def build(self, trial: Trial, *, features: bool = True) -> Future:
        """Compile it; ``features``: count its lowered form too."""
        task = {**self._task(trial.config), "output": trial.library, "with_features": features}
        return self.builders.submit("build", task, self.build_timeout)

    def features(self, config: Mapping[str, Any]) -> Future:
        """Features of a configuration's lowered form."""
        return self.builders.submit("features", self._task(config), self.build_timeout)

    def measure(
        self,
        trial: Trial,
        best: Callable[[], float | None] = lambda: None,
        *,
        seed: int | None = None,
        check: str = "if best",
        budget: float = 0.4,
    ) -> Future:
        """Time a built configuration; ``best`` is asked when its turn comes. See :func:`.measure.measure`."""
        shape, _ = self.problem.configured(trial.config)

        def arguments() -> dict[str, Any]:
            return {
                **self._call(shape),
                "library": trial.library,
                "seed": self.seed if seed is None else seed,
                "best": best(),
                "check": check,
                "budget": budget,
                "rpc": self.rpc,
            }

        return self.runner.submit("measure", arguments, self.timeout * (2 if check == "always" else 1))

    def together(self, trials: list[Trial], *, seed: int, rounds: int) -> Outcome:
        """Times of several built configurations in turns, in one process; see :func:`.measure.together`."""
        kernels = [(self.problem.configured(t.config)[0], t.library) for t in trials]
        task = {**self._call(None), "kernels": kernels, "seed": seed, "rounds": rounds}
        del task["shape"]
        return self.runner.submit("together", task, self.timeout * (1 + len(trials))).result()

    def _call(self, shape) -> dict[str, Any]:
        return {"spec": self.problem.spec, "shape": shape, "dtype": self.problem.dtype, "device": self.device}

    def _task(self, config: Mapping[str, Any]) -> dict[str, Any]:
        shape, tunables = self.problem.configured(config)
        return {
            "spec": self.problem.spec,
            "shape": shape,
            "dtype": self.problem.dtype,
            "target": self._target,
            "machine": self.problem.target,
            "config": tunables,
        }
