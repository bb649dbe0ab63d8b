"""What the variations share: each is checked against torch, and on a GPU timed beside the library's plain kernel.

The kernels themselves are in the other files, each one whole: nothing of :mod:`tvm_tile.ops` is in them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import tvm_tile
from tvm_tile.ops import flash_attention, gemm

__all__ = ["Variation", "main", "plain_attention", "plain_gemm", "verify"]

#: bfloat16 weights and outputs: half a unit in the last place of each.
TOLERANCE = 1.6e-2


@dataclass(frozen=True)
class Variation:
    """A kernel beside its reference.

    Attributes
    ----------
    name : str
        What is computed.
    kernel : callable
        ``kernel(**shape, **tiles)`` returns the PrimFunc; its last parameter is the output.
    inputs : callable
        ``inputs(shape, generator)`` returns the other arguments, on torch's default device.
    output : callable
        ``output(shape)`` is the output's shape.
    reference : callable
        ``reference(shape, *inputs)``: the output in float32, by plain torch.
    flops : callable
        ``flops(shape)``: operations of the products.
    plain : callable
        ``plain(shape)``: (PrimFunc of the library's plain kernel, shapes of its arguments, its operations).
    small, large : dict
        A shape for the CPU, with odd sizes, and the one to time.
    tiles : dict
        Tile sizes on the CPU and in the simulator; the kernel's own defaults are for GPUs.
    tolerance : float
        Largest error allowed of an output of 0, relative to those above 1.
    """

    name: str
    kernel: Callable[..., Any]
    inputs: Callable[..., list]
    output: Callable[[Mapping], tuple[int, ...]]
    reference: Callable[..., torch.Tensor]
    flops: Callable[[Mapping], float]
    plain: Callable[[Mapping], tuple]
    small: dict
    large: dict
    tiles: dict = field(default_factory=dict)
    tolerance: float = TOLERANCE


def normal(*shape: int, generator, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed bfloat16 numbers."""
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


def arguments(variation: Variation, shape: Mapping, device: str, seed: int) -> list:
    """Inputs, and the output full of NaN."""
    with torch.device(device):
        inputs = variation.inputs(shape, torch.Generator(device).manual_seed(seed))
        return [*inputs, torch.full(variation.output(shape), float("nan"), dtype=torch.bfloat16)]


def verify(variation: Variation, shape: Mapping, tensors: list) -> float:
    """The largest error of the output as a share of what is allowed; at most 1 passes."""
    want = variation.reference(shape, *tensors[:-1])
    error = (tensors[-1].float() - want).abs() / (1 + want.abs()) / variation.tolerance
    return float("inf") if error.isnan().any() else error.max().item()


def seconds(*calls: Callable[[], None], rounds: int = 15) -> list[list[float]]:
    """Seconds of each call in every round, measured in turns: the chip's clock changes under load."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(4):
                call()
        graphs.append(graph)
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 2):
        for graph, of in zip(graphs, samples, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number > 1:  # the first rounds warm up
                of.append(begin.elapsed_time(end) / 4e3)
    return samples


def share(variation: Variation, kernel, tensors: list) -> str:
    """Speed of the variation and of the plain kernel of the library, by operations a second."""
    shape = variation.large
    function, shapes, flops = variation.plain(shape)
    plain = tvm_tile.compile(function)
    others = [torch.randn(s, device="cuda").to(d) for s, d in shapes]
    own, base = seconds(lambda: kernel(*tensors), lambda: plain(*others))
    rate = variation.flops(shape) / statistics.median(own) / 1e12
    ratio = statistics.median((variation.flops(shape) / a) / (flops / b) for a, b in zip(own, base, strict=True))
    return (
        f"{statistics.median(own) * 1e6:.0f} us, {rate:.0f} TFLOP/s: {ratio:.2f} of the plain kernel's speed "
        f"({flops / statistics.median(base) / 1e12:.0f} TFLOP/s)"
    )


def main(*variations: Variation) -> int:
    """Check on the best device here; on a GPU also time."""
    parser = argparse.ArgumentParser(description=", ".join(v.name for v in variations))
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    seed = parser.parse_args().seed
    worst = 0.0
    for variation in variations:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = variation.large if device == "cuda" else variation.small
        kernel = tvm_tile.compile(variation.kernel(**shape, **({} if device == "cuda" else variation.tiles)))
        tensors = arguments(variation, shape, device, seed)
        kernel(*tensors)
        error = verify(variation, shape, tensors)
        print(f"{variation.name} on {kernel.target}: {error:.2f} of the allowed error")
        if device == "cuda":
            print("  " + share(variation, kernel, tensors))
        worst = max(worst, error)
    print("PASS" if worst <= 1 else "FAIL")
    return int(not worst <= 1)


# ------------------------------------------------------------------ the plain kernels to compare with


def plain_attention(causal: bool, dim: int | None = None) -> Callable:
    """The library's attention for a variation's shape."""

    def make(shape):
        batch, heads, seq, width = shape["batch"], shape["heads"], shape["seq"], dim or shape["dim"]
        tensor = ((batch, seq, heads, width), torch.bfloat16)
        function = flash_attention(
            batch, heads, seq, seq, width, causal=causal, dtype="bfloat16", lse=False, target="auto"
        )
        return function, [tensor] * 4, attention_flops(shape, causal, width, width)

    return make


def attention_flops(shape: Mapping, causal: bool, dim: int, dim_v: int) -> float:
    """Operations of both products, for the keys that are seen."""
    seq = shape["seq"]
    pairs = seq * (seq + 1) / 2 if causal else seq * seq
    return 2 * shape["batch"] * shape["heads"] * pairs * (dim + dim_v)


def plain_gemm(shape: Mapping, m: int | None = None, n: int | None = None, k: int | None = None):
    """The library's product for a variation's shape."""
    m, n, k = m or shape["m"], n or shape["n"], k or shape["k"]
    function = gemm(m, n, k, dtype="bfloat16", target="auto")
    shapes = [((m, k), torch.bfloat16), ((n, k), torch.bfloat16), ((m, n), torch.bfloat16)]
    return function, shapes, 2 * m * n * k


def attention_inputs(shape: Mapping, generator, dim_qk: int | None = None) -> list[torch.Tensor]:
    """Q, K and V, each ``[batch, seq, heads, dim]``."""
    lead = (shape["batch"], shape["seq"], shape["heads"])
    widths = (dim_qk or shape["dim"],) * 2 + (shape["dim"],)
    return [normal(*lead, width, generator=generator) for width in widths]


def softmax_attention(q, k, v, change=lambda scores, head: scores, sink=None) -> torch.Tensor:
    """Attention head by head in float32; ``change`` gets the scaled scores of a head of all sequences."""
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device)
    for head in range(q.shape[2]):
        rows, keys, values = (t[:, :, head].float() for t in (q, k, v))
        scores = change(rows @ keys.transpose(1, 2) * q.shape[3] ** -0.5, head)
        if sink is not None:
            column = sink[head].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, column], 2).softmax(2)[..., :-1]
        else:
            scores = scores.softmax(2)
        out[:, :, head] = scores @ values
    return out


def causal_mask(seq: int, device) -> torch.Tensor:
    """bool ``[seq, seq]``: keys that each query sees."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril()
