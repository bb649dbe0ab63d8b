"""The cost model: gradient-boosted trees (XGBoost) on the features of :mod:`.features`, as a MetaSchedule cost model.

Two ensembles are trained on all that was measured. The first knows a configuration's own features and screens a whole
population in milliseconds; the second also knows the counts over the lowered kernel, which cost a lowering each, and
judges those that the first one likes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CostModel", "as_meta_schedule"]

_PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 6,
    "eta": 0.2,
    "min_child_weight": 0,
    "gamma": 0.001,
    "subsample": 0.9,
    "colsample_bytree": 0.8,
    "verbosity": 0,
}
_ROUNDS = 80


class _Trees:
    """One ensemble over named features; features that a row lacks are missing values."""

    def __init__(self, seed: int, threads: int) -> None:
        self.parameters = {**_PARAMETERS, "seed": seed, "nthread": threads}
        self.names: list[str] = []
        self.booster = None

    def _matrix(self, rows: Sequence[Mapping[str, float]], labels=None):
        import xgboost

        data = np.array([[row.get(n, np.nan) for n in self.names] for row in rows], dtype="float32")
        return xgboost.DMatrix(data.reshape(len(rows), len(self.names)), label=labels)

    def train(self, rows: Sequence[Mapping[str, float]], scores: Sequence[float]) -> None:
        import xgboost

        self.names = sorted({name for row in rows for name in row})
        self.booster = xgboost.train(self.parameters, self._matrix(rows, np.asarray(scores, "float32")), _ROUNDS)

    def predict(self, rows: Sequence[Mapping[str, float]]) -> np.ndarray:
        return self.booster.predict(self._matrix(rows)).astype("float64")


class CostModel:
    """Predicts scores between 0 (fails) and 1 (as fast as the best so far).

    Parameters
    ----------
    own : callable
        Configuration -> its own features.
    lowered : callable
        List of configurations -> list of features of the lowered kernels; None where the compiler refuses it.
    budget : int
        Lowerings that the predictions of one round may ask for; one prediction takes half of what is left.
    seed, threads : int
        Of the training.
    """

    def __init__(self, own: Callable, lowered: Callable, *, budget: int = 32, seed: int = 0, threads: int = 1) -> None:
        self.own, self.lowered, self.budget, self._left = own, lowered, budget, budget
        self.random = np.random.default_rng(seed)
        self.rows: list[dict[str, float]] = []
        self.more: list[dict[str, float] | None] = []
        self.seconds: list[float | None] = []
        self.screen, self.judge = _Trees(seed, threads), _Trees(seed + 1, threads)
        self._stale = True

    #: Measurements before the model has an opinion; an earlier one leads the search astray.
    warm_up = 12

    @property
    def trained(self) -> bool:
        """Whether there is enough to learn from."""
        return sum(s is not None for s in self.seconds) >= self.warm_up

    def new_round(self) -> None:
        """Give the next round its budget of lowerings."""
        self._left = self.budget

    def add(self, config: Mapping[str, Any], seconds: float | None, lowered: Mapping[str, float] | None) -> None:
        """One measurement; ``seconds`` is None for a failure."""
        self.rows.append(self.own(config))
        self.more.append(dict(lowered) if lowered else None)
        self.seconds.append(seconds)
        self._stale = True

    def _train(self) -> None:
        best = min(s for s in self.seconds if s is not None)
        scores = [0.0 if s is None else best / s for s in self.seconds]
        self.screen.train(self.rows, scores)
        known = [i for i, more in enumerate(self.more) if more is not None]
        if known:
            self.judge.train([{**self.rows[i], **self.more[i]} for i in known], [scores[i] for i in known])
        self._stale = False

    def predict(self, configs: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """A score for each configuration; random ones before :attr:`trained`."""
        if not configs:
            return np.zeros(0)
        if not self.trained:
            return self.random.random(len(configs))
        if self._stale:
            self._train()
        rows = [self.own(c) for c in configs]
        scores = self.screen.predict(rows)
        if self.judge.booster is None:
            return scores
        chosen = np.argsort(-scores)[: max(1, self._left // 2)]
        self._left -= min(self._left, len(chosen))
        found = self.lowered([configs[i] for i in chosen])
        known = [(i, more) for i, more in zip(chosen, found, strict=True) if more is not None]
        refused = [i for i, more in zip(chosen, found, strict=True) if more is None]
        if known:
            scores[[i for i, _ in known]] = self.judge.predict([{**rows[i], **more} for i, more in known])
        scores[refused] = 0.0
        return scores

    def save(self, path: str) -> None:
        """Write the training data (the trees follow from it)."""
        Path(path).write_text(json.dumps({"rows": self.rows, "lowered": self.more, "seconds": self.seconds}))

    def load(self, path: str) -> None:
        """Read what :meth:`save` wrote."""
        data = json.loads(Path(path).read_text())
        self.rows, self.more, self.seconds = data["rows"], data["lowered"], data["seconds"]
        self._stale = True


def as_meta_schedule(model: CostModel, config_of: Callable):
    """The model as MetaSchedule calls it; ``config_of`` takes a schedule's configuration.

    Results reach the model through :meth:`CostModel.add` as they arrive, so ``update`` has nothing to add.
    """
    from tvm.ir.utils import derived_object

    from .space import import_meta_schedule

    ms = import_meta_schedule()

    @derived_object
    class Model(ms.cost_model.PyCostModel):
        def load(self, path: str) -> None:
            model.load(path)

        def save(self, path: str) -> None:
            model.save(path)

        def update(self, context, candidates, results) -> None:
            pass

        def predict(self, context, candidates) -> np.ndarray:
            return model.predict([config_of(c.sch) for c in candidates])

    return Model()
