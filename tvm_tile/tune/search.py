"""Which configurations to measure next: MetaSchedule's evolutionary search with mutators of our own, or a sweep."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .cost_model import CostModel, as_meta_schedule
from .interrupt import deferred
from .space import Space, import_meta_schedule

__all__ = ["Evolution", "Rejections", "Sweep"]

#: Configurations that evolve between two batches. On made-up landscapes of gemm's size 64 trials in batches of 8 find
#: the best with 256, and mostly stop short of it with 64.
POPULATION = 256
#: Rounds of the search without a new configuration before the rest is drawn at random.
EMPTY_ROUNDS = 3
_UNLIMITED = 1 << 30


@dataclass
class Rejections:
    """Configurations that were dropped before building, each counted once, by kind of reason."""

    seen: set[tuple] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, key: tuple, reason: str) -> None:
        """Count one; the kind is the text before the colon."""
        if key in self.seen:
            return
        self.seen.add(key)
        kind = reason.split(":")[0].strip()
        self.counts[kind] += 1
        self.examples.setdefault(kind, reason)


def _postproc(ms, space: Space, known: Mapping[tuple, Any], rejections: Rejections):
    """Rejects what cannot be built. What was measured passes: MetaSchedule replays it into each new population."""
    from tvm.ir.utils import derived_object

    @derived_object
    class Legal(ms.postproc.PyPostproc):
        def _initialize_with_tune_context(self, context) -> None:
            pass

        def apply(self, sch) -> bool:
            config = space.config_of(sch)
            key = space.key(config)
            if key in known:
                return True
            reason = space.reason(config)
            if reason is not None:
                rejections.add(key, reason)
            return reason is None

        def clone(self):
            return _postproc(ms, space, known, rejections)

    return Legal()


def _decisions(trace) -> list:
    return [i for i in trace.insts if i.kind.name == "SampleCategorical" and len(i.attrs[0]) > 1]


def _other(trace, instruction, rng: random.Random, near: bool) -> int:
    """Another place in a decision's list; a neighbouring one with ``near``."""
    count, current = len(instruction.attrs[0]), int(trace.get_decision(instruction))
    places = [p for p in range(count) if p != current]
    if near:
        places = [p for p in places if abs(p - current) == 1]
    return rng.choice(places)


def _one_decision(ms, rng: random.Random):
    """Mutator: one decision takes another value, half of the time the next smaller or larger one."""
    from tvm.ir.utils import derived_object

    @derived_object
    class OneDecision(ms.mutator.PyMutator):
        def _initialize_with_tune_context(self, context) -> None:
            pass

        def apply(self, trace, _):
            instructions = _decisions(trace)
            if not instructions:
                return None
            chosen = rng.choice(instructions)
            place = _other(trace, chosen, rng, near=rng.random() < 0.5)
            return trace.with_decision(chosen, place, remove_postproc=True)

        def clone(self):
            return _one_decision(ms, rng)

    return OneDecision()


def _two_decisions(ms, rng: random.Random, names: list[str], pairs: list[tuple[str, str]]):
    """Mutator: two decisions that share a resource change together, since neither may be legal or better alone."""
    from tvm.ir.utils import derived_object

    @derived_object
    class TwoDecisions(ms.mutator.PyMutator):
        def _initialize_with_tune_context(self, context) -> None:
            pass

        def apply(self, trace, _):
            # decisions are sampled in the order of the space's choices
            instructions = dict(zip(names, (i for i in trace.insts if i.kind.name == "SampleCategorical"), strict=True))
            usable = [p for p in pairs if all(len(instructions[n].attrs[0]) > 1 for n in p)]
            if not usable:
                return None
            for name in rng.choice(usable):
                place = _other(trace, instructions[name], rng, near=rng.random() < 0.5)
                trace = trace.with_decision(instructions[name], place, remove_postproc=True)
                instructions = dict(
                    zip(names, (i for i in trace.insts if i.kind.name == "SampleCategorical"), strict=True)
                )
            return trace

        def clone(self):
            return _two_decisions(ms, rng, names, pairs)

    return TwoDecisions()


