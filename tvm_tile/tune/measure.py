"""Time a built configuration on a CPU, a GPU or over TVM's RPC, and compare its results; runs in a worker process."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections import OrderedDict
from functools import partial
from typing import Any

__all__ = ["StickyError", "WrongResult", "measure", "prepare", "together"]

#: Bytes of inputs that a worker keeps for the next configurations, by device.
KEEP_BYTES = {"cpu": 2e9, "cuda": 40e9}
#: Bytes that a GPU's rotating buffers exceed together, so that no call finds its data in L2.
ROTATE_BYTES = 256e6
MAX_SETS = 16
#: Replays of a GPU's graph, at most.
MAX_ROUNDS = 25
#: References that a worker keeps: options that are tuned too make shapes of their own.
KEEP_REFERENCES = 8
#: A configuration slower than this multiple of the best is measured once: it cannot win.
HOPELESS = 3.0


class StickyError(RuntimeError):
    """The GPU's context is lost: the process must be replaced."""

    sticky = True


class WrongResult(RuntimeError):
    """The kernel's outputs differ from the reference."""


_inputs: OrderedDict[str, tuple[list, list[int]]] = OrderedDict()
_expected: OrderedDict[str, list] = OrderedDict()


def _size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _tensors(spec, shape: dict, dtype: str, device: str, seed: int) -> tuple[str, list, list[int]]:
    """(key, tensors of a call, positions of the outputs), kept for the next configuration of the same shape.

    They are made where they are used: a GPU's generator takes milliseconds for what takes a CPU's seconds.
    """
    import torch

    key = json.dumps([spec.name, shape, dtype, device, seed], sort_keys=True)
    if key not in _inputs:
        _inputs[key] = spec.inputs(shape, dtype, device, torch.Generator(device).manual_seed(seed))
        while len(_inputs) > 1 and sum(_size(t) for t, _ in _inputs.values()) > KEEP_BYTES[device]:
            dropped, _ = _inputs.popitem(last=False)
            _expected.pop(dropped, None)
    _inputs.move_to_end(key)
    return key, *_inputs[key]


def _poison(tensor) -> None:
    """Overwrite with what no correct kernel leaves: NaN, or bytes 0x7f."""
    import torch

    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        tensor.fill_(float("nan"))
    else:
        tensor.view(torch.uint8).fill_(0x7F)


def _reference(key: str, spec, shape: dict, dtype: str, tensors: list) -> list:
    if key not in _expected:
        _expected[key] = spec.reference(shape, dtype, tensors)
        while len(_expected) > KEEP_REFERENCES:
            _expected.popitem(last=False)
    return _expected[key]


def prepare(spec, shape: dict, dtype: str, device: str, *, seed: int = 0) -> None:
    """Make the inputs and the reference of a shape before the first configuration of it comes."""
    key, tensors, _ = _tensors(spec, shape, dtype, device, seed)
    _reference(key, spec, shape, dtype, tensors)


def _compare(spec, shape: dict, dtype: str, outputs: list, expected: list) -> None:
    from ..ops.compare import compare

    good, reports = compare(outputs, expected, spec.tolerance(shape, dtype))
    if not good:
        bad = next(r for r in reports if not r["passed"])
        text = bad.get("error") or (
            f"{bad['wrong_elements']} of {bad['elements']} elements, largest error {bad['max_abs_error']:.3g}"
        )
        raise WrongResult(f"differs from the reference: {text}")


