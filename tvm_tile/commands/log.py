"""``tvm-tile log show|best|compare|merge|prune``: what tuning has recorded."""

from __future__ import annotations

from pathlib import Path

from ..errors import TileError
from . import common


def add_parser(subparsers) -> None:
    """Declare the command and its actions."""
    parser = subparsers.add_parser("log", help="show, merge or prune tuning records")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in (
        ("show", "every trial of an op in a store, fastest first"),
        ("best", "the winners, and which of them a shape gets"),
        ("compare", "measure the winners of several stores and the untuned configuration side by side"),
        ("merge", "take over the records and trials of other stores"),
        ("prune", "drop failed trials, and all but the fastest of each workload"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--out", default="tuning_logs", help="the store (default: tuning_logs)")
        action.add_argument("--json", action="store_true", help="print one JSON document")
        if name == "merge":
            action.add_argument("sources", nargs="+", metavar="STORE", help="stores to take from; --out receives")
            continue
        action.add_argument("op", nargs=None if name == "compare" else "?", metavar="OP")
        if name == "show":
            action.add_argument("--limit", type=int, default=20, help="trials to print (default: 20)")
        if name == "compare":
            action.add_argument("--with", dest="others", nargs="*", default=[], metavar="STORE", help="other stores")
            action.add_argument("--rounds", type=int, default=15, help="measurements of each, in turns (default: 15)")
        if name in ("best", "compare"):
            action.add_argument("--shape", nargs="*", default=[], action="extend", metavar="K=V")
            action.add_argument("--dtype")
            action.add_argument("--target", default="auto")
        if name == "prune":
            action.add_argument("--keep", type=int, default=16, help="trials to keep of each workload (default: 16)")


def execute(arguments) -> int:
    """Do it."""
    store = Path(arguments.out)
    if arguments.action != "merge" and not store.is_dir():
        raise TileError(f"there is no store {store}", advice="name it with --out, or make one: tvm-tile tune OP")
    if getattr(arguments, "op", None):
        common.find_op(arguments.op)
    return {"show": _show, "best": _best, "compare": _compare, "merge": _merge, "prune": _prune}[arguments.action](
        arguments, store
    )


def _folders(store: Path, op: str | None) -> list[Path]:
    return sorted(p.parent for p in store.glob(f"*/{op or '*'}/trials.jsonl"))


def _show(arguments, store: Path) -> int:
    from ..tune.database import TRIALS, read_lines
    from ..tune.progress import time_text

    document, lines = [], []
    for folder in _folders(store, arguments.op):
        groups: dict[str, list[dict]] = {}
        for trial in read_lines(folder / TRIALS):
            groups.setdefault(_title(trial["problem"]), []).append(trial)
        for title, trials in groups.items():
            good = sorted((t for t in trials if t["seconds"] is not None), key=lambda t: t["seconds"])
            failed = [t for t in trials if t["seconds"] is None]
            document.append({"machine": folder.parent.name, "workload": title, "trials": good + failed})
            lines.append(f"{title} on {folder.parent.name}: {len(trials)} trials, {len(failed)} failed")
            for trial in (good + failed)[: arguments.limit]:
                config = " ".join(f"{k}={v}" for k, v in trial["config"].items())
                result = time_text(trial["seconds"]) if trial["seconds"] is not None else trial["error"]
                lines.append(f"  {result:>16}  {config}")
    common.emit(arguments, {"workloads": document}, lines or ["no trials"])
    return 0


def _title(problem: dict) -> str:
    return f"{problem['kernel']} {common.describe_shape(problem['shape'])} {problem['dtype']}"


def _best(arguments, store: Path) -> int:
    from ..tune import records
    from ..tune.progress import time_text

    if arguments.shape or arguments.dtype:
        if not arguments.op:
            raise TileError("--shape and --dtype need an op")
        from ..runtime.targets import target as resolve
        from ..tune.apply import choose

        spec = common.find_op(arguments.op)
        shape = common.resolve_shape(spec, arguments.shape)
        dtype = common.resolve_dtype(spec, arguments.dtype)
        problem, choice = choose(spec, shape, dtype, resolve(arguments.target), [store])
        shape, tunables = problem.configured(choice.config)
        config = {**choice.config, **tunables}
        lines = [problem.title, choice.text, " ".join(f"{k}={v}" for k, v in config.items())]
        common.emit(arguments, {"source": choice.source, "text": choice.text, "config": config}, lines)
        return 0
    found = records.all_records(store, arguments.op)
    lines = []
    for record in found:
        gain = f" ({record.default_seconds / record.seconds:.2f}x untuned)" if record.default_seconds else ""
        lines.append(f"{_title(vars(record))} on {record.machine}: {time_text(record.seconds)}{gain}")
        lines.append("  " + " ".join(f"{k}={v}" for k, v in record.config.items()))
    common.emit(arguments, {"records": [vars(r) for r in found]}, lines or ["no records"])
    return 0


def _compare(arguments, store: Path) -> int:
    from ..runtime.targets import target as resolve
    from ..tune.progress import time_text
    from ..tune.side_by_side import compare_stores

    if arguments.rounds < 1:
        raise TileError(f"--rounds must be at least 1, not {arguments.rounds}")
    common.need_torch()
    spec = common.find_op(arguments.op)
    shape, dtype = common.resolve_shape(spec, arguments.shape), common.resolve_dtype(spec, arguments.dtype)
    stores = [store, *map(Path, arguments.others)]
    problem, results = compare_stores(
        spec, shape, dtype, resolve(arguments.target), stores, rounds=arguments.rounds
    )  # fmt: skip
    width = max(len(r.name) for r in results)
    lines = [problem.title]
    for result in results:
        config = " ".join(f"{k}={v}" for k, v in result.config.items())
        if result.error is not None:
            lines.append(f"  {result.name:<{width}}  {result.error}: {result.message}  {config}")
            continue
        speed = f"{time_text(result.seconds):>10}  {1 / result.ratio:.3f} of the fastest"
        lines.append(
            f"  {result.name:<{width}}  {speed}  {config}" + (f"  ({result.message})" if result.message else "")
        )
    document = {"workload": problem.identity, "results": [vars(r) for r in results]}
    common.emit(arguments, document, lines)
    return 1 if any(r.error for r in results) else 0


def _merge(arguments, store: Path) -> int:
    from ..tune import database, records

    sources = [Path(s) for s in arguments.sources]
    for source in sources:
        if not source.is_dir():
            raise TileError(f"there is no store {source}")
    trials = sum(database.merge_trials(store, source) for source in sources)
    taken = records.merge(store, sources)
    common.emit(
        arguments, {"records": taken, "trials": trials}, [f"took {taken} records and {trials} trials into {store}"]
    )
    return 0


def _prune(arguments, store: Path) -> int:
    from ..tune import database

    if arguments.keep < 1:
        raise TileError(f"--keep must be at least 1, not {arguments.keep}")
    removed = 0
    for folder in _folders(store, arguments.op):
        removed += database.prune(folder, arguments.keep)
    common.emit(arguments, {"removed": removed}, [f"removed {removed} trials from {store}"])
    return 0
