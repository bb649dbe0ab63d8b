"""A warp-specialised attention kernel: right and clean on several schedules; its own faults are caught."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch

from tvm_tile import simulate as sim

_spec = importlib.util.spec_from_file_location("sim_attention", pathlib.Path(__file__).with_name("attention.py"))
K = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(K)


def run(seq, seed, **options):
    gen = torch.Generator().manual_seed(seq + seed)
    q, k, v = (torch.randn(n, 64, generator=gen).bfloat16() for n in (64, seq, seq))
    out = torch.full((64, 64), float("nan"))
    sim.simulate_module(K.attention(seq, **options), "sm_90a", seed=seed)(q, k, v, out)
    s = q.float() @ k.float().T / 8
    if options.get("causal"):
        s = s.masked_fill(torch.arange(seq)[None] > torch.arange(64)[:, None] + seq - 64, float("-inf"))
    return out, s.softmax(-1) @ v.float()


@pytest.mark.parametrize("seq", [64, 128, 320])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 9])
def test_attention(seq, causal, seed):
    got, want = run(seq, seed, causal=causal)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "fault,seq,error",
    [
        ("early_release", 320, sim.DataRaceError),
        ("pv_wait", 320, sim.DataRaceError),
        ("pv_wait", 64, sim.RegisterHazardError),
    ],
)
def test_attention_faults(fault, seq, error):
    with pytest.raises(error):
        run(seq, 0, **{fault: fault == "early_release"})
