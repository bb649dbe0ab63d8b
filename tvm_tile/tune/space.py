"""The space of configurations of one op and shape, as MetaSchedule sees it.

The workload is a stub: a PrimFunc without a body whose root block names the kernel, its version and its static
arguments, so that its identity does not depend on any tile size. Every decision is one ``sample_categorical`` whose
value is written on the root block; the trace of a record therefore holds the whole configuration, and with the version
of the op's factory it rebuilds the kernel.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..errors import TileError, TileTypeError
from ..ops.common import target_class

__all__ = ["Problem", "Space", "import_meta_schedule", "machine_of"]

PREFIX = "tile.decision."
#: Spaces up to this many combinations are counted exactly.
COUNTABLE = 200_000


@contextmanager
def _cheap_stack() -> Iterator[None]:
    """``inspect.stack`` without source lookup: importing ``tvm.s_tir.tensor_intrin`` calls it 496 times (40 s)."""

    def stack(context: int = 1) -> list:
        frame, out = sys._getframe(1), []
        while frame is not None:
            code = frame.f_code
            out.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return out

    original, inspect.stack = inspect.stack, stack
    try:
        yield
    finally:
        inspect.stack = original


def import_meta_schedule():
    """``tvm.s_tir.meta_schedule``, imported in seconds even where torch is loaded."""
    with _cheap_stack():
        import tvm.s_tir.tensor_intrin  # noqa: F401
    from tvm.s_tir import meta_schedule

    return meta_schedule


def machine_of(target):
    """The hardware description of a TVM target, with the target's own limit on shared memory."""
    from .. import hardware

    if target.kind.name != "cuda":
        return hardware.lookup("cpu")
    arch, limit = str(target.attrs["arch"]).removesuffix("a"), int(target.attrs["max_shared_memory_per_block"])
    try:
        return hardware.gpu_of_target(arch, limit)
    except KeyError:
        # sm_86 and sm_89 run the code of sm_80 within less shared memory
        return replace(hardware.lookup("sm_80"), name=arch, shared_per_block=limit)


