"""Runs kernels through the Hopper path on the simulator, on a machine with few SMs, so that small grids have waves."""

import dataclasses

import torch

import tvm_tile
from tvm_tile import hardware
from tvm_tile.ir import kernels_of
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.schedule import decide
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_copy, read_log, read_persistent, read_rows, read_slots
from tvm_tile.simulate import simulate_module


def machine(sms: int):
    """An sm_90 machine of so many SMs."""
    return dataclasses.replace(hardware.lookup("sm_90"), sms=sms)


def decided(func, sms: int = 2):
    """The function with its decisions."""
    target = tvm_tile.target("sm_90")
    return decide(func.with_attr("global_symbol", "main").with_attr("target", target), machine(sms))


def ctas(func) -> int | None:
    """CTAs of the first kernel, where it is persistent."""
    return read_persistent(kernels_of(func)[0].block)


def stores(func) -> dict:
    """Copies of the first kernel: name of the target -> (kind, slots, rows)."""
    view = kernel_views(func)[0]
    found = {}
    for site in view.sites:
        plan = read_copy(site.op.annotations)
        if plan is not None:
            found[site.op.dst.buffer.name] = (
                plan.kind,
                read_slots(site.op.annotations),
                read_rows(site.op.annotations),
            )
    return found


def reason(func, rule: str) -> str:
    """What a rule said about the first kernel, its decisions and reasons."""
    return "; ".join(f"{e[3]} {e[4]}" for e in read_log(func) if e[2] == rule)


def simulated(func, seed: int = 0):
    """A decided function on the simulator, which checks races, bounds, barriers and undefined memory."""
    target = tvm_tile.target("sm_90")
    return simulate_module(lower_cuda(func, target), target, seed=seed)


def close(got: torch.Tensor, want: torch.Tensor, k: int) -> None:
    """Half a unit of the output and the rounding of a sum of k products of unit variance."""
    half = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.int32: 0.0}[got.dtype]
    error = (got.double() - want.double()).abs()
    limit = half * want.double().abs() + (0 if got.dtype == torch.int32 else 1e-5 * k**0.5)
    assert not torch.isnan(got.double()).any(), "an element was not written"
    assert bool((error <= limit).all()), f"largest error {float(error.max())}"
