"""The result of a tuning run, and its summary table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .progress import time_text
from .records import Record

__all__ = ["Report"]


@dataclass
class Report:
    """Result of a run.

    Attributes
    ----------
    title : str
        What was tuned.
    config : dict or None
        The winner: tunables and options; None when nothing worked.
    seconds, default_seconds : float or None
        Of the winner and of the untuned configuration, measured side by side at the end.
    measured : int
        Trials in the database, failures included; ``fresh`` of them were made by this run.
    failures, rejected : Counter
        Trials that failed and configurations that were dropped before building, by kind.
    examples : dict
        Kind -> one message.
    seconds_per_trial : float
        Wall time of this run over its fresh trials.
    space, legal : int
        Combinations, and those that are legal before building (-1 where there are too many to count).
    interrupted : bool
        Ended by Ctrl-C.
    folder : Path
        Where the database is.
    record : Record or None
        What was stored.
    """

    title: str
    config: dict[str, Any] | None
    seconds: float | None
    default_seconds: float | None
    measured: int
    fresh: int
    failures: Counter
    rejected: Counter
    examples: dict[str, str]
    seconds_per_trial: float
    space: int
    legal: int
    interrupted: bool
    folder: Path
    record: Record | None = None
    flops: float = 0.0

    def lines(self) -> list[str]:
        """The summary table."""
        out = [f"{'tuned' if self.config else 'failed'}      {self.title}"]
        if self.config is not None:
            out.append("config     " + " ".join(f"{k}={v}" for k, v in self.config.items()))
            rate = f", {self.flops / self.seconds / 1e12:.4g} TFLOP/s" if self.flops else ""
            out.append(f"time       {time_text(self.seconds)}{rate}")
            if self.default_seconds:
                gain = self.default_seconds / self.seconds
                out.append(f"untuned    {time_text(self.default_seconds)} ({gain:.2f}x)")
            else:
                out.append("untuned    the default configuration failed")
        legal = "" if self.legal < 0 else f", {self.legal} legal"
        out.append(f"space      {self.space} combinations{legal}")
        out.append(f"trials     {self.measured} ({self.fresh} in this run, {self.seconds_per_trial:.2f} s each)")
        for name, counts in (("failed", self.failures), ("rejected", self.rejected)):
            for kind, count in counts.most_common():
                example = self.examples.get(kind, "")
                out.append(f"{name:<10} {count} {kind}" + (f", e.g. {example}" if example else ""))
        out.append(f"records    {self.folder}")
        if self.interrupted:
            out.append("interrupted; go on with --resume")
        return out
