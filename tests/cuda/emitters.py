"""Runs small kernels through the CUDA lowering on the simulator, with poisoned outputs."""

import torch

import tvm_tile
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.simulate import SimulationReport, simulate_module

DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int16", "int32",
                 "int64", "uint8", "uint16", "uint32", "uint64", "bool")
}  # fmt: skip


def build(func, arch: str = "sm_80", seed: int = 0):
    """A tile function lowered for a GPU and made callable on the simulator."""
    target = tvm_tile.target(arch)
    return simulate_module(lower_cuda(func, target), target, seed=seed)


def run(func, *args, arch: str = "sm_80", outputs: int = 0) -> SimulationReport:
    """Run a kernel once; its last ``outputs`` arguments hold nothing yet."""
    undefined = tuple(range(len(args) - outputs, len(args)))
    return build(func, arch)(*args, undefined=undefined)


def poisoned(shape, dtype: str) -> torch.Tensor:
    """A tensor of NaN, or of bytes 0x7f."""
    if dtype.startswith(("float8", "int", "uint", "bool")):
        out = torch.full(shape, 0x7F if dtype != "bool" else 1, dtype=torch.uint8)
        if dtype == "bool":
            return out.bool()
        size = DTYPES[dtype].itemsize
        return out.repeat_interleave(size, dim=-1).view(DTYPES[dtype]).reshape(shape)
    return torch.full(shape, float("nan")).to(DTYPES[dtype])


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4, rtol: float = 1e-4) -> None:
    """Assert equality within a tolerance; NaN equals NaN."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol, equal_nan=True)
