"""``tvm-tile bench OP``: time an op beside its peers, side by side in one process on the same cores or GPU.

A CUDA GPU's figures are kept: ``tuning_logs/<gpu>/bench/<op>.json`` holds the last document of each shape, dtype and
target, from which ``scripts/plot_bench.py`` draws.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from pathlib import Path

from ..ops.compare import compare
from ..tune.timing import measure_cpu, measure_gpu
from . import common
from .peers import aligned, peers_of
from .run import format_time

#: Bytes that the rotating buffers of a GPU measurement must exceed together, so that no call finds its data in L2.
ROTATE_BYTES = 256e6
MAX_SETS = 64


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("bench", help="time an op beside torch and other peers")
    common.add_op_options(parser, optional=True)
    parser.add_argument("--all", nargs="?", const="default", metavar="LIST", help="a named list of shapes instead")
    parser.add_argument("--peers", nargs="*", help="peers to measure (default: all; give none for the kernel alone)")
    parser.add_argument(
        "--beside",
        nargs="+",
        action="append",
        default=[],
        metavar="K=V",
        help="the same kernel with other tunables as one more peer, for example num_stages=0 (may be repeated)",
    )
    parser.add_argument("--rounds", type=int, default=11, help="interleaved measurements of each (default: 11)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument(
        "--out", metavar="FOLDER", help="store of the figures (default: tuning_logs for a GPU, none for a CPU)"
    )


def shape_list(name: str) -> list[dict]:
    """A named list for ``--all``: ``{"op", "dtype", "shape"}`` each, with ``"published"`` seconds of others."""
    return common.named_list("tvm_tile.commands", "bench_shapes.json", name)


def execute(arguments) -> int:
    """Check the kernel, measure it and its peers, print the table; with ``--all`` for each shape of a list."""
    if arguments.rounds < 1:
        raise common.TileError(f"--rounds must be at least 1, not {arguments.rounds}")
    if bool(arguments.op) == bool(arguments.all):
        raise common.TileError("name one op, or --all")
    if arguments.op:
        _chosen(peers_of(common.find_op(arguments.op), "cuda"), arguments)
        document = bench(arguments)
        common.emit(arguments, document, _table(document))
        return 0 if document["correct"] else 1
    return _all(arguments)


def bench(arguments) -> dict:
    """One op: compile, check, measure, and keep the figures.

    Parameters
    ----------
    arguments : argparse.Namespace
        Those of the command.

    Returns
    -------
    dict
        What ``--json`` prints.
    """
    import tvm_tile

    from ..tune.records import cpu_name, gpu_name

    spec = common.find_op(arguments.op)
    torch = common.need_torch()
    target, device = common.choose(arguments.target)
    peers = _chosen(peers_of(spec, device), arguments)
    op = common.prepare(arguments, target)
    shape, dtype = op.shape, op.dtype
    kernel = tvm_tile.compile(op.function, target)
    generator = torch.Generator(device=device).manual_seed(arguments.seed)

    moved = spec.bytes(shape, dtype)
    sets = 1 if device == "cpu" else int(max(1, min(MAX_SETS, -(-ROTATE_BYTES // max(moved, 1)))))
    data = [spec.inputs(shape, dtype, device, generator) for _ in range(sets)]
    tensors, outputs = data[0]
    expected = spec.reference(shape, dtype, tensors)
    kernel(*tensors)
    tolerance = spec.tolerance(shape, dtype)
    passed, reports = compare([tensors[i] for i in outputs], expected, tolerance)
    calls = {"tvm_tile": [_bind(kernel, t) for t, _ in data]}
    skipped: dict[str, str] = {}
    agrees: dict[str, bool | None] = {"tvm_tile": passed}
    for changes in arguments.beside:
        name = ",".join(changes)
        try:
            other = tvm_tile.compile(_changed(arguments, changes, target), target)
        except common.TileError as error:  # a configuration that does not fit
            skipped[name] = str(error).splitlines()[0]
            continue
        for i in outputs:
            tensors[i].fill_(float("nan") if tensors[i].dtype.is_floating_point else 0)
        other(*tensors)
        agrees[name] = compare([tensors[i] for i in outputs], expected, tolerance)[0]
        calls[name] = [_bind(other, t) for t, _ in data]
    for name, make in peers.items():
        try:
            made = [make(shape, dtype, t) for t, _ in data]
            result = aligned(made[0](), expected[0])
        except Exception as error:  # a peer may lack the dtype, the shape or the device: the kernel's figure stands
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        agrees[name] = None if result is None else compare([result], expected[:1], tolerance)[0]
        calls[name] = made
    del expected
    threads = None
    if device == "cpu":
        threads = _same_threads(torch)
        times = measure_cpu(calls, arguments.rounds)
    else:
        times, failed = measure_gpu(torch, calls, arguments.rounds)
        skipped |= failed
        if "tvm_tile" in failed:
            raise common.TileError(f"{spec.name} cannot be captured in a CUDA graph: {failed['tvm_tile']}")

    flops, floor = spec.flops(shape), None
    machine = _machine(torch, device, target)
    if machine is not None:
        floor = max(flops / _peak(machine, dtype), moved / machine.memory_bandwidth)
    document = {
        "op": spec.name,
        "target": kernel.target,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads",
        "date": datetime.date.today().isoformat(),
        "shape": shape,
        "dtype": dtype,
        "config": kernel.config,
        "correct": passed,
        "outputs": reports,
        "rounds": arguments.rounds,
        "roofline_seconds": floor,
        "results": {},
        "skipped": skipped,
    }
    own = times["tvm_tile"]
    for name, samples in times.items():
        seconds = statistics.median(samples)
        document["results"][name] = {
            "seconds": seconds,
            "tflops": flops / seconds / 1e12 if flops else None,
            "gbytes_per_second": moved / seconds / 1e9 if moved else None,
            "roofline": floor / seconds if floor else None,
            # Of pairs of the same round: what else the machine does meets both alike.
            "ratio": statistics.median(s / o for s, o in zip(samples, own, strict=True)),
            "agrees": agrees[name],
        }
    out = arguments.out or ("tuning_logs" if device == "cuda" else None)
    if out:
        machine = gpu_name() if device == "cuda" else cpu_name()
        document["file"] = str(Path(out) / machine / "bench" / f"{spec.name}.json")
        _keep(Path(document["file"]), document)
    return document


def _changed(arguments, changes: list[str], target):
    """The function with some tunables changed."""
    names = {change.partition("=")[0] for change in changes}
    kept = [c for c in arguments.config or [] if c.partition("=")[0] not in names]
    values = {**vars(arguments), "config": [*kept, *changes]}
    return common.prepare(type(arguments)(**values), target).function


def _bind(kernel, tensors):
    return lambda: kernel(*tensors)


def _chosen(known: dict, arguments) -> dict:
    wanted = arguments.peers
    if wanted is None:
        return known
    for name in wanted:
        if name not in known:
            advice = common.suggestion(name, list(known), "its peers are")
            raise common.TileError(f"{arguments.op} has no peer {name!r}", advice=advice)
    return {name: known[name] for name in wanted}


def _same_threads(torch) -> int:
    """Give torch as many threads as TVM's pool has."""
    from ..runtime.tvm_setup import thread_count

    threads = thread_count()
    torch.set_num_threads(threads)
    return threads