def measure(
    spec,
    shape: dict,
    dtype: str,
    library: str,
    device: str,
    *,
    seed: int = 0,
    best: float | None = None,
    check: str = "if best",
    budget: float = 0.4,
    rpc: dict | None = None,
) -> dict[str, Any]:
    """Seconds of a call, and whether its results are right.

    Parameters
    ----------
    spec, shape, dtype
        The op, its complete shape and dtype, of which inputs and reference are made.
    library : str
        The exported kernel.
    device : str
        ``cpu``, ``cuda`` or ``rpc``.
    seed : int
        Of the random inputs.
    best : float, optional
        Seconds of the best configuration so far.
    check : str
        ``always``, ``never``, or ``if best``: compare with the reference when it would be the best so far, so that a
        fast wrong kernel does not lead the search.
    budget : float
        Seconds of measurement to aim at.
    rpc : dict, optional
        ``host``, ``port``, ``key``, ``timeout`` of the tracker, and ``kind`` of the remote device.

    Raises
    ------
    WrongResult
        The outputs differ from the reference.
    StickyError
        The GPU's context is lost.
    """
    backend = {"cpu": _on_cpu, "cuda": _on_gpu, "rpc": _over_rpc}[device]
    start = time.perf_counter()
    try:
        found = backend(spec, shape, dtype, library, seed, best, check, budget, rpc)
    except WrongResult:
        # a wrong kernel may have written into the inputs: the next one gets fresh ones
        _inputs.clear()
        _expected.clear()
        raise
    except Exception as error:
        if device == "cuda":
            _raise_if_lost(error)
        raise
    return {**found, "wall_seconds": time.perf_counter() - start}


def together(
    spec, dtype: str, device: str, kernels: list[tuple[dict, str]], *, seed: int, rounds: int
) -> list[list[float]]:
    """Seconds of several kernels that are known to be right, measured in turns.

    Parameters
    ----------
    spec, dtype, device, seed
        As for :func:`measure`, without ``rpc``.
    kernels : list of (dict, str)
        The complete shape and the exported kernel of each.
    rounds : int
        Measurements of each.

    Returns
    -------
    list of list of float
        Of each kernel one figure a round.
    """
    import tvm_tile

    from .timing import measure_cpu, measure_gpu

    rotating: dict[str, list] = {}
    calls = {}
    for number, (shape, library) in enumerate(kernels):
        kernel = tvm_tile.load(library)
        key, tensors, _ = _tensors(spec, shape, dtype, device, seed)
        if key not in rotating:
            rotating[key] = _rotating(tensors) if device == "cuda" else [tensors]
        calls[number] = [partial(kernel, *one) for one in rotating[key]]
    if device == "cpu":
        samples = measure_cpu(calls, rounds)
    else:
        import torch

        try:
            samples, failed = measure_gpu(torch, calls, rounds)
        except Exception as error:
            _raise_if_lost(error)
            raise
        if failed:
            raise RuntimeError(next(iter(failed.values())))
    return [samples[number] for number in calls]


def _rotating(tensors: list) -> list[list]:
    """The tensors of a call and copies of them, larger together than the L2 cache."""
    sets = [tensors]
    while sum(map(_size, sets)) < ROTATE_BYTES and len(sets) < MAX_SETS:
        sets.append([t.clone() for t in tensors])
    return sets


def _raise_if_lost(error: Exception) -> None:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception as lost:
        raise StickyError(f"the GPU's context is lost: {str(error).splitlines()[0]}") from lost


def _wanted(check: str, best: float | None, seconds: float) -> bool:
    return check == "always" or (check == "if best" and (best is None or seconds < best))


def _on_cpu(spec, shape, dtype, library, seed, best, check, budget, _rpc):
    import tvm_tile

    kernel = tvm_tile.load(library)
    key, tensors, outputs = _tensors(spec, shape, dtype, "cpu", seed)
    expected = None
    if check != "never":
        # before the kernel runs: one that overwrites its inputs must not change what it is compared with
        expected = _reference(key, spec, shape, dtype, tensors)
    _poison_written(kernel, tensors)
    kernel(*tensors)
    start = time.perf_counter()
    kernel(*tensors)
    once = time.perf_counter() - start
    samples = [once]
    if best is None or once < HOPELESS * best:
        number = max(1, int(0.02 / max(once, 1e-9)))
        rounds = max(3, min(15, math.ceil(budget / max(number * once, 1e-9))))
        samples = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(number):
                kernel(*tensors)
            samples.append((time.perf_counter() - start) / number)
    # the least: other work on the machine only ever adds to a sample
    seconds = min(samples)
    checked = _wanted(check, best, seconds)
    if checked:
        _poison_written(kernel, tensors)
        kernel(*tensors)
        _compare(spec, shape, dtype, [tensors[i] for i in outputs], expected)
    return {"seconds": seconds, "samples": samples, "checked": checked}


