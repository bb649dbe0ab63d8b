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
        document["config_source"] = kernel.config_source
        document["advice"] = _advice(op, kernel)
        config = ", ".join(f"{k}={v}" for k, v in kernel.config.items()) or "none recorded"
        lines = [
            f"signature  {kernel.signature}",
            f"config     {config} ({kernel.config_source})",
            "resources  " + str(kernel.resources).replace("\n", "\n           "),
            *(f"advice     {line}" for line in document["advice"]),
        ]
    else:
        document[arguments.show] = getattr(kernel, "ir" if arguments.show == "script" else arguments.show)
        lines = [document[arguments.show]]
    common.emit(arguments, document, lines)
    return 0


def _advice(op, kernel) -> list[str]:
    """What limits the kernel on its GPU and what to change."""
    from ..tune.advice import advise
    from ..tune.space import Problem, Space, machine_of

    problem = Problem.of(op.spec, op.shape, op.dtype, op.target)
    return advise(Space(problem, machine_of(op.target)), kernel.config, kernel.resources)