def _machine(torch, device: str, target):
    """Description of the GPU here, by its name, else by its architecture; None for a CPU, whose peaks are unknown."""
    if device != "cuda":
        return None
    from .. import hardware

    name = torch.cuda.get_device_name().lower()
    for known in hardware.names():
        machine = hardware.lookup(known)
        if machine.kind == "cuda" and known in name:
            return machine
    return hardware.lookup(str(target.attrs["arch"]))


def _peak(machine, dtype: str) -> float:
    """Operations a second of the machine for products of a dtype."""
    return machine.tensor_flops.get(dtype, machine.fp32_flops)


# ------------------------------------------------------------------ figures that are kept


def _keep(path: Path, document: dict) -> None:
    """Put a document into a file, in place of an older one of the same problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _key(document)
    entries = json.loads(path.read_text()) if path.exists() else []
    entries = sorted([e for e in entries if _key(e) != key] + [document], key=_key)
    # a reader, or a kill, never sees half a file
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(entries, file, indent=1, default=str)
    os.replace(file.name, path)


def _key(document: dict) -> str:
    return json.dumps([document[k] for k in ("dtype", "target", "shape")], sort_keys=True, default=str)


# ------------------------------------------------------------------ lists of shapes


def _all(arguments) -> int:
    """Every shape of a list; the first failure does not end the run."""
    cases = shape_list(arguments.all)
    target, device = common.choose(arguments.target)
    if device == "cuda":
        _warm(cases, arguments)
    documents, failed = [], 0
    for case in cases:
        one = _case(arguments, case)
        try:
            document = bench(one)
        except Exception as error:  # the others still count
            failed += 1
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"{case['op']} {_shape_text(case)}: {line}", file=sys.stderr)
            continue
        failed += not document["correct"]
        document["published"] = case.get("published", {})
        documents.append(document)
        if device == "cuda":
            common.need_torch().cuda.empty_cache()
        if not arguments.json:
            print("\n".join(_table(document)) + "\n", flush=True)
    _scale_published(documents)
    for document in documents:
        if document["published"] and "file" in document:
            _keep(Path(document["file"]), document)
    common.emit(arguments, {"list": arguments.all, "failed": failed, "documents": documents}, _summary(documents))
    return 1 if failed else 0


def _case(arguments, case: dict):
    """The command's arguments for one shape of a list."""
    values = {**vars(arguments), "op": case["op"], "dtype": case.get("dtype"), "all": None}
    values["shape"] = [f"{key}={value}" for key, value in case["shape"].items()]
    if arguments.peers is not None:
        values["peers"] = [p for p in arguments.peers if p in peers_of(common.find_op(case["op"]), "cuda")]
    return type(arguments)(**values)


