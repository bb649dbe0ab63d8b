"""``tvm-tile cache``: what the disk cache holds; prune or clear it."""

from __future__ import annotations

from . import common


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("cache", help="show, prune or clear the disk cache of compiled kernels")
    parser.add_argument("action", nargs="?", choices=("show", "prune", "clear"), default="show")
    parser.add_argument("--limit-mb", type=float, help="prune to this size (default: TVM_TILE_CACHE_SIZE_MB or 2048)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def execute(arguments) -> int:
    """Do it and print what the cache holds afterwards."""
    from ..runtime import cache

    removed = 0
    if arguments.action == "prune":
        removed = cache.prune(None if arguments.limit_mb is None else int(arguments.limit_mb * 1e6))
    elif arguments.action == "clear":
        removed = cache.clear()
    info = cache.info()
    document = {"folder": info.folder, "entries": info.entries, "bytes": info.bytes, "removed": removed}
    lines = [f"removed {removed} kernels"] if arguments.action != "show" else []
    lines.append(f"{info.folder}: {info.entries} kernels, {info.bytes / 1e6:.1f} MB")
    common.emit(arguments, document, lines)
    return 0
