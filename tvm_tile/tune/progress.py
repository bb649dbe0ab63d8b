"""What a person sees of a tuning run: a line that lives, and the table at the end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TextIO

__all__ = ["Progress", "duration", "time_text"]


def time_text(seconds: float) -> str:
    """A kernel's time in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.2f} us"


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    seconds = int(seconds + 0.5)
    if seconds < 60:
        return f"{seconds}s"
    return (
        f"{seconds // 60}m{seconds % 60:02d}s" if seconds < 3600 else f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    )


class Progress:
    """Draws the state of a run on a terminal; elsewhere prints a line now and then.

    Parameters
    ----------
    stream : file, optional
        Standard error by default.
    every : float
        Seconds between lines where the stream is no terminal.
    """

    WIDTH = 20

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.every, self._last, self._drawn = every, 0.0, 0
        self.start = time.monotonic()

    def message(self, text: str) -> None:
        """A line of its own."""
        self._clear()
        print(text, file=self.stream, flush=True)

    def update(
        self, done: int, total: int, fresh: int, best: float | None, flops: float, failures: Counter, rejected: int
    ) -> None:
        """Show the state: trials done (``fresh`` of them in this run), best time, failures by kind."""
        now = time.monotonic()
        if now - self._last < (0.1 if self.live else self.every) and done < total:
            return
        self._last = now
        text = self.line(done, total, fresh, best, flops, failures, rejected, now - self.start)
        if self.live:
            self._clear()
            self.stream.write(text)
            self._drawn = len(text)
            self.stream.flush()
        else:
            print(text, file=self.stream, flush=True)

    def line(self, done, total, fresh, best, flops, failures: Counter, rejected, passed: float) -> str:
        """The line's text."""
        filled = self.WIDTH * done // max(1, total)
        parts = [f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {done}/{total}"]
        if best is not None:
            rate = f" ({flops / best / 1e12:.3g} TFLOP/s)" if flops else ""
            parts.append(f"best {time_text(best)}{rate}")
        if fresh:
            each = passed / fresh
            parts.append(f"{each:.2f} s/trial, ETA {duration(each * max(0, total - done))}")
        if failures:
            parts.append("failed: " + ", ".join(f"{n} {kind}" for kind, n in failures.most_common()))
        if rejected:
            parts.append(f"{rejected} rejected")
        return "  ".join(parts)

    def finish(self) -> None:
        """Leave the line as it is and go on below it."""
        if self.live and self._drawn:
            self.stream.write("\n")
            self.stream.flush()
        self._drawn = 0

    def _clear(self) -> None:
        if self.live and self._drawn:
            self.stream.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0


class Silent(Progress):
    """Shows nothing."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.live = False

    def message(self, text: str) -> None:
        """Nothing."""

    def update(self, *args, **kwargs) -> None:
        """Nothing."""
