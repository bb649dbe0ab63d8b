"""Sums that a loop only accumulates are combined after it; all others at once."""

import pytest
import torch

import tvm_tile.language as T
from tvm_tile import hardware
from tvm_tile.ir import tile_ops
from tvm_tile.schedule import decide
from tvm_tile.schedule.decisions import read_deferred
from tvm_tile.simulate import simulate


def kernel(update="scale", start=0.0, read_inside=False):
    @T.prim_func
    def main(X: T.Tensor((8, 64, 64), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((64, 64), "float32")
            factor = T.alloc_fragment((64,), "float32")
            part = T.alloc_fragment((64,), "float32")
            total = T.alloc_fragment((64,), "float32")
            seen = T.alloc_fragment((64,), "float32")
            T.fill(total, start)
            for k in T.serial(8):
                T.copy(X[k, 0:64, 0:64], tile)
                T.reduce_max(tile, factor, dim=1)
                T.reduce_sum(tile, part, dim=1)
                for i in T.Parallel(64):
                    if update == "scale":
                        total[i] = total[i] * factor[i] + part[i]
                    elif update == "add":
                        total[i] = part[i] + total[i]
                    elif update == "square":
                        total[i] = total[i] + part[i] * part[i]
                if read_inside:
                    T.copy(total, seen)
            T.copy(total, Y)

    return main


def deferred(func, arch="sm_80"):
    decided = decide(func, hardware.lookup(arch))
    sums = [op for op in tile_ops(decided.body) if op.annotations.get("tile.reduce") == "sum"]
    found = [read_deferred(op.annotations) for op in sums]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("update", ["scale", "add"])
def test_a_sum_that_is_only_scaled_and_added_waits(update):
    assert deferred(kernel(update)) == "total"


@pytest.mark.parametrize(
    "options",
    [{"update": "square"}, {"start": 1.0}, {"read_inside": True}],
    ids=["not linear", "not zero", "read inside"],
)
def test_other_sums_are_combined_at_once(options):
    assert deferred(kernel(**options)) is None


@pytest.mark.parametrize(
    "options", [{}, {"update": "add"}, {"update": "square"}, {"start": 1.0}, {"read_inside": True}]
)
def test_numbers(options):
    np = pytest.importorskip("numpy")
    from tvm_tile.lower.cuda import lower_cuda
    from tvm_tile.runtime.targets import target
    from tvm_tile.simulate import simulate_module

    where = target("sm_80")
    func = kernel(**options).with_attr("global_symbol", "main").with_attr("target", where)
    x = np.random.default_rng(3).standard_normal((8, 64, 64)).astype("float32")
    y = np.full(64, np.nan, "float32")
    simulate_module(lower_cuda(func, where), where)(x, y)
    total = np.full(64, options.get("start", 0.0))
    for k in range(8):
        factor, part = x[k].astype("float64").max(1), x[k].astype("float64").sum(1)
        update = options.get("update", "scale")
        total = total * factor + part if update == "scale" else total + (part if update == "add" else part * part)
    np.testing.assert_allclose(y, total, rtol=2e-4, atol=2e-4 * np.abs(total).max())


@pytest.mark.parametrize("again", [True, False])
def test_a_loop_around_the_loop(again):
    """Where the total goes on in the next round, combined sums would be added up once more for each thread."""

    @T.prim_func
    def main(X: T.Tensor((8, 64, 64), "float32"), Y: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((64, 64), "float32")
            part, total = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            T.clear(total)
            for turn in T.serial(2):
                if again:
                    T.clear(total)
                for k in T.serial(4):
                    T.copy(X[turn * 4 + k, 0:64, 0:64], tile)
                    T.reduce_sum(tile, part, dim=1)
                    for i in T.Parallel(64):
                        total[i] = total[i] * 0.5 + part[i]
                T.copy(total, Y[turn, :])

    assert deferred(main) == ("total" if again else None)
    x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(1))
    y, want, total = torch.full((2, 64), float("nan")), torch.empty(2, 64), torch.zeros(64)
    simulate(main, "sm_80")(x, y)
    for turn in range(2):
        total = torch.zeros(64) if again else total
        for k in range(4):
            total = total * 0.5 + x[turn * 4 + k].sum(1)
        want[turn] = total
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)