def _shape_text(case: dict) -> str:
    return " ".join(f"{k}={v}" for k, v in case["shape"].items())


def _warm(cases: list[dict], arguments) -> None:
    """Compile the kernels of a list into the cache, several at once."""
    workers = min(os.cpu_count() or 1, len(cases))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in [pool.submit(_compile, _case(arguments, case)) for case in cases]:
            done.exception()  # raised again, and reported, where the case is measured


def _compile(arguments) -> None:
    import tvm_tile

    op = common.prepare(arguments)
    tvm_tile.compile(op.function, op.target)


def _scale_published(documents: list[dict]) -> None:
    """Ratios to published times, whose machine's speed is given as that of a product both can measure.

    ``published[name] = {"seconds", "gemm_tflops"}``: the time, and what cuBLAS reached for bfloat16 8192^3 there. A
    chip that runs that product slower today may take longer in proportion.
    """
    here = None
    for document in documents:
        shape = document["shape"]
        square = document["op"] == "gemm" and {shape.get(k) for k in "mnk"} == {8192}
        if square and document["dtype"] == "bfloat16" and "torch" in document["results"]:
            here = document["results"]["torch"]["tflops"]
    for document in documents:
        for name, fact in document["published"].items():
            own = document["results"]["tvm_tile"]["seconds"]
            scale = here / fact["gemm_tflops"] if here and "gemm_tflops" in fact else 1.0
            fact["scale"] = scale
            document["results"][f"{name} (published)"] = {"seconds": fact["seconds"] / scale, "tflops": None,
                "gbytes_per_second": None, "roofline": None, "agrees": None,
                "ratio": fact["seconds"] / scale / own}  # fmt: skip


def _summary(documents: list[dict]) -> list[str]:
    lines = ["op, dtype and shape; time, share of the roofline; speed beside each peer"]
    for document in documents:
        results = document["results"]
        own = results["tvm_tile"]
        shape = {k: v for k, v in document["shape"].items() if v not in (None, False)}
        share = f"{own['roofline']:.2f}" if own["roofline"] else "-"
        ratios = ", ".join(f"{n} {r['ratio']:.2f}" for n, r in results.items() if n != "tvm_tile")
        mark = "" if document["correct"] else "  WRONG"
        lines.append(f"{document['op']} {document['dtype']} {common.describe_shape(shape)}")
        lines.append(f"    {format_time(own['seconds'])}, {share}; {ratios}{mark}")
    return lines


def _table(document: dict) -> list[str]:
    lines = [
        f"op       {document['op']} ({document['dtype']})",
        f"target   {document['target']} on {document['device']}",
        f"shape    {common.describe_shape(document['shape'])}",
        f"check    {'PASS' if document['correct'] else 'FAIL'}",
        "",
        f"{'':<20} {'time':>12} {'TFLOP/s':>10} {'GB/s':>9} {'roofline':>9}   speed of tvm_tile beside it",
    ]
    for name, result in document["results"].items():
        rate = f"{result['tflops']:.4g}" if result["tflops"] else "-"
        bandwidth = f"{result['gbytes_per_second']:.4g}" if result["gbytes_per_second"] else "-"
        share = f"{result['roofline']:.3f}" if result["roofline"] else "-"
        ratio = "" if name == "tvm_tile" else f"{result['ratio']:.3f}"
        if result["agrees"] is False and name != "tvm_tile":
            ratio += "  (its result is outside the tolerance)"
        time = format_time(result["seconds"])
        lines.append(f"{name:<20} {time:>12} {rate:>10} {bandwidth:>9} {share:>9}   {ratio}".rstrip())
    lines += [f"{name:<20} skipped: {reason}" for name, reason in document["skipped"].items()]
    return lines
