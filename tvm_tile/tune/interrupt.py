"""Ctrl-C at a safe moment: in TVM's C++ it would come out as another exception, in a write it would cut a line."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["deferred"]


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is left; a second one in the same block is not held back."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread only
        return
    pending = False
    previous = signal.getsignal(signal.SIGINT)

    def hold(number, frame) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
