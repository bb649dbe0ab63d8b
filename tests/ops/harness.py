"""Runs an op against its plain torch reference."""

from __future__ import annotations

import torch

import tvm_tile
from tvm_tile.ops import registry


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: tuple[float, float], what: str = "output") -> None:
    """Equal within tolerance; NaN and infinities must be in the same places."""
    assert got.shape == want.shape
    got = got.to(want.dtype)
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places than expected"
    rtol, atol = tolerance
    right = torch.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if not right.all():
        worst = (got - want).abs().nan_to_num(posinf=0).max().item()
        first = (~right).nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int((~right).sum())} of {got.numel()} elements wrong, first at {first} "
            f"({got[tuple(first)].item()} instead of {want[tuple(first)].item()}), largest error {worst}"
        )


def check(op: str, shape: dict, dtype: str, lowering: str = "optimised", seed: int = 0, **tunables) -> None:
    """Compile an op, run it on random inputs and compare all outputs."""
    spec = registry.get(op)
    kernel = tvm_tile.compile(spec.make(shape, dtype, "llvm", **tunables), "llvm", lowering=lowering)
    tensors, outputs = spec.inputs(shape, dtype, "cpu", generator(seed))
    before = [t.clone() for t in tensors]
    expected = spec.reference(shape, dtype, tensors)
    kernel(*tensors)
    tolerance = spec.tolerance(shape, dtype)
    for position, want in zip(outputs, expected, strict=True):
        compare(tensors[position], want, tolerance, f"argument {position}")
    workspaces = {"gemm": int(shape.get("split_k", 1) > 1), "flash_mla": 2 * int(shape.get("num_splits", 1) > 1)}
    for position in range(min(outputs) - workspaces.get(op, 0)):
        same = tensors[position].view(torch.uint8).equal(before[position].view(torch.uint8))
        assert same, f"input {position} was changed"
