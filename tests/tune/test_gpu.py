"""Tuning on a GPU: it survives what takes the GPU's context away."""

from __future__ import annotations

import pytest

from tests.tune.spaces import Add, add_kernel
from tvm_tile.tune import records
from tvm_tile.tune.session import run

pytestmark = pytest.mark.gpu


class LosesTheGpu(Add):
    """Of 30 combinations 22 are declared illegal; of the rest one hangs on the GPU and one destroys its context."""

    name = "tuning_test_gpu"
    options = {"seed": [1, 2, 3]}  # 1 is fine, 2 hangs, 3 faults

    def choices(self, shape, dtype, target):
        return {"block": [8, 16, 32, 64, 128], "mode": ["good", "illegal"], "seed": self.options["seed"]}

    def complete(self, shape=None):
        out = super().complete(shape)
        out["seed"] = out["seed"] or 1
        return out

    def illegal(self, shape, dtype, target, config):
        if config["mode"] == "illegal" and config["block"] > 8:
            return "test rule: illegal mode"
        if shape["seed"] > 1 and (config["mode"] == "illegal" or config["block"] > 8):
            return "test rule: seed"
        return None

    def build(self, shape, dtype, target, block, mode):
        return add_kernel(shape["n"], block, 1.0)

    def arguments(self, shape, dtype, generator):
        import torch

        if shape["seed"] == 2:
            torch.cuda._sleep(60 * 10**9)  # half a minute
            torch.cuda.synchronize()
        if shape["seed"] == 3:
            torch.zeros(1, device="cuda")[torch.full((1,), 5, device="cuda")].sum().item()
        return super().arguments(shape, dtype, generator)


@pytest.mark.parametrize("strategy", ["evolution", "sweep"])
def test_hangs_and_lost_contexts_end_nothing(tmp_path, strategy):
    shape = {"n": 3000, "seed": 0}
    report = run(LosesTheGpu(), shape, target="cuda", trials=8, out=tmp_path, timeout=8.0, strategy=strategy)
    assert report.measured == report.legal == 8 and not report.interrupted
    assert report.failures == {"measure timeout": 1, "GPU context lost": 1}, report.lines()
    # the evolution counts what it came across
    assert 0 < report.rejected["test rule"] <= 22 and report.space == 30
    assert strategy == "evolution" or report.rejected["test rule"] == 22
    assert report.config["seed"] == 1 and records.all_records(tmp_path)[0].config == report.config
    assert report.default_seconds > 0
