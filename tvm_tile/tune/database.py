"""MetaSchedule's JSON database of one op on one machine, safe against kills, with our log of trials beside it.

A folder holds ``database_workload.json`` and ``database_tuning_record.json`` (MetaSchedule's own format; the trace is
what rebuilds a kernel), ``trials.jsonl`` (one line a trial, failures with their reason) and ``best.json`` (the verified
winners, see :mod:`.records`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import TileError
from .interrupt import deferred
from .space import Space, import_meta_schedule

__all__ = ["Database", "locked", "read_lines", "repair", "replay", "rewrite"]

WORKLOADS, RECORDS, TRIALS = "database_workload.json", "database_tuning_record.json", "trials.jsonl"
#: MetaSchedule's time of a failed trial: such records are never among its best.
FAILED_SECONDS = 1e10


def repair(path: Path) -> int:
    """Cut an incomplete last line, which a kill in the middle of a write leaves; returns the bytes that were cut."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    end = len(data)
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        try:
            json.loads(data[start:end])
            break
        except ValueError:
            end = start
    if end and not data[:end].endswith(b"\n"):
        # whole, but without its newline: the next line would be glued to it
        with path.open("ab") as file:
            file.truncate(end)
            file.write(b"\n")
    elif end < len(data):
        os.truncate(path, end)
    return len(data) - end


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; an incomplete last line is passed over."""
    out: list[dict[str, Any]] = []
    if not path.exists():
        return out
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            out.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                break
            raise TileError(f"{path}:{number} is not JSON", advice="remove the line") from None
    return out


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for writing; another tuner's folder is refused at once."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TileError(
                f"another process is writing to {folder}", advice="wait for it or use another --out"
            ) from None
        yield


class Database:
    """The trials of one problem in a folder.

    Parameters
    ----------
    folder : Path
        Where the files are.
    space : Space
        Whose trials.
    target : tvm.target.Target
        Written into the records.
    """

    def __init__(self, folder: Path, space: Space, target) -> None:
        import tvm

        ms = import_meta_schedule()
        self.folder, self.space = folder, space
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WORKLOADS, RECORDS, TRIALS):
            repair(folder / name)
        self._ms = ms
        self._open()
        # the list of a CPU's features is long, and the folder's name says the machine
        config = {k: v for k, v in dict(target.export()).items() if k not in ("mattr", "host", "tag")}
        self.target = tvm.target.Target(config)
        #: Configuration's key -> seconds, None for a failure.
        self.known: dict[tuple, float | None] = {}
        self.stale = 0
        self._load()

    def _load(self) -> None:
        for record in self.meta.get_all_tuning_records():
            if not record.workload.same_as(self.workload):
                continue
            try:
                config = self.space.config_of_trace(record.trace)
            except TileError:
                self.stale += 1  # its value is not in the op's lists any more
                continue
            seconds = [float(s) for s in record.run_secs or []]
            good = bool(seconds) and seconds[0] < FAILED_SECONDS
            key = self.space.key(config)
            if good or self.known.get(key) is None:
                self.known[key] = seconds[0] if good else None

    def trials(self) -> list[dict[str, Any]]:
        """The log's lines of this problem, oldest first."""
        identity = self.space.problem.identity
        return [t for t in read_lines(self.folder / TRIALS) if t.get("problem") == identity]

    def add(self, config: Mapping[str, Any], seconds: float | None, details: Mapping[str, Any]) -> None:
        """Write one measured trial; it is on disk when this returns."""
        trace = self.space.schedule(config).trace
        times = [FAILED_SECONDS if seconds is None else float(seconds)]
        record = self._ms.database.TuningRecord(trace, self.workload, times, self.target, [])
        line = {"problem": self.space.problem.identity, "config": dict(config), "seconds": seconds, **details}
        with deferred():
            self.meta.commit_tuning_record(record)
            with (self.folder / TRIALS).open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.known[self.space.key(config)] = seconds

    def config(self, key: tuple) -> dict[str, Any]:
        """A key's configuration."""
        return dict(zip(self.space.choices, key, strict=True))

    def ranking(self) -> list[tuple[dict[str, Any], float]]:
        """(configuration, seconds) of what worked, fastest first."""
        good = [(self.config(k), s) for k, s in self.known.items() if s is not None]
        return sorted(good, key=lambda entry: entry[1])

    def forget(self) -> None:
        """Throw this problem's trials away, those of other problems stay."""
        rewrite(self.folder, lambda record: not tvm_equal(record.workload.mod, self.workload.mod))
        identity = self.space.problem.identity
        kept = [t for t in read_lines(self.folder / TRIALS) if t.get("problem") != identity]
        _write_lines(self.folder / TRIALS, kept)
        self._open()
        self.known.clear()

    def _open(self) -> None:
        self.meta = self._ms.database.JSONDatabase(work_dir=str(self.folder))
        self.workload = self.meta.commit_workload(self.space.workload())

    def drop(self, configs: list[dict[str, Any]]) -> None:
        """Take trials out of the database again (wrong results), leaving a failure in their place."""
        keys = {self.space.key(c) for c in configs}

        def keep(record) -> bool:
            if not tvm_equal(record.workload.mod, self.workload.mod):
                return True
            try:
                return self.space.key(self.space.config_of_trace(record.trace)) not in keys
            except TileError:
                return True

        rewrite(self.folder, keep)
        self._open()
        for config in configs:
            trace = self.space.schedule(config).trace
            record = self._ms.database.TuningRecord(trace, self.workload, [FAILED_SECONDS], self.target, [])
            self.meta.commit_tuning_record(record)
            self.known[self.space.key(config)] = None