class Sweep:
    """Every legal configuration, in random order."""

    def __init__(self, space: Space, known: Mapping[tuple, Any], rejections: Rejections, *, seed: int = 0) -> None:
        self.space, self.known, self.rejections = space, known, rejections
        self.rng = random.Random(seed)
        self._rest: list[dict] | None = None

    def batch(self, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` legal configurations that were not measured; none when there are no more."""
        if self._rest is None:
            self._rest = self._list()
            self.rng.shuffle(self._rest)
        out: list[dict[str, Any]] = []
        while self._rest and len(out) < count:
            config = self._rest.pop()
            key = self.space.key(config)
            # what the compiler refused since the list was made is not legal any more
            if key not in self.known and self.space.reason(config) is None:
                out.append(config)
        return out

    def _list(self) -> list[dict]:
        legal = self.space.legal
        if legal is not None:
            for config in self.space.configs():
                reason = self.space.reason(config)
                if reason is not None:
                    self.rejections.add(self.space.key(config), reason)
            return list(legal)
        # too many to list: a sample
        found = {}
        for _ in range(20_000):
            config = {name: self.rng.choice(values) for name, values in self.space.choices.items()}
            if self.space.reason(config) is None:
                found[self.space.key(config)] = config
        return list(found.values())


class Evolution:
    """MetaSchedule's EvolutionarySearch over a space.

    Parameters
    ----------
    space : Space
        What to search.
    known : mapping
        Configuration's key -> anything, of those that are or will be measured, kept up to date by the caller.
    database : tvm.s_tir.meta_schedule.Database
        Where measured records go; the search starts its populations from the best of them.
    model : CostModel
        Ranks populations.
    target : tvm.target.Target
        For MetaSchedule's context.
    rejections : Rejections
        Counts what was dropped.
    """

    def __init__(
        self,
        space: Space,
        known: Mapping[tuple, Any],
        database,
        model: CostModel,
        target,
        rejections: Rejections,
        *,
        batch: int = 8,
        seed: int = 0,
    ) -> None:
        ms = import_meta_schedule()
        self.space, self.known, self.size = space, known, batch
        self.rest = Sweep(space, known, rejections, seed=seed)
        rng = random.Random(seed)
        mutators = {_one_decision(ms, rng): 0.6}
        pairs = [p for p in space.problem.spec.coupled if all(n in space.choices for n in p)]
        if pairs:
            mutators[_two_decisions(ms, rng, list(space.choices), pairs)] = 0.4
        self._ms, self._model, self._empty = ms, model, 0
        self._context = ms.TuneContext(
            space.workload(),
            target=target,
            space_generator=ms.space_generator.ScheduleFn(
                space.sample,
                sch_rules=[],
                postprocs=[_postproc(ms, space, known, rejections)],
                mutator_probs=mutators,
            ),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=POPULATION,
                init_measured_ratio=0.25,
                init_min_unmeasured=max(8, batch),
                max_fail_count=10,
                genetic_num_iters=4,
                genetic_mutate_prob=0.85,
                genetic_max_fail_count=20,
                eps_greedy=0.1,
            ),
            task_name=space.problem.spec.name,
            rand_state=seed + 1,
            # one thread: its work is in Python, and runs stay reproducible
            num_threads=1,
            logger=_quiet_logger(),
        )
        self._context.pre_tuning(
            _UNLIMITED, batch, database=database, cost_model=as_meta_schedule(model, space.config_of)
        )

    def batch(self, count: int) -> list[dict[str, Any]]:
        """Up to ``count`` legal configurations that were not measured; none when the space is used up."""
        while self._empty < EMPTY_ROUNDS:
            self._model.new_round()
            with deferred():
                candidates = self._context.generate_measure_candidates()
            if candidates is None:
                self._empty = EMPTY_ROUNDS
                break
            configs = [self.space.config_of(c.sch) for c in candidates]
            fresh = {self.space.key(c): c for c in configs if self.space.key(c) not in self.known}
            # the compiler may have refused some while the cost model asked for their features
            fresh = {k: c for k, c in fresh.items() if self.space.reason(c) is None}
            self._answer(candidates)
            if fresh:
                self._empty = 0
                return list(fresh.values())[:count]
            self._empty += 1
        return self.rest.batch(count)

    def _answer(self, candidates) -> None:
        """MetaSchedule wants as many results as it gave candidates before it gives the next ones.

        It only counts them. What was measured reaches its populations through the database and the cost model, as soon
        as it is known, so that the next candidates can be asked for while earlier ones are still being measured.
        """
        answers = [self._ms.runner.RunnerResult(None, "measured apart") for _ in candidates]
        with deferred():
            self._context.notify_runner_results(candidates, answers)


def _quiet_logger():
    import logging

    logger = logging.getLogger("tvm_tile.tune.search")
    logger.setLevel(logging.ERROR)
    return logger
