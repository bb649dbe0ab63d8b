"""The disk cache of compiled kernels.

One entry is one folder, ``kernels/<first two of the key>/<key>/``, made elsewhere and renamed into place: a reader
sees a whole entry or none, whatever is killed and however many processes build the same kernel. ``entry.json`` holds
the checksum of every file and is the last file written; an entry that does not match is thrown away and built anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import TileError

__all__ = [
    "CacheInfo",
    "Entry",
    "add_key_part",
    "cache_dir",
    "clear",
    "info",
    "key_of",
    "load_entry",
    "prune",
    "source_fingerprint",
    "store_entry",
]

ENTRY_FILE = "entry.json"
FORMAT = 1
# Folders of builds that were killed are removed once they are this old (seconds); no build takes that long.
ABANDONED_AFTER = 6 * 3600

_key_parts: dict[str, Callable[[], str]] = {}


def cache_dir() -> Path:
    """The cache's folder: ``$TVM_TILE_CACHE_DIR``, else ``tvm_tile`` in the user's cache folder."""
    named = os.environ.get("TVM_TILE_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tvm_tile"


def max_bytes() -> int:
    """Size that :func:`prune` keeps the cache under: ``$TVM_TILE_CACHE_SIZE_MB`` megabytes, default 2048."""
    text = os.environ.get("TVM_TILE_CACHE_SIZE_MB", "2048")
    try:
        return int(float(text) * 1e6)
    except ValueError:
        raise TileError(f"TVM_TILE_CACHE_SIZE_MB must be a number of megabytes, not {text!r}") from None


def add_key_part(name: str, part: Callable[[], str]) -> None:
    """Add something that changes generated code and is no part of the IR (a user's schedule rules) to every key.

    Parameters
    ----------
    name : str
        Unique; the same name replaces the part.
    part : callable
        Returns a text that is the same in every process with the same setting.
    """
    _key_parts[name] = part


@functools.lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """Hash of tvm_tile's own sources: an edited compiler never reuses what the older one built."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".c", ".cc", ".h", ".cuh")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(parts: Mapping[str, object]) -> str:
    """Key of everything that decides the result: the parts given, our sources and the registered extra parts."""
    whole = {
        **parts,
        "format": FORMAT,
        "sources": source_fingerprint(),
        "extra": {name: part() for name, part in sorted(_key_parts.items())},
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A stored kernel: its folder and what ``entry.json`` says beside the checksums."""

    folder: Path
    data: dict

    def path(self, name: str) -> Path:
        """Path of one of the entry's files."""
        return self.folder / name

    def has(self, name: str) -> bool:
        """Whether the entry holds a file of that name."""
        return (self.folder / name).exists()


def _folder(key: str) -> Path:
    return cache_dir() / "kernels" / key[:2] / key


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _seal(data: dict) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def read_entry(folder: Path) -> Entry | None:
    """The entry in a folder when it is whole, else None."""
    try:
        document = json.loads((folder / ENTRY_FILE).read_text())
        data, files = document["data"], document["files"]
        if document["seal"] != _seal({"data": data, "files": files}):
            return None
        if any(_digest(folder / name) != digest for name, digest in files.items()):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder, data)


def seal_folder(folder: Path, data: dict) -> Entry:
    """Write ``entry.json`` over the files that are in the folder."""
    files = {p.name: _digest(p) for p in sorted(folder.iterdir()) if p.is_file()}
    data = json.loads(json.dumps(data))
    document = {"data": data, "files": files, "seal": _seal({"data": data, "files": files})}
    (folder / ENTRY_FILE).write_text(json.dumps(document))
    return Entry(folder, data)


def load_entry(key: str) -> Entry | None:
    """The stored kernel of a key; a damaged entry is removed."""
    folder = _folder(key)
    if not folder.exists():
        return None
    entry = read_entry(folder)
    if entry is None:
        _discard(folder)
        return None
    try:
        os.utime(folder)  # least recently used entries are pruned first
    except OSError:
        pass
    return entry


def scratch_folder() -> Path:
    """A new folder on the cache's file system, to build an entry in."""
    parent = cache_dir() / "tmp"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}_", dir=parent))
    except OSError as error:
        raise _unwritable(parent, error) from None


def store_entry(key: str, folder: Path, data: dict) -> Entry:
    """Seal a scratch folder and rename it into place; the entry of another process that was faster is used instead."""
    seal_folder(folder, data)
    final = _folder(key)
    final.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        try:
            os.rename(folder, final)
        except OSError:
            if (entry := read_entry(final)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                return entry
            _discard(final)
            continue
        if (entry := read_entry(final)) is not None:
            return entry
        break
    raise _unwritable(final, "its entry does not stay as written")


def _unwritable(folder: Path, reason) -> TileError:
    return TileError(
        f"the cache folder {folder} cannot be written: {reason}",
        advice="set TVM_TILE_CACHE_DIR to another folder, or compile with cache=False",
    )


def _discard(folder: Path) -> None:
    # Rename first: removing in place would show other processes a half-empty entry.
    try:
        grave = scratch_folder()
        os.rename(folder, grave / "entry")
    except (OSError, TileError):
        return
    shutil.rmtree(grave, ignore_errors=True)


@dataclass(frozen=True)
class CacheInfo:
    """Folder, number of entries and size in bytes of the cache."""

    folder: str
    entries: int
    bytes: int


def _entries() -> list[tuple[float, int, Path]]:
    found = []
    for folder in (cache_dir() / "kernels").glob("*/*"):
        try:
            size = sum(p.stat().st_size for p in folder.iterdir())
            found.append((folder.stat().st_mtime, size, folder))
        except OSError:
            continue  # removed meanwhile by another process
    return sorted(found)


def info() -> CacheInfo:
    """What the cache holds."""
    entries = _entries()
    return CacheInfo(str(cache_dir()), len(entries), sum(size for _, size, _ in entries))


def prune(limit: int | None = None) -> int:
    """Remove the least recently used entries until the cache is at most ``limit`` bytes; returns how many went."""
    limit = max_bytes() if limit is None else limit
    entries = _entries()
    total = sum(size for _, size, _ in entries)
    removed = 0
    for _, size, folder in entries:
        if total <= limit:
            break
        _discard(folder)
        total -= size
        removed += 1
    for folder in (cache_dir() / "tmp").glob("*"):
        try:
            if time.time() - folder.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
    return removed


def clear() -> int:
    """Remove every entry; returns how many there were."""
    return prune(limit=-1)
