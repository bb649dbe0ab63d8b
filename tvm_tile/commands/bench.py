"""``tvm-tile bench OP``: time an op beside its peers, side by side in one process on the same cores or GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from . import common
from .run import compare, format_time

# Bytes that the rotating buffers of a GPU measurement must exceed together, so that no call finds its data in L2.
ROTATE_BYTES = 256e6
MAX_SETS = 16
# Pause between CPU measurements (seconds): thread pools spin for a while after their work.
SETTLE = 0.01


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("bench", help="time an op beside torch and other peers")
    common.add_op_options(parser)
    parser.add_argument("--peers", nargs="*", help="peers to measure (default: all; give none for the kernel alone)")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved measurements of each (default: 11)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")


def execute(arguments) -> int:
    """Check the kernel, measure it and its peers, print the table."""
    import tvm_tile

    if arguments.rounds < 1:
        raise tvm_tile.TileError(f"--rounds must be at least 1, not {arguments.rounds}")
    peers = _peers(common.find_op(arguments.op), arguments.peers)
    torch = common.need_torch()
    target, device = common.choose(arguments.target)
    op = common.prepare(arguments, target)
    spec, shape, dtype = op.spec, op.shape, op.dtype
    kernel = tvm_tile.compile(op.function, target)
    generator = torch.Generator(device="cpu").manual_seed(arguments.seed)

    moved = spec.bytes(shape, dtype)
    sets = 1 if device == "cpu" else int(max(2, min(MAX_SETS, -(-ROTATE_BYTES // max(moved, 1)))))
    data = [spec.inputs(shape, dtype, device, generator) for _ in range(sets)]
    tensors, outputs = data[0]
    expected = spec.reference(shape, dtype, tensors)
    kernel(*tensors)
    passed, reports = compare([tensors[i] for i in outputs], expected, spec.tolerance(shape, dtype))
    calls: dict[str, list[Callable[[], object]]] = {"tvm_tile": [_bind(kernel, t) for t, _ in data]}
    skipped: dict[str, str] = {}
    for name, make in peers.items():
        try:
            made = [make(shape, dtype, t) for t, _ in data]
            made[0]()
        except Exception as error:  # a peer may lack the dtype, the shape or the device: the kernel's figure stands
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        calls[name] = made
    if device == "cpu":
        threads = _same_threads(torch)
        times = _measure_cpu(calls, arguments.rounds)
    else:
        threads = None
        times = _measure_gpu(torch, calls, arguments.rounds)

    flops = spec.flops(shape)
    document = {
        "op": spec.name,
        "target": kernel.target,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads",
        "shape": shape,
        "dtype": dtype,
        "config": kernel.config,
        "correct": passed,
        "outputs": reports,
        "rounds": arguments.rounds,
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
            # Of pairs of the same round: what else the machine does meets both alike.
            "ratio": statistics.median(s / o for s, o in zip(samples, own, strict=True)),
        }
    common.emit(arguments, document, _table(document))
    return 0 if passed else 1


def _bind(kernel, tensors):
    return lambda: kernel(*tensors)


def _peers(spec, wanted: list[str] | None) -> dict:
    if wanted is None:
        return dict(spec.peers)
    for name in wanted:
        if name not in spec.peers:
            known = list(spec.peers)
            advice = common.suggestion(name, known, "its peers are")
            raise common.TileError(f"{spec.name} has no peer {name!r}", advice=advice)
    return {name: spec.peers[name] for name in wanted}


def _same_threads(torch) -> int:
    """Give torch as many threads as TVM's pool has."""
    from ..runtime.tvm_setup import thread_count

    threads = thread_count()
    torch.set_num_threads(threads)
    return threads


def _measure_cpu(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round, measured in turns; short calls repeat until a measurement lasts long enough."""
    repeats = {}
    for name, (call, *_) in calls.items():
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats[name] = int(min(1000, max(1, 0.02 / max(once, 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, *_) in calls.items():
            time.sleep(SETTLE)
            call()  # wakes the thread pool and brings the data into the caches, for each of them alike
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - start) / repeats[name])
    return samples


def _measure_gpu(torch, calls: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round: CUDA graphs of launches over rotating buffers, replayed in turns."""
    replays = {}
    for name, rotating in calls.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in rotating:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in rotating:
                call()
        replays[name] = (graph.replay, len(rotating))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, (replay, count) in replays.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            if round_:  # the first round warms up
                samples[name].append(begin.elapsed_time(end) / 1e3 / count)
    return samples


def _table(document: dict) -> list[str]:
    lines = [
        f"op       {document['op']} ({document['dtype']})",
        f"target   {document['target']} on {document['device']}",
        f"shape    {common.describe_shape(document['shape'])}",
        f"check    {'PASS' if document['correct'] else 'FAIL'}",
        "",
        f"{'':<20} {'time':>12} {'TFLOP/s':>10} {'GB/s':>9}   speed of tvm_tile beside it",
    ]
    for name, result in document["results"].items():
        rate = f"{result['tflops']:.4g}" if result["tflops"] else "-"
        bandwidth = f"{result['gbytes_per_second']:.4g}" if result["gbytes_per_second"] else "-"
        ratio = "" if name == "tvm_tile" else f"{result['ratio']:.3f}"
        lines.append(f"{name:<20} {format_time(result['seconds']):>12} {rate:>10} {bandwidth:>9}   {ratio}".rstrip())
    lines += [f"{name:<20} skipped: {reason}" for name, reason in document["skipped"].items()]
    return lines
