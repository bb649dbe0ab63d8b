"""``tvm-tile export OP -o FILE``: write a library that loads without the compiler."""

from __future__ import annotations

from . import common


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("export", help="write an op as a library that loads without the compiler")
    common.add_op_options(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="library to write, e.g. mla.so")


def execute(arguments) -> int:
    """Compile (no GPU needed) and write the library."""
    import tvm_tile

    op = common.prepare(arguments)
    kernel = tvm_tile.compile(op.function, op.target)
    path = kernel.export(arguments.output)
    size = path.stat().st_size
    document = {
        "op": op.spec.name,
        "target": kernel.target,
        "shape": op.shape,
        "dtype": op.dtype,
        "config": kernel.config,
        "config_source": kernel.config_source,
        "file": str(path),
        "bytes": size,
        "signature": str(kernel.signature),
    }
    lines = [
        f"wrote {path} ({size / 1024:.0f} KB) for {kernel.target}",
        f"config {' '.join(f'{k}={v}' for k, v in kernel.config.items())} ({kernel.config_source})",
        f"load it with tvm_tile.load({str(path)!r}) and call {kernel.signature}",
    ]
    common.emit(arguments, document, lines)
    return 0
