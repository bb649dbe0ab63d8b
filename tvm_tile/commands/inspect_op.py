"""``tvm-tile inspect OP``: resources, tile IR and generated code."""

from __future__ import annotations

from . import common


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("inspect", help="show an op's resources, tile IR or generated code")
    common.add_op_options(parser)
    parser.add_argument(
        "--show",
        choices=("resources", "script", "source", "ptx", "sass"),
        default="resources",
        help="what to print (default: resources)",
    )


def execute(arguments) -> int:
    """Compile (no GPU needed) and print."""
    import tvm_tile

    op = common.prepare(arguments)
    if arguments.show == "script" and not arguments.json:
        # The tile IR needs no compiler.
        print(op.function.script())
        return 0
    kernel = tvm_tile.compile(op.function, op.target)
    document = {
        "op": op.spec.name,
        "target": kernel.target,
        "shape": op.shape,
        "dtype": op.dtype,
        "config": kernel.config,
        "signature": str(kernel.signature),
        "resources": kernel.resources.to_json(),
    }
    if arguments.show == "resources":
        config = ", ".join(f"{k}={v}" for k, v in kernel.config.items()) or "none recorded"
        lines = [
            f"signature  {kernel.signature}",
            f"config     {config}",
            "resources  " + str(kernel.resources).replace("\n", "\n           "),
        ]
    else:
        document[arguments.show] = getattr(kernel, "ir" if arguments.show == "script" else arguments.show)
        lines = [document[arguments.show]]
    common.emit(arguments, document, lines)
    return 0
