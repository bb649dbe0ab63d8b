"""One configuration on its way from an idea to a measurement, and how its failures are named."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REFUSALS", "Trial", "failure_kind", "first_line", "now", "target_text"]

#: Errors of a build that mean "this configuration does not exist", not "the compiler failed".
REFUSALS = ("TileError", "TileTypeError", "TileShapeError", "TileResourceError", "TileTargetError", "TileSyntaxError")


@dataclass
class Trial:
    """One configuration on its way.

    Attributes
    ----------
    config, key : dict, tuple
        The configuration, and the same as the space's key.
    library : str
        File that its kernel is built into.
    seconds : float or None
        Of a call.
    error, message : str
        Kind of failure and its text.
    built : dict
        What the worker said of the build.
    """

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


def target_text(target) -> str:
    """A target as workers rebuild it; on the same machine they find the same CPU features."""
    from ..ir.kernels import plain
    from ..runtime.targets import host_target

    if target.kind.name != "cuda" and str(target) == str(host_target()):
        return "llvm"
    return json.dumps(plain(dict(target.export())))


def failure_kind(stage: str, error: str) -> str:
    """Kind of failure for people."""
    if error == "WrongResult":
        return "wrong result"
    if error == "sticky":
        return "GPU context lost"
    if error in ("timeout", "crash"):
        return f"{stage} {error}"
    return f"{stage} error"


def first_line(text: str) -> str:
    """The first line of a message, not too long."""
    return (text.strip().splitlines() or [""])[0][:300]


def now() -> str:
    """The time as records have it."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
