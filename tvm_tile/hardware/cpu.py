"""The CPU this process runs on, read from the operating system; what cannot be read stays unknown."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

from .base import CPU

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parse_cpuinfo(text: str) -> tuple[str | None, frozenset[str]]:
    """(model name, flags) of the first processor in /proc/cpuinfo's text (x86 and ARM spellings)."""
    name: str | None = None
    flags: frozenset[str] = frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key == "model name" and name is None:
            name = value.strip()
        elif key in ("flags", "features") and not flags:
            flags = frozenset(value.lower().split())
    return name, flags


def parse_size(text: str) -> int | None:
    """Bytes of a cache size such as ``48K`` or ``2M``; None if it is not understood."""
    text = text.strip().upper()
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:])
    digits = text[:-1] if unit else text
    return int(digits) * (unit or 1) if digits.isdigit() else None


def vector_bits(flags: frozenset[str], machine: str) -> int:
    """Width of the widest vector registers, 64 if none are known."""
    if "avx512f" in flags:
        return 512
    if "avx" in flags or "avx2" in flags:
        return 256
    if "sse2" in flags or "asimd" in flags or "neon" in flags or machine.lower() in ("x86_64", "amd64", "arm64",
                                                                                     "aarch64"):
        return 128  # part of the 64-bit base architectures
    return 64


def _caches(folder: Path) -> dict[int, int]:
    """Level -> bytes of the data and unified caches."""
    found: dict[int, int] = {}
    try:
        entries = sorted(folder.glob("index*"))
    except OSError:
        return found
    for entry in entries:
        level, kind, size = (_read(entry / part).strip() for part in ("level", "type", "size"))
        bytes_ = parse_size(size)
        if level.isdigit() and kind in ("Data", "Unified") and bytes_:
            found[int(level)] = bytes_
    return found


def detect(cpuinfo: Path = _CPUINFO, caches: Path = _CACHES) -> CPU:
    """Describe this machine's CPU."""
    name, flags = parse_cpuinfo(_read(cpuinfo))
    machine = platform.machine() or "unknown"
    sizes = _caches(caches)
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return CPU(name or platform.processor() or machine, machine, vector_bits(flags, machine), cores,
               sizes.get(1), sizes.get(2), sizes.get(3), flags)


@lru_cache(maxsize=1)
def this_cpu() -> CPU:
    """`detect`, once a process."""
    return detect()
