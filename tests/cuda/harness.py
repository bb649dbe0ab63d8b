"""One way to run a kernel in the simulator and on a GPU, and one way to check what it wrote."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import tvm_tile
from tvm_tile.ops import registry
from tvm_tile.ops.registry import poisoned
from tvm_tile.simulate import SimulationReport, simulate

ARCHITECTURES = ("sm_80", "sm_90")
SEEDS = (0, 1)  # 0: asynchronous work finishes as late as its waits allow; 1: some other order
LOCK = "TVM_TILE_GPU_LOCK"
WATCHDOG = "TVM_TILE_GPU_WATCHDOG"


@contextlib.contextmanager
def _exclusive():
    """The GPU for this process alone (``scripts/gpu_check.py`` runs several), and an end to it when a kernel hangs."""
    with contextlib.ExitStack() as stack:
        if LOCK in os.environ:
            lock = stack.enter_context(open(os.environ[LOCK], "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed when the process ends, however it does
        seconds = float(os.environ.get(WATCHDOG, 0))
        if seconds:
            stderr = int(os.environ.get("TVM_TILE_GPU_STDERR", 2))
            faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
            stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


@dataclass(frozen=True)
class Simulated:
    """The simulator: every access checked, in two orders of threads and asynchronous work."""

    arch: str

    def compile(self, func) -> _SimulatedKernel:
        return _SimulatedKernel(simulate(func, self.arch))

    def __repr__(self) -> str:
        return f"sim-{self.arch}"


@dataclass(frozen=True)
class Gpu:
    """A real GPU; sm_80 code runs on a newer one through PTX."""

    arch: str

    def compile(self, func) -> _GpuKernel:
        from tvm_tile.runtime.targets import gpu_arch

        if self.arch == "sm_90" and gpu_arch() != "sm_90":
            import pytest

            pytest.skip(f"sm_90 code does not run on {gpu_arch()}")
        return _GpuKernel(tvm_tile.compile(func, self.arch))

    def __repr__(self) -> str:
        return f"gpu-{self.arch}"


@dataclass
class Outcome:
    """Arguments after a run, and what was counted (in the simulator)."""

    args: list
    report: SimulationReport | None = None
    printed: str = ""


@dataclass
class _SimulatedKernel:
    kernel: object
    undefined: Sequence[int] = ()

    @property
    def source(self) -> str:
        return self.kernel.source

    def __call__(self, args: Sequence, undefined: Sequence[int] = (), seed: int = 0) -> Outcome:
        self.kernel.seed = seed
        args = copies(args)
        report = self.kernel(*args, undefined=tuple(undefined))
        return Outcome(args, report, report.output)

    def runs(self, args: Sequence, undefined: Sequence[int] = ()) -> list[Outcome]:
        return [self(args, undefined, seed) for seed in SEEDS]


@dataclass
class _GpuKernel:
    kernel: object
    undefined: Sequence[int] = field(default=())

    @property
    def source(self) -> str:
        return self.kernel.source

    def __call__(self, args: Sequence, undefined: Sequence[int] = (), seed: int = 0) -> Outcome:
        with _exclusive():
            there = [_to(a, "cuda") for a in args]
            self.kernel(*there)
            torch.cuda.synchronize()
            return Outcome([_to(a, "cpu") for a in there])

    def runs(self, args: Sequence, undefined: Sequence[int] = ()) -> list[Outcome]:
        return [self(args), self(args)]  # a race may show in the second run only


def _to(value, device: str):
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous():
        return value.to(device, copy=True)
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return moved.copy_(value)


def copies(args: Sequence) -> list:
    """The arguments with tensors copied, strides kept."""
    return [_to(a, "cpu") for a in args]


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float], what: str = "output") -> None:
    """Equal within (rtol, atol); NaN and infinities must be in the same places."""
    assert got.shape == want.shape, (got.shape, want.shape)
    if not got.dtype.is_floating_point and not want.dtype.is_floating_point:
        got, want = got.to(torch.int64), want.to(torch.int64)
        right = got == want
    else:
        got, want = got.double(), want.double()
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places than expected"
        right = torch.isclose(got, want, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)
    if not right.all():
        first = (~right).nonzero()[0].tolist()
        worst = (got - want)[~right].abs().max().item()
        raise AssertionError(
            f"{what}: {int((~right).sum())} of {got.numel()} elements wrong, first at {first} "
            f"({got[tuple(first)].item()} instead of {want[tuple(first)].item()}), largest error {worst}"
        )


def same_bits(a, b) -> bool:
    """Whether two arguments are equal bit for bit."""
    if not isinstance(a, torch.Tensor):
        return a == b
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def verify(
    kernel, args: Sequence, want: Mapping[int, torch.Tensor], tolerance=(0.0, 0.0), scratch: Sequence[int] = (),
    undefined: bool = True,
) -> list[Outcome]:  # fmt: skip
    """Run a compiled kernel and check everything that it wrote.

    Parameters
    ----------
    kernel
        What ``device.compile`` returned.
    args : sequence
        Arguments of the call; those in ``want`` must be poisoned, or hold what the kernel updates.
    want : mapping
        Position -> expected tensor. Every other tensor must be unchanged, bit for bit, but for those in ``scratch``.
    tolerance : (float, float)
        rtol and atol.
    undefined : bool
        Whether the outputs hold nothing before the call, so that reading one is a fault in the simulator.
    """
    outputs = [*want, *scratch]
    outcomes = kernel.runs(args, outputs if undefined else ())
    for number, outcome in enumerate(outcomes):
        for position, expected in want.items():
            compare(outcome.args[position], expected, tolerance, f"argument {position}, run {number}")
        for position, (before, after) in enumerate(zip(args, outcome.args, strict=True)):
            assert position in outputs or same_bits(before, after), f"argument {position} was changed"
    return outcomes


def check(device, func, args: Sequence, want: Mapping[int, torch.Tensor], tolerance=(0.0, 0.0), **options):
    """Compile for a device, run and check; see :func:`verify`."""
    return verify(device.compile(func), args, want, tolerance, **options)


_WORKSPACES = {"gemm": ("split_k", 1), "flash_mla": ("num_splits", 2)}


def check_op(device, op: str, shape: Mapping, dtype: str, seed: int = 0, **tunables):
    """Compile an op, run it on random inputs and compare all outputs with its plain torch reference."""
    spec = registry.get(op)
    kernel = device.compile(spec.make(shape, dtype, device.arch, **tunables))
    return verify_op(kernel, op, shape, dtype, seed)


def verify_op(kernel, op: str, shape: Mapping, dtype: str, seed: int = 0):
    """Run a compiled op on random inputs of a shape and compare all outputs with its plain torch reference."""
    spec = registry.get(op)
    tensors, outputs = spec.inputs(shape, dtype, "cpu", generator(seed))
    want = dict(zip(outputs, spec.reference(shape, dtype, tensors), strict=True))
    option, count = _WORKSPACES.get(op, ("", 0))
    count = count if shape.get(option, 1) > 1 else 0
    scratch = range(min(outputs) - count, min(outputs))
    return verify(kernel, tensors, want, spec.tolerance(shape, dtype), scratch=scratch)


# ------------------------------------------------------------------ tensors


def generator(seed: int = 0) -> torch.Generator:
    """Seeded random numbers."""
    return torch.Generator().manual_seed(seed)


def rand(shape, dtype: str = "float32", seed: int = 0, low: int = -9, high: int = 9) -> torch.Tensor:
    """Normally distributed numbers; integers (and bool) between ``low`` and ``high``."""
    kind = getattr(torch, dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if kind is torch.bool:
        return torch.randint(0, 2, shape, generator=generator(seed)).bool()
    if not kind.is_floating_point:
        low = max(low, torch.iinfo(kind).min) if kind.is_signed else 0
        return torch.randint(low, high + 1, shape, generator=generator(seed)).to(kind)
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(kind)


def out(shape, dtype: str = "float32") -> torch.Tensor:
    """A poisoned output."""
    return poisoned((shape,) if isinstance(shape, int) else shape, dtype)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A torch tensor with the array's memory; its dtypes include those of ml_dtypes."""
    name = array.dtype.name
    try:
        return torch.from_numpy(array)
    except TypeError:
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, name))


def to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    """The tensor's elements as an array of the same dtype, which torch may not know of."""
    if dtype.name in ("bfloat16",) or "float8" in dtype.name:
        return tensor.view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy().view(dtype)
    return tensor.numpy()
