"""``tvm-tile tune OP``: not in this version; says so and what to do instead."""

from __future__ import annotations

from ..errors import TileError


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("tune", help="search for the best configuration (not in this version)")
    parser.add_argument("op", nargs="?", metavar="OP")
    parser.add_argument("rest", nargs="*", help="ignored")


def execute(arguments) -> int:
    """Refuse clearly."""
    raise TileError(
        "tuning is not in this version of tvm_tile",
        advice="compare configurations by hand: tvm-tile bench OP --config block_M=128 num_stages=2",
    )
