"""``tvm-tile tune OP``: search for the fastest configuration on this machine and record it."""

from __future__ import annotations

from ..errors import TileError
from . import common


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "tune",
        help="search for the fastest configuration of an op",
        description="Search for the fastest configuration of an op on this machine, and record it for "
        "tvm_tile.compile. Every measured trial is kept at once: Ctrl-C loses nothing.",
    )
    parser.add_argument("op", nargs="?", metavar="OP", help="an op of `tvm-tile list`")
    parser.add_argument(
        "--shape", nargs="*", default=[], action="extend", metavar="K=V",
        help="sizes and options of the op; split_k=0 and num_splits=0 are tuned too",
    )  # fmt: skip
    parser.add_argument("--dtype", help="element type (default: the op's first)")
    parser.add_argument("--target", default="auto", help="auto, llvm, cuda, sm_80 or sm_90 (default: auto)")
    parser.add_argument("--all", nargs="?", const="default", metavar="LIST", help="tune a named list of shapes instead")
    parser.add_argument("--trials", type=int, default=64, help="configurations to measure (default: 64)")
    parser.add_argument("--out", default="tuning_logs", help="store of the records (default: tuning_logs)")
    parser.add_argument("--resume", action="store_true", help="go on with the trials of an earlier run")
    parser.add_argument("--restart", action="store_true", help="throw the trials of an earlier run away")
    parser.add_argument("--sweep", action="store_true", help="measure every legal configuration")
    parser.add_argument(
        "--values", nargs="*", default=[], action="extend", metavar="K=V:V",
        help="the only values to try, e.g. block_M=64:128 panel=8; the untuned value stays",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds to measure one (default: 20)")
    parser.add_argument("--build-timeout", type=float, default=120.0, help="seconds to build one (default: 120)")
    parser.add_argument("--workers", type=int, help="building processes (default: all cores)")
    parser.add_argument("--rpc-tracker", metavar="HOST:PORT", help="measure on machines of a TVM tracker")
    parser.add_argument("--rpc-key", default="tvm_tile", help="their key (default: tvm_tile)")
    parser.add_argument("--machine", help="name of the machine in the store (default: that of the GPU or CPU here)")
    parser.add_argument("--seed", type=int, default=0, help="of the search and of the inputs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def shape_list(name: str) -> list[dict]:
    """A named list of shapes: ``{"op", "dtype", "shape"}`` each, for ``--all``."""
    return common.named_list("tvm_tile.tune", "shapes.json", name)


def execute(arguments) -> int:
    """Tune, print the table; 1 where nothing worked, 130 after Ctrl-C."""
    if arguments.resume and arguments.restart:
        raise TileError("--resume and --restart exclude each other")
    if bool(arguments.op) == bool(arguments.all):
        raise TileError("name one op, or --all", advice="for example: tvm-tile tune gemm --shape m=4096 n=4096 k=4096")
    if arguments.all:
        if arguments.shape or arguments.dtype:
            raise TileError("--all has its own shapes and dtypes")
        jobs = [(common.find_op(e["op"]), e["shape"], e["dtype"]) for e in shape_list(arguments.all)]
    else:
        spec = common.find_op(arguments.op)
        jobs = [(spec, common.resolve_shape(spec, arguments.shape), common.resolve_dtype(spec, arguments.dtype))]
    common.need_torch()
    documents, lines, code = [], [], 0
    for number, (spec, shape, dtype) in enumerate(jobs, 1):
        report = _one(arguments, spec, shape, dtype, f"{number}/{len(jobs)} " if len(jobs) > 1 else "")
        documents.append(_document(report))
        lines += [*([""] if lines else []), *report.lines()]
        if report.interrupted:
            code = 130
            break
        code = code or (0 if report.config else 1)
    common.emit(arguments, documents[0] if arguments.op else {"runs": documents}, lines)
    return code


def _one(arguments, spec, shape: dict, dtype: str, prefix: str):
    from ..tune.progress import Progress
    from ..tune.session import run

    progress = Progress()
    progress.message(f"{prefix}tuning {spec.name} {common.describe_shape(shape)} {dtype}")
    return run(
        spec,
        shape,
        dtype=dtype,
        target=arguments.target,
        trials=arguments.trials,
        out=arguments.out,
        resume=_resume(arguments),
        strategy="sweep" if arguments.sweep else "evolution",
        timeout=arguments.timeout,
        build_timeout=arguments.build_timeout,
        workers=arguments.workers,
        seed=arguments.seed,
        rpc_tracker=arguments.rpc_tracker,
        rpc_key=arguments.rpc_key,
        machine=arguments.machine,
        values=_values(arguments.values),
        progress=progress,
    )


def _values(pairs: list[str]) -> dict[str, list]:
    """``["block_M=64:128"]`` -> ``{"block_M": [64, 128]}``."""
    out = {}
    for name, text in common.parse_assignments(pairs, "--values").items():
        out[name] = [int(v) if v.lstrip("-").isdigit() else v for v in text.split(":")]
    return out


def _resume(arguments) -> bool | None:
    """With --all a list is gone through again until all of it is done; else an earlier run is not touched unasked."""
    if arguments.restart:
        return False
    return True if arguments.resume or arguments.all else None


def _document(report) -> dict:
    return {
        "title": report.title,
        "config": report.config,
        "seconds": report.seconds,
        "default_seconds": report.default_seconds,
        "trials": report.measured,
        "fresh": report.fresh,
        "seconds_per_trial": report.seconds_per_trial,
        "space": report.space,
        "legal": report.legal,
        "failures": dict(report.failures),
        "rejected": dict(report.rejected),
        "interrupted": report.interrupted,
        "folder": str(report.folder),
    }
