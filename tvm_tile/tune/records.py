"""The store of tuning results: ``<store>/<machine>/<kernel>/best.json``, and which entry a shape gets.

The rule of :func:`lookup`, for a kernel of a given version, dtype and class of targets:

1. the record of exactly this shape made on this machine;
2. else the nearest shape of the same class (all static arguments that are not sizes are equal) on this machine: the
   least sum over the sizes of ``|log2(size / recorded size)|``, where no size differs by more than a factor of
   :data:`NEAR` and the configuration is legal for the new shape; a tie goes to the record with the larger sizes. Only
   tunables are taken over: how many slices a sum is split into depends on the sizes, so that the op decides open
   options for the shape itself. And a record that gained less than :data:`GAIN` over the untuned values is passed over,
   since those are made for the shape at hand;
3. else the untuned values of the op.

Without the machine itself (cross-compilation), records of any machine with the same architecture serve, in the order of
their names. Reading records needs neither TVM nor torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TileError

__all__ = [
    "NEAR", "Choice", "Record", "all_records", "cpu_name", "device_folder", "gpu_name", "lookup", "merge", "put",
    "read", "slug", "stores", "write",
]  # fmt: skip

FORMAT = 1
FILE = "best.json"
#: Sizes further apart than this factor are not near.
NEAR = 4.0
#: Untuned time over tuned time from which a record serves near shapes too.
GAIN = 1.05


@dataclass(frozen=True)
class Record:
    """The verified winner of one tuning run.

    Attributes
    ----------
    kernel, version, shape, dtype, target
        The workload; ``target`` is the class of targets.
    arch : str
        Architecture it was compiled for.
    machine : str
        Folder name of the machine it was measured on.
    config : dict
        Tunables and options.
    seconds, default_seconds : float
        Of the winner and of the untuned configuration, measured together (None where the latter failed).
    trials : int
        Configurations that were measured.
    date : str
        Day of the measurement.
    """

    kernel: str
    version: int
    shape: dict[str, Any]
    dtype: str
    target: str
    arch: str
    machine: str
    config: dict[str, Any]
    seconds: float
    default_seconds: float | None
    trials: int
    date: str = ""

    @property
    def identity(self) -> str:
        """What a store holds one record of."""
        return json.dumps(
            [self.kernel, self.version, self.shape, self.dtype, self.target, self.arch, self.machine], sort_keys=True
        )


@dataclass(frozen=True)
class Choice:
    """The configuration for a shape and where it is from.

    Attributes
    ----------
    config : dict
        Tunables and options; empty for untuned values.
    source : str
        ``exact``, ``nearest`` or ``default``.
    text : str
        The same for people, with the record's shape and machine.
    """

    config: dict[str, Any]
    source: str
    text: str
    record: Record | None = None


def slug(name: str) -> str:
    """A machine's name as a folder name: ``NVIDIA H200`` -> ``nvidia-h200``."""
    words = re.sub(r"\((r|tm)\)|@.*$", " ", name.lower())
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-") or "unknown"


def cpu_name() -> str:
    """Folder name of this CPU and the threads that kernels use: other counts want other tiles."""
    from ..hardware import this_cpu
    from ..runtime.tvm_setup import thread_count

    return f"{slug(this_cpu().name)}-{thread_count()}-threads"


def gpu_name() -> str | None:
    """Folder name of the GPU here; None without one."""
    import ctypes

    from ..runtime.tvm_setup import driver_available

    if not driver_available():
        return None
    driver, device, text = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(text, 256, device):
        return None
    return slug(text.value.decode(errors="replace"))


def device_folder(target) -> str | None:
    """Folder name of the machine that a TVM target runs on here; None where it is not here."""
    if target.kind.name != "cuda":
        return cpu_name()
    from ..runtime.targets import gpu_arch

    arch = str(target.attrs["arch"]).removesuffix("a")
    return gpu_name() if gpu_arch() == arch else None


# ---- files


def stores() -> list[Path]:
    """Folders that records are looked up in, in order.

    ``$TVM_TILE_TUNING_LOGS`` (paths separated as in ``PATH``), else ``tuning_logs`` in the working directory; then the
    records that come with the package.
    """
    named = os.environ.get("TVM_TILE_TUNING_LOGS")
    found = [Path(p).expanduser() for p in named.split(os.pathsep) if p] if named else [Path("tuning_logs")]
    package = Path(__file__).resolve().parents[1]
    # installed with the package, or beside it in a checkout
    found += [package / "tuning_logs", package.parent / "tuning_logs"]
    unique: dict[Path, Path] = {}
    for path in found:
        if path.is_dir():
            unique.setdefault(path.resolve(), path)
    return list(unique.values())


