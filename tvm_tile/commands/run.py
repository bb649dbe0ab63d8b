"""``tvm-tile run OP``: run an op on random inputs and check it against its reference."""

from __future__ import annotations

import time

from ..ops.compare import compare
from . import common


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("run", help="run an op on random inputs and check it against its reference")
    common.add_op_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument("--lowering", choices=("optimised", "reference"), default="optimised")


def execute(arguments) -> int:
    """Compile, run, compare, print."""
    import tvm_tile

    common.find_op(arguments.op)
    torch = common.need_torch()
    target, device = common.choose(arguments.target)
    op = common.prepare(arguments, target)
    spec, shape, dtype = op.spec, op.shape, op.dtype
    kernel = tvm_tile.compile(op.function, target, lowering=arguments.lowering)
    generator = torch.Generator(device="cpu").manual_seed(arguments.seed)
    tensors, outputs = spec.inputs(shape, dtype, device, generator)
    # The reference first: a kernel that overwrites its inputs must not change what it is compared with.
    expected = spec.reference(shape, dtype, tensors)
    kernel(*tensors)
    if device == "cuda":
        torch.cuda.synchronize()
    passed, reports = compare([tensors[i] for i in outputs], expected, spec.tolerance(shape, dtype))
    seconds = _time_once(kernel, tensors, torch if device == "cuda" else None)
    flops = spec.flops(shape)
    verdict = "PASS" if passed else "FAIL"
    document = {
        "op": spec.name,
        "target": kernel.target,
        "shape": shape,
        "dtype": dtype,
        "config": kernel.config,
        "compile_seconds": kernel.compile_seconds,
        "from_cache": kernel.from_cache,
        "seconds": seconds,
        "tflops": flops / seconds / 1e12 if flops else None,
        "outputs": reports,
        "result": verdict,
    }
    rate = f", {document['tflops']:.3g} TFLOP/s" if flops else ""
    compiled = "from the cache" if kernel.from_cache else f"in {kernel.compile_seconds:.1f} s"
    lines = [
        f"op       {spec.name} ({dtype})",
        f"target   {kernel.target}, compiled {compiled}",
        f"shape    {common.describe_shape(shape)}",
        f"time     {format_time(seconds)}{rate}",
    ]
    for number, report in enumerate(reports):
        label = "error" if len(reports) == 1 else f"error {number}"
        if "error" in report:
            lines.append(f"{label:<8} {report['error']}")
            continue
        text = f"{report['max_abs_error']:.3g} absolute, {report['max_rel_error']:.3g} of the largest value"
        if report["wrong_elements"]:
            text += f"; {report['wrong_elements']} of {report['elements']} elements outside the tolerance"
        lines.append(f"{label:<8} {text}")
    common.emit(arguments, document, [*lines, verdict])
    return 0 if passed else 1


def _time_once(kernel, tensors, torch_cuda) -> float:
    """Median of a few calls; ``bench`` measures properly."""
    times = []
    budget = time.perf_counter() + 2.0
    while len(times) < 5 and (not times or time.perf_counter() < budget):
        start = time.perf_counter()
        kernel(*tensors)
        if torch_cuda is not None:
            torch_cuda.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def format_time(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.3f} us"
