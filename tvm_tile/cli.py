"""The command line: ``tvm-tile list | run | bench | inspect | export | doctor | cache | tune | log``.

Each command is a module of :mod:`tvm_tile.commands` with ``add_parser(subparsers)`` and ``execute(arguments)``; this
one dispatches and turns errors into messages and exit codes: 0 done, 1 failed (a check or a kernel), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from . import __version__
from .errors import InternalError, TileError

__all__ = ["build_parser", "main"]

COMMANDS = {
    "list": "list_ops",
    "run": "run",
    "bench": "bench",
    "inspect": "inspect_op",
    "export": "export",
    "tune": "tune",
    "log": "log",
    "doctor": "doctor",
    "cache": "cache",
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tvm-tile", description="Tile kernels on stock Apache TVM: run, measure and export the kernel library."
    )
    parser.add_argument("--version", action="version", version=f"tvm_tile {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in COMMANDS.values():
        importlib.import_module(f".commands.{module}", __package__).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default the process's.

    Returns
    -------
    int
        Exit code.
    """
    arguments = build_parser().parse_args(argv)
    command = importlib.import_module(f".commands.{COMMANDS[arguments.command]}", __package__)
    try:
        return command.execute(arguments)
    except (TileError, InternalError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has what it wanted.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