def _poison_written(kernel, tensors) -> None:
    for parameter, tensor in zip(kernel.signature.parameters, tensors, strict=True):
        if parameter.is_tensor and parameter.written:
            _poison(tensor)


def _on_gpu(spec, shape, dtype, library, seed, best, check, budget, _rpc):
    import torch

    import tvm_tile

    from .timing import capture, replay

    kernel = tvm_tile.load(library)
    key, tensors, outputs = _tensors(spec, shape, dtype, "cuda", seed)
    sets = _rotating(tensors)
    expected = None
    if check != "never":
        # before the kernel runs, as on a CPU
        expected = _reference(key, spec, shape, dtype, tensors)
    kernel(*tensors)
    torch.cuda.synchronize()

    graph, launches = capture(torch, [partial(kernel, *one) for one in sets])
    samples: list[float] = []
    spent = 0.0
    while len(samples) < 4 or (spent < budget and len(samples) < MAX_ROUNDS):
        passed = replay(torch, graph)
        spent += passed
        samples.append(passed / launches)
        if best is not None and samples[-1] > HOPELESS * best:
            break
    del graph
    seconds = statistics.median(samples)
    checked = _wanted(check, best, seconds)
    if checked:
        _poison_written(kernel, tensors)
        kernel(*tensors)
        torch.cuda.synchronize()
        _compare(spec, shape, dtype, [tensors[i] for i in outputs], expected)
    return {"seconds": seconds, "samples": samples, "checked": checked}


def _over_rpc(spec, shape, dtype, library, seed, best, check, budget, rpc):
    import os

    import torch
    from tvm import rpc as tvm_rpc
    from tvm import runtime

    import tvm_tile

    signature = tvm_tile.load(library).signature if rpc["kind"] == "cpu" else _signature(library)
    key, tensors, outputs = _tensors(spec, shape, dtype, "cpu", seed)
    tracker = tvm_rpc.connect_tracker(rpc["host"], int(rpc["port"]))
    with contextlib.ExitStack() as stack:
        session = tracker.request(rpc["key"], priority=1, session_timeout=float(rpc["timeout"]))
        name = os.path.basename(library)
        session.upload(library)
        stack.callback(session.remove, name)
        device = session.cuda(0) if rpc["kind"] == "cuda" else session.cpu(0)
        module = session.load_module(name)
        for parameter, tensor in zip(signature.parameters, tensors, strict=True):
            if parameter.is_tensor and parameter.written:
                _poison(tensor)
        remote = []
        for tensor in tensors:
            local = runtime.from_dlpack(tensor)
            copy = runtime.empty(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), device)
            local.copyto(copy)
            remote.append(copy)
        function = module[signature.name]
        expected, results = None, []
        if check != "never":
            expected = _reference(key, spec, shape, dtype, tensors)
        function(*remote)
        device.sync()
        if expected is not None:
            for i in outputs:
                result = torch.empty_like(tensors[i])
                remote[i].copyto(runtime.from_dlpack(result))
                results.append(result)
        evaluator = module.time_evaluator(signature.name, device, number=1, repeat=5, min_repeat_ms=int(budget * 100))
        samples = [float(s) for s in evaluator(*remote).results]
    seconds = min(samples) if rpc["kind"] == "cpu" else statistics.median(samples)
    checked = _wanted(check, best, seconds)
    if checked:
        _compare(spec, shape, dtype, results, expected)
    return {"seconds": seconds, "samples": samples, "checked": checked}


def _signature(library: str):
    """The signature of a CUDA library on a machine that may have no GPU."""
    from pathlib import Path

    from ..runtime.loader import read_metadata
    from ..runtime.signature import Signature

    return Signature.from_json(read_metadata(Path(library))["signature"])