def read(path: str | os.PathLike) -> list[Record]:
    """The records of one ``best.json``.

    Raises
    ------
    TileError
        When it is not such a file; the message names it.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise TileError(f"{path} has format {data['format']}, and this version reads {FORMAT}")
        return [Record(**entry) for entry in data["records"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TileError(f"{path} is no file of tuning records: {error}") from None


def write(path: str | os.PathLike, records: Iterable[Record]) -> None:
    """Write a ``best.json`` at once, one record a line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(vars(r)) for r in sorted(records, key=lambda r: r.identity))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as scratch:
        scratch.write(f'{{"format": {FORMAT}, "records": [\n{lines}\n]}}\n')
    os.chmod(scratch.name, 0o644)
    os.replace(scratch.name, path)


def put(store: str | os.PathLike, record: Record) -> Path:
    """Store a winner in place of an earlier one of the same workload and machine; returns the file."""
    path = Path(store) / record.machine / record.kernel / FILE
    kept = [r for r in read(path) if r.identity != record.identity] if path.exists() else []
    write(path, [*kept, record])
    return path


def all_records(store: str | os.PathLike, kernel: str | None = None) -> list[Record]:
    """Every record of a store, of one kernel if named."""
    out: list[Record] = []
    for path in sorted(Path(store).glob(f"*/{kernel or '*'}/{FILE}")):
        out += read(path)
    return out


def merge(into: str | os.PathLike, sources: Iterable[str | os.PathLike]) -> int:
    """Copy the records of other stores where they are new or faster; returns how many were taken."""
    best = {r.identity: r for r in all_records(into)}
    taken = 0
    for source in sources:
        for record in all_records(source):
            have = best.get(record.identity)
            if have is None or record.seconds < have.seconds:
                best[record.identity] = record
                put(into, record)
                taken += 1
    return taken


# ---- look-up


def lookup(
    spec,
    shape: Mapping[str, Any],
    dtype: str,
    target_class: str,
    arch: str,
    machine: str | None,
    legal: Callable[[Mapping[str, Any]], bool],
    folders: Iterable[Path] | None = None,
) -> Choice:
    """The configuration for a shape by the rule of this module.

    Parameters
    ----------
    spec : OpSpec
        The op.
    shape : dict
        Shape parameters; options that are 0 are open.
    dtype, target_class, arch : str
        Dtype, class of targets and architecture.
    machine : str or None
        Folder name of the machine, None for any of the architecture.
    legal : callable
        Whether a configuration can be built for this shape.
    folders : iterable of Path, optional
        Stores to look in; :func:`stores` by default. Of equal records the first store's counts.
    """
    shape = spec.identity(shape)
    fixed, sizes = spec.shape_class(shape)
    found: list[tuple[float, float, int, Record]] = []
    for place, store in enumerate(stores() if folders is None else folders):
        for record in all_records(store, spec.name):
            if (record.version, record.dtype, record.target, record.arch) != (spec.version, dtype, target_class, arch):
                continue
            if machine is not None and record.machine != machine:
                continue
            distance = _distance(spec, fixed, sizes, record.shape)
            if distance is not None and _serves(record, shape) and legal(_config(spec, record, shape)):
                volume = math.prod(max(1, v) for v in spec.shape_class(record.shape)[1].values())
                found.append((distance, -volume, place, record))
    if not found:
        where = machine or arch
        return Choice({}, "default", f"untuned values: no record of {spec.name} serves this shape on {where}")
    distance, _, _, record = min(found, key=lambda f: (*f[:3], f[3].machine))
    config = _config(spec, record, shape)
    if record.shape == shape:
        return Choice(config, "exact", f"tuned on {record.machine} for this shape", record)
    text = " ".join(f"{k}={v}" for k, v in spec.shape_class(record.shape)[1].items())
    return Choice(config, "nearest", f"tuned on {record.machine} for the near shape {text}", record)


def _serves(record: Record, shape: Mapping[str, Any]) -> bool:
    """Whether a record gained enough for its configuration to be better than one made for the shape."""
    untuned = record.default_seconds
    return record.shape == shape or untuned is None or untuned >= GAIN * record.seconds


def _config(spec, record: Record, shape: Mapping[str, Any]) -> dict[str, Any]:
    """What a shape takes of a record: all of it, or for another shape than the record's its tunables."""
    return {k: v for k, v in record.config.items() if record.shape == shape or k not in spec.options}


def _distance(spec, fixed: Mapping, sizes: Mapping[str, int], recorded: Mapping[str, Any]) -> float | None:
    """Sum of the octaves between the sizes; None for another class or sizes too far apart."""
    try:
        other_fixed, other_sizes = spec.shape_class(recorded)
    except TileError:
        return None  # its parameters do not exist any more
    if other_fixed != fixed:
        return None
    octaves = [abs(math.log2(max(1, sizes[k]) / max(1, other_sizes[k]))) for k in sizes]
    return None if any(o > math.log2(NEAR) for o in octaves) else sum(octaves)
