"""Timing of several implementations side by side: each round measures every one of them once, in turns.

The clock of a machine under load changes from moment to moment, so only figures of the same round are compared.
"""

from __future__ import annotations

import time

__all__ = ["capture", "measure_cpu", "measure_gpu", "replay"]

#: Pause between CPU measurements (seconds): thread pools spin for a while after their work.
SETTLE = 0.01
#: Seconds that a CPU measurement, and one replay of a CUDA graph, last at least, where one call is shorter.
SHORTEST_CPU = 0.02
SHORTEST_GPU = 2e-3
#: Launches in a CUDA graph, at most.
LONGEST_GRAPH = 128


def measure_cpu(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of each in every round; short calls repeat until a measurement lasts long enough.

    Parameters
    ----------
    calls : dict of str to list of callable
        Name -> calls, of which the first is measured.
    rounds : int
        Measurements of each.
    """
    repeats = {}
    for name, (call, *_) in calls.items():
        call()
        start = time.perf_counter()
        call()
        once = time.perf_counter() - start
        repeats[name] = int(min(1000, max(1, SHORTEST_CPU / max(once, 1e-9))))
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


def measure_gpu(torch, calls: dict, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each in every round: CUDA graphs of launches over rotating buffers, replayed in turns.

    Parameters
    ----------
    torch : module
        The torch of the calls.
    calls : dict of str to list of callable
        Name -> calls on different buffers, launched one after another until a graph lasts long enough.
    rounds : int
        Measurements of each.

    Returns
    -------
    (dict, dict)
        Seconds by name, and the reason for each that could not be captured in a graph.
    """
    graphs, failed = {}, {}
    for name, rotating in calls.items():
        try:
            graphs[name] = capture(torch, rotating)
        except Exception as error:  # a call that synchronises cannot be captured
            torch.cuda.synchronize()
            failed[name] = (str(error).splitlines() or [type(error).__name__])[0]
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds + 1):
        for name, (graph, count) in graphs.items():
            seconds = replay(torch, graph) / count
            if number:  # the first round warms up
                samples[name].append(seconds)
    return samples, failed


def replay(torch, graph) -> float:
    """Seconds of one replay of a CUDA graph."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def capture(torch, rotating: list):
    """(CUDA graph of calls on different buffers in turns that lasts long enough, launches in it)."""

    def record(count: int):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(count):
                rotating[number % len(rotating)]()
        return graph

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in rotating:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = record(1)
    replay(torch, graph)
    once = replay(torch, graph)
    # whole turns over the buffers
    turns = min(SHORTEST_GPU / max(once, 1e-7), LONGEST_GRAPH) / len(rotating)
    count = len(rotating) * max(1, round(turns))
    return record(count), count
