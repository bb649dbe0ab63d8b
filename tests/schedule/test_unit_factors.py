"""Accumulators that a loop scales: skipped by warps whose factors all are one, and only then."""

import pytest
import tvm
from tvm_ffi import structural_equal

import tvm_tile
import tvm_tile.language as T
from tvm_tile.errors import TileShapeError
from tvm_tile.ir.factor import factored
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.schedule import decide, explain
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_unit_factors

from .scaled_accumulators import online, scaled


def chosen(func, target: str) -> str | None:
    """The fragment on which warps vote."""
    func = func.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target(target))
    func = decide(func, tvm_tile.hardware.lookup(target))
    sites = [s for s in kernel_views(func)[0].sites if s.name.startswith("parallel")]
    return next((read_unit_factors(s.op.annotations) for s in sites), None)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_code_votes(target):
    """One vote an iteration, in front of the multiplication; none where it was switched off."""
    for note, votes in ((None, True), ("off", False)):
        func = scaled(note=note).with_attr("global_symbol", "main")
        source = str(lower_cuda(func, tvm_tile.target(target)).script())
        assert ("any_sync" in source) == votes
    assert "skipped by warps whose factors by all are one" in explain(scaled(), target)


def test_few_registers_are_multiplied_at_once():
    """64 columns of a factor: 16 registers, no more than a vote and its branch cost."""
    assert chosen(scaled(columns=64), "sm_90") is None


def test_a_name_that_scales_nothing_is_refused():
    with pytest.raises(TileShapeError, match="its factors are by"):
        chosen(scaled(note="acc"), "sm_90")


def test_other_operations_are_left_alone():
    """A product of two elements, and one outside of a loop, are no rescaling."""

    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), V: T.Tensor((64,), "float32"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as bx:
            x, v = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
            T.copy(A, x)
            T.copy(V, v)
            for i, j in T.Parallel(64, 64):
                x[i, j] *= v[i]
            T.copy(x, C)

    assert chosen(main, "sm_90") is None


def test_factored_differences_are_told_and_can_be_switched_off():
    told = "a * c - b * c computed as (a - b) * c"
    assert told in explain(online(0.5), "sm_90")
    assert told not in explain(online(0.5, factored=False), "sm_90")


def test_deciding_again_keeps_factored_differences():
    func = online(0.5).with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    machine = tvm_tile.hardware.lookup("sm_90")
    once = decide(func, machine)
    assert structural_equal(once, decide(once, machine))


@pytest.mark.parametrize("number", [0.0, float("inf")])
def test_products_of_zero_and_infinity_stay(number):
    """0 * inf is NaN, where 0 * 2 - 0 * 1 is none."""
    a, b = tvm.tirx.Var("a", "float32"), tvm.tirx.Var("b", "float32")
    c = tvm.tirx.const(number, "float32")
    difference = tvm.tirx.Sub(tvm.tirx.Mul(a, c), tvm.tirx.Mul(b, c))
    assert structural_equal(factored(difference), difference)
