"""Worker processes that may hang, crash or lose their GPU without taking the tuning run with them."""

from __future__ import annotations

import os
import queue
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InternalError

__all__ = ["Outcome", "Pool"]

#: Seconds that a worker may take to start (imports of TVM and torch on a loaded machine).
START_TIMEOUT = 180.0
_HEADER = struct.Struct("<Q")


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes
    ----------
    value : object
        What the task returned, where it did.
    error : str or None
        Kind of failure: ``timeout``, ``crash``, or the exception's type.
    message : str
        The exception's text, or the last lines that a crashed worker wrote.
    """

    value: Any = None
    error: str | None = None
    message: str = ""


class _Worker:
    """One child process; :meth:`call` is not reentrant."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.log = tempfile.TemporaryFile()
        package_root = str(Path(__file__).resolve().parents[2])
        paths = [package_root, *(p for p in sys.path if p)]
        env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tvm_tile.tune.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=env,
            # its own group: Ctrl-C reaches the tuner only, and what the worker starts can be ended with it
            start_new_session=True,
        )

    def start(self) -> Outcome | None:
        """Wait until it is ready; the failure if it is not."""
        outcome = self._receive(time.monotonic() + START_TIMEOUT)
        return None if outcome.value == "ready" else outcome

    def call(self, payload: bytes, timeout: float) -> Outcome:
        try:
            self.process.stdin.write(_HEADER.pack(len(payload)) + payload)
            self.process.stdin.flush()
        except OSError:
            return self._died()
        return self._receive(time.monotonic() + timeout)

    def _receive(self, deadline: float) -> Outcome:
        import pickle

        header = self._read(_HEADER.size, deadline)
        if isinstance(header, Outcome):
            return header
        body = self._read(_HEADER.unpack(header)[0], deadline)
        if isinstance(body, Outcome):
            return body
        kind, value, message = pickle.loads(body)
        return Outcome(value=value) if kind is None else Outcome(error=kind, message=message)

    def _read(self, size: int, deadline: float) -> bytes | Outcome:
        descriptor, parts = self.process.stdout.fileno(), []
        while size:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return Outcome(error="timeout", message="no answer within the time limit")
            part = os.read(descriptor, min(size, 1 << 20))
            if not part:
                return self._died()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _died(self) -> Outcome:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        return Outcome(error="crash", message=f"the process ended ({how}){self._tail()}")

    def _tail(self) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 2000))
        lines = self.log.read().decode(errors="replace").strip().splitlines()[-5:]
        return ": " + " | ".join(lines) if lines else ""

    def kill(self) -> None:
        """End it and everything it started, now."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            pass  # stuck in the driver; the system reaps it later
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except OSError:
                pass
        self.log.close()


class Pool:
    """Worker processes that run tasks of :mod:`tvm_tile.tune.worker`; one that fails badly is replaced.

    Parameters
    ----------
    count : int
        Processes; they start at once.
    environment : dict, optional
        Variables added to each.
    """

    def __init__(self, count: int, environment: dict[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self._queue: queue.Queue = queue.Queue()
        self._lock = threading.Lock()
        self._closed = False
        self._workers: set[_Worker] = set()
        self.count = count
        self.restarts = 0
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: str, arguments: Callable[[], dict] | dict, timeout: float) -> Future:
        """Run a task; the future's result is an :class:`Outcome` and never raises.

        Parameters
        ----------
        task : str
            Name of a task.
        arguments : dict, or callable that makes it
            A callable is asked when the task starts.
        timeout : float
            Seconds, from when a worker has it; the worker is killed after that.
        """
        future: Future = Future()
        self._queue.put((future, task, arguments, timeout))
        return future

    def _serve(self) -> None:
        # started before the first task comes: the imports take seconds
        worker, _ = self._started()
        while True:
            item = self._queue.get()
            if item is None:
                break
            future, task, arguments, timeout = item
            if self._closed or not future.set_running_or_notify_cancel():
                continue
            try:
                worker, outcome = self._run(worker, task, arguments, timeout)
            except Exception as error:  # a fault of ours must not leave the future without a result
                outcome = Outcome(error=type(error).__name__, message=str(error))
            future.set_result(outcome)
        if worker is not None:
            self._drop(worker)

    def _run(self, worker: _Worker | None, task: str, arguments, timeout: float):
        if worker is None:
            worker, problem = self._started()
            if worker is None:
                return None, problem
        payload = _dumps((task, arguments() if callable(arguments) else arguments))
        outcome = worker.call(payload, timeout)
        # after a CUDA error the context is unusable, and a hanging task never answers
        if outcome.error in ("timeout", "crash", "sticky"):
            self._drop(worker)
            self.restarts += 1
            worker = None
        return worker, outcome

    def _started(self) -> tuple[_Worker | None, Outcome | None]:
        with self._lock:
            if self._closed:
                return None, Outcome(error="cancelled")
            worker = _Worker(self.environment)
            self._workers.add(worker)
        problem = worker.start()
        if problem is None:
            return worker, None
        self._drop(worker)
        return None, Outcome(error="worker", message=f"a worker process did not start: {problem.message}")

    def _drop(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.kill()

    def close(self) -> None:
        """Kill all processes and drop what waits."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for worker in workers:
            try:
                os.killpg(worker.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout=40)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()


def _importable(module) -> bool:
    """Whether a worker, which has our search path, finds the same module by its name."""
    import importlib.util

    try:
        found = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    return found is not None and found.origin == getattr(module, "__file__", None)


def _dumps(value) -> bytes:
    """Pickle, with classes of modules that a worker cannot import sent along."""
    import cloudpickle

    spec = value[1].get("spec")
    module = sys.modules.get(type(spec).__module__) if spec is not None else None
    if module is None or module.__name__ == "__main__" or _importable(module):
        return cloudpickle.dumps(value)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise InternalError(f"the op {spec!r} cannot be sent to another process: {error}") from error
    finally:
        cloudpickle.unregister_pickle_by_value(module)
