"""An op with the best configuration known for a shape: what ``tvm_tile.compile("gemm", shape=...)`` compiles."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import TileError
from . import records
from .records import Choice
from .space import Problem, Space, machine_of

__all__ = ["choose", "tuned_function", "with_choice"]

log = logging.getLogger("tvm_tile")


def choose(spec, shape: Mapping[str, Any] | None, dtype: str | None, target, folders=None) -> tuple[Problem, Choice]:
    """The problem of an op's shape on a TVM target, and the configuration by the rule of :mod:`.records`."""
    problem = Problem.of(spec, shape, dtype, target)
    space = Space(problem, machine_of(target))

    def legal(config: Mapping[str, Any]) -> bool:
        # a near record's tile may be a value that this shape's own list leaves out
        if any(name not in spec.tunables and name not in spec.options for name in config):
            return False
        if any(problem.shape[name] != 0 for name in spec.options if name in config):
            return False
        full, tunables = problem.configured(config)
        if spec.illegal(full, problem.dtype, problem.target, tunables) is not None:
            return False
        footprint = spec.footprint(full, problem.dtype, problem.target, tunables)
        return footprint is None or footprint.unfit(space.machine) is None

    arch = str(target.attrs["arch"]) if target.kind.name == "cuda" else "llvm"
    choice = records.lookup(
        spec, problem.shape, problem.dtype, problem.target, arch, records.device_folder(target), legal, folders
    )
    return problem, choice


def tuned_function(op, shape: Mapping[str, Any] | None = None, dtype: str | None = None, target="auto", **tunables):
    """The PrimFunc of an op with the best known configuration.

    Parameters
    ----------
    op : str or OpSpec
        Name of an op of the library, or its description.
    shape : dict, optional
        Shape parameters; those left out take their defaults.
    dtype : str, optional
        The op's first dtype by default.
    target : str or tvm.target.Target
        As in :func:`tvm_tile.compile`.
    **tunables
        Values that take precedence over the record's.

    Returns
    -------
    PrimFunc
        With attributes ``tile.config`` and ``tile.config_source``.
    """
    from ..ops import registry
    from ..runtime.targets import target as resolve

    spec = registry.get(op) if isinstance(op, str) else op
    where = resolve(target)
    for name in tunables:
        if name not in spec.tunables:
            raise TileError(
                f"{spec.name} has no tunable {name!r}", advice=f"it has {', '.join(spec.tunables) or 'none'}"
            )
    return with_choice(*choose(spec, shape, dtype, where), tunables)[1]


def with_choice(problem: Problem, choice: Choice, given: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """(complete shape with its open options decided, PrimFunc) of a choice, where given values take precedence."""
    shape, config = problem.configured({**choice.config, **given})
    func = problem.spec.make(shape, problem.dtype, problem.target, **config)
    text = choice.text if not given else f"{choice.text}; given: {', '.join(given)}"
    log.info("%s: %s", problem.title, text)
    return shape, func.with_attr("tile.config_source", f"{choice.source}: {text}")