@dataclass(frozen=True)
class Problem:
    """What is tuned: an op, a shape, a dtype and a class of targets.

    Attributes
    ----------
    spec : OpSpec
        The op.
    shape : dict
        Complete shape; options left open to the tuner are 0.
    dtype : str
        Element dtype.
    target : str
        Class of targets (``cpu``, ``sm_80``, ``sm_90``), by which untuned values are chosen.
    """

    spec: Any
    shape: Mapping[str, Any]
    dtype: str
    target: str

    @classmethod
    def of(cls, spec, shape: Mapping[str, Any] | None, dtype: str | None, target) -> Problem:
        """The problem of an op's shape on a TVM target."""
        from ..ops.common import check_dtype

        dtype = check_dtype(spec.name, "dtype", spec.dtypes[0] if dtype is None else dtype, spec.dtypes)
        return cls(spec, spec.identity(shape), dtype, target_class(target))

    @property
    def identity(self) -> dict[str, Any]:
        """Kernel, version, static arguments, dtype and class of targets."""
        return {
            "kernel": self.spec.name,
            "version": self.spec.version,
            "shape": dict(self.shape),
            "dtype": self.dtype,
            "target": self.target,
        }

    @property
    def key(self) -> str:
        """The identity as text."""
        return json.dumps(self.identity, sort_keys=True)

    @property
    def title(self) -> str:
        """For people: ``gemm m=64 n=64 k=64 float16``."""
        defaults = {k: d for k, (_, d, _) in self.spec.shape_params.items()}
        shown = [
            f"{k}={int(v) if isinstance(v, bool) else v}"
            for k, v in self.shape.items()
            if v is not None and (k in self.spec.sizes or v != defaults.get(k))
        ]
        return " ".join([self.spec.name, *shown, self.dtype])

    def configured(self, config: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """(complete shape, complete tunables) of a configuration."""
        return self.spec.configured(self.shape, self.dtype, self.target, config)

    def make(self, config: Mapping[str, Any] | None = None):
        """The kernel of a configuration."""
        shape, tunables = self.configured(config)
        return self.spec.make(shape, self.dtype, self.target, **tunables)


@dataclass
class Space:
    """The configurations of a problem.

    Attributes
    ----------
    problem : Problem
        What is tuned.
    machine : GPU or CPU
        Whose limits decide what is legal.
    values : dict
        Decision -> the only values to try; the untuned one stays, and decisions left out keep the op's list.
    refused : dict
        Configuration's key -> reason, of those that the compiler refused.
    """

    problem: Problem
    machine: Any
    values: Mapping[str, list] = field(default_factory=dict)
    refused: dict[tuple, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._reasons: dict[tuple, str | None] = {}

    @cached_property
    def choices(self) -> dict[str, list]:
        """Decision -> values, the untuned one among them."""
        problem = self.problem
        found = problem.spec.choices(problem.shape, problem.dtype, problem.target)
        for name, wanted in self.values.items():
            if name not in found:
                known = ", ".join(found)
                raise TileError(f"{problem.spec.name} has no decision {name!r} here", advice=f"it has {known}")
            for value in wanted:
                if value not in found[name]:
                    raise TileError(f"{name}={value!r} is not one of {found[name]}")
            found[name] = [v for v in found[name] if v in wanted or v == self._untuned[name]]
        return {name: values for name, values in found.items() if values}

    @cached_property
    def _untuned(self) -> dict[str, Any]:
        shape, tunables = self.problem.configured()
        return {**{name: shape[name] for name in self.problem.spec.options}, **tunables}

    @cached_property
    def default(self) -> dict[str, Any]:
        """The untuned configuration."""
        out = {}
        for name, values in self.choices.items():
            if self._untuned.get(name) not in values:
                raise TileError(f"{self.problem.spec.name}: the untuned value of {name} is not one of its choices")
            out[name] = self._untuned[name]
        return out

    @property
    def size(self) -> int:
        """Number of combinations, legal or not."""
        return math.prod(len(v) for v in self.choices.values())

    def key(self, config: Mapping[str, Any]) -> tuple:
        """A configuration as a dictionary key."""
        return tuple(config[name] for name in self.choices)

    def configs(self) -> Iterator[dict[str, Any]]:
        """Every combination."""
        for values in itertools.product(*self.choices.values()):
            yield dict(zip(self.choices, values, strict=True))

    @cached_property
    def legal(self) -> list[dict[str, Any]] | None:
        """Every configuration that is legal before anything is built; None for a space too large to list."""
        if self.size > COUNTABLE:
            return None
        return [c for c in self.configs() if self.reason(c) is None]

    def reason(self, config: Mapping[str, Any]) -> str | None:
        """Why a configuration cannot be built; None where nothing is known against it.

        From the op's own rules, the machine's limits, and what the compiler refused before. Text before a colon names
        the kind of reason.
        """
        key = self.key(config)
        if key in self.refused:
            return self.refused[key]
        if key not in self._reasons:
            self._reasons[key] = self._reason(config)
        return self._reasons[key]

    def _reason(self, config: Mapping[str, Any]) -> str | None:
        spec, problem = self.problem.spec, self.problem
        shape, tunables = problem.configured(config)
        found = spec.illegal(shape, problem.dtype, problem.target, tunables)
        if found is None and (footprint := self.footprint(config)) is not None:
            found = footprint.unfit(self.machine)
        return found

    def footprint(self, config: Mapping[str, Any]):
        """The op's footprint of a configuration; None where it does not say."""
        shape, tunables = self.problem.configured(config)
        return self.problem.spec.footprint(shape, self.problem.dtype, self.problem.target, tunables)

    # ---- as MetaSchedule's traces

    def _numbers(self, name: str) -> list[int]:
        """What a trace stores for a decision's values: integers themselves, the place in the op's list for others."""
        values = self.choices[name]
        if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            return list(values)
        declared = self.problem.spec.tunables[name]
        return [declared.index(v) for v in values]

    def _value(self, name: str, number: int) -> Any:
        numbers = self._numbers(name)
        if number not in numbers:
            raise TileError(f"{self.problem.spec.name}: {name}={number} of the record is not one of {numbers}")
        return self.choices[name][numbers.index(number)]

    def workload(self):
        """The stub module that names this problem in a database; independent of every decision."""
        import tvm
        from tvm import tirx
        from tvm.s_tir import SBlock, SBlockRealize

        spec = self.problem.spec
        notes = {
            "tile.kernel": spec.name,
            "tile.version": spec.version,
            "tile.static": json.dumps(dict(self.problem.shape), sort_keys=True),
            "tile.dtype": self.problem.dtype,
            "tile.target": self.problem.target,
        }
        nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
        root = SBlockRealize([], True, SBlock([], [], [], "root", nothing, annotations=notes))
        func = tirx.PrimFunc([], root).with_attr("global_symbol", "main").with_attr("s_tir", True)
        flops = float(spec.flops(self.problem.configured()[0]))
        return tvm.IRModule({"main": func.with_attr("estimated_flops", flops)})

    def sample(self, sch, config: Mapping[str, Any] | None = None):
        """Write every decision into a schedule of the workload, at random or as a configuration says."""
        root = sch.get_sblock("root")
        for name in self.choices:
            numbers = self._numbers(name)
            place = None if config is None else self.choices[name].index(config[name])
            value = sch.sample_categorical(numbers, [1.0 / len(numbers)] * len(numbers), decision=place)
            sch.annotate(root, PREFIX + name, value)
        return sch

    def schedule(self, config: Mapping[str, Any]):
        """A schedule of the workload whose trace holds a configuration."""
        from tvm.s_tir import Schedule

        for name, values in self.choices.items():
            if config.get(name) not in values:
                raise TileTypeError(f"{self.problem.spec.name}: {name}={config.get(name)!r} is not one of {values}")
        return self.sample(Schedule(self.workload()), config)

    def config_of(self, sch) -> dict[str, Any]:
        """The configuration that a schedule of the workload holds."""
        notes = sch.get(sch.get_sblock("root")).annotations
        return {name: self._value(name, int(notes[PREFIX + name])) for name in self.choices}

    def config_of_trace(self, trace) -> dict[str, Any]:
        """The configuration that a record's trace holds."""
        from tvm.s_tir import Schedule

        sch = Schedule(self.workload())
        trace.apply_to_schedule(sch, remove_postproc=True)
        return self.config_of(sch)