def tvm_equal(a, b) -> bool:
    """Structural equality of two modules."""
    import tvm_ffi

    return bool(tvm_ffi.structural_equal(a, b))


def rewrite(folder: Path, keep: Callable[[Any], bool], sources: list[Path] | None = None) -> int:
    """Write a folder's database anew with the records that ``keep`` accepts, of the folder or of ``sources``.

    Returns
    -------
    int
        Records that were left out. The old files stay until the new ones are whole.
    """
    ms = import_meta_schedule()
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".rewrite"))
    left_out = 0
    seen: set[str] = set()
    try:
        new = ms.database.JSONDatabase(work_dir=str(scratch))
        for source in sources or [folder]:
            if not (source / WORKLOADS).exists():
                continue
            for name in (WORKLOADS, RECORDS):
                repair(source / name)
            for record in ms.database.JSONDatabase(work_dir=str(source)).get_all_tuning_records():
                if not keep(record):
                    left_out += 1
                    continue
                workload = new.commit_workload(record.workload.mod)
                entry = ms.database.TuningRecord(record.trace, workload, record.run_secs, record.target, [])
                text = json.dumps([str(workload.mod), str(entry.as_json())])
                if text not in seen:
                    seen.add(text)
                    new.commit_tuning_record(entry)
        for name in (WORKLOADS, RECORDS):
            (scratch / name).touch()
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return left_out


def replay(folder: str | os.PathLike, kernel: str | None = None) -> list[tuple[Any, dict[str, Any], float]]:
    """The best record of every workload in a database, rebuilt from its trace alone.

    Parameters
    ----------
    folder : path
        With the database's two files.
    kernel : str, optional
        Only of this op.

    Returns
    -------
    list of (PrimFunc, dict, float)
        Kernel, configuration and seconds. Workloads of another version of the op are left out: their traces do not
        describe the present kernel.
    """
    from ..ops import registry
    from .space import Problem

    folder = Path(folder)
    if not (folder / RECORDS).exists():
        raise TileError(f"{folder} holds no tuning database")
    ms = import_meta_schedule()
    meta = ms.database.JSONDatabase(work_dir=str(folder))
    best: dict[str, tuple[float, Any]] = {}
    for record in meta.get_all_tuning_records():
        seconds = min((float(s) for s in record.run_secs or []), default=FAILED_SECONDS)
        key = str(record.workload.mod)
        if seconds < FAILED_SECONDS and (key not in best or seconds < best[key][0]):
            best[key] = (seconds, record)
    out = []
    for seconds, record in best.values():
        notes = record.workload.mod["main"].body.block.annotations
        name = str(notes["tile.kernel"])
        spec = registry.get(name)
        if (kernel is not None and name != kernel) or int(notes["tile.version"]) != spec.version:
            continue
        static = json.loads(str(notes["tile.static"]))
        problem = Problem(spec, spec.identity(static), str(notes["tile.dtype"]), str(notes["tile.target"]))
        space = Space(problem, machine=None)
        config = space.config_of_trace(record.trace)
        out.append((problem.make(config), config, seconds))
    return out


def merge_trials(store: Path, source: Path) -> int:
    """Add the databases of another store; returns the trials that were new."""
    added = 0
    for trials in sorted(source.glob(f"*/*/{TRIALS}")):
        folder = store / trials.relative_to(source).parent
        with locked(folder):
            have = read_lines(folder / TRIALS)
            seen = {json.dumps(t, sort_keys=True) for t in have}
            fresh = [t for t in read_lines(trials) if json.dumps(t, sort_keys=True) not in seen]
            rewrite(folder, lambda record: True, [folder, trials.parent])
            _write_lines(folder / TRIALS, [*have, *fresh])
            added += len(fresh)
    return added


def prune(folder: Path, keep: int) -> int:
    """Leave the ``keep`` fastest trials of each workload, no failures; returns the trials that were removed."""
    with locked(folder):
        groups: dict[str, list[dict[str, Any]]] = {}
        for trial in read_lines(folder / TRIALS):
            groups.setdefault(json.dumps(trial["problem"], sort_keys=True), []).append(trial)
        kept, removed = [], 0
        for trials in groups.values():
            good = sorted((t for t in trials if t["seconds"] is not None), key=lambda t: t["seconds"])[:keep]
            kept += good
            removed += len(trials) - len(good)
        ms = import_meta_schedule()
        measured: dict[str, list[float]] = {}
        for record in ms.database.JSONDatabase(work_dir=str(folder)).get_all_tuning_records():
            times = measured.setdefault(str(record.workload.mod), [])
            times.append(min((float(s) for s in record.run_secs or []), default=FAILED_SECONDS))
        limit = {key: sorted(times)[:keep][-1] for key, times in measured.items()}

        def fast(record) -> bool:
            seconds = min((float(s) for s in record.run_secs or []), default=FAILED_SECONDS)
            return seconds < FAILED_SECONDS and seconds <= limit[str(record.workload.mod)]

        rewrite(folder, fast)
        _write_lines(folder / TRIALS, kept)
    return removed


def _write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    """Replace a file of JSON lines at once."""
    scratch = path.with_name(path.name + ".new")
    scratch.write_text("".join(json.dumps(o) + "\n" for o in objects))
    os.replace(scratch, path)
