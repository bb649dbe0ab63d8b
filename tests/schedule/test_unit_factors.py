"""Accumulators that a loop scales: skipped by warps whose factors all are one, and only then."""

import pytest
import torch
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
from tvm_tile.simulate import simulate

ROWS, STEPS = 64, 4


def scaled(columns: int = 128, note: str | None = None, factor: str = "float32"):
    """``acc = sum over steps of A_k B_k, scaled by Factor[k, row] before each product``."""
    notes = {} if note is None else {"tile.unit_factors": note}

    @T.prim_func
    def main(
        A: T.Tensor((ROWS, STEPS * 32), "float16"),
        B: T.Tensor((STEPS * 32, columns), "float16"),
        Factor: T.Tensor((STEPS, ROWS), factor),
        C: T.Tensor((ROWS, columns), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            A_s, B_s = T.alloc_shared((ROWS, 32), "float16"), T.alloc_shared((32, columns), "float16")
            acc, by = T.alloc_fragment((ROWS, columns), "float32"), T.alloc_fragment((ROWS,), factor)
            T.clear(acc)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(A[0, k * 32], A_s)
                T.copy(B[k * 32, 0], B_s)
                T.copy(Factor[k, 0], by)
                for i, j in T.Parallel(ROWS, columns):
                    acc[i, j] *= by[i]
                T.gemm(A_s, B_s, acc)
            T.copy(acc, C)

    return _annotated(main, notes)


def _annotated(func, notes: dict):
    """The function with annotations on the operation that scales."""
    if not notes:
        return func
    schedule = tvm_tile.schedule.rule.TileSchedule(func)
    site = next(s for k in schedule.kernels for s in k.sites if s.name.startswith("parallel"))
    for key, value in notes.items():
        schedule.annotate(site, key, value)
    return schedule.finished()


def chosen(func, target: str) -> str | None:
    """The fragment on which warps vote."""
    func = func.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target(target))
    func = decide(func, tvm_tile.hardware.lookup(target))
    sites = [s for s in kernel_views(func)[0].sites if s.name.startswith("parallel")]
    return next((read_unit_factors(s.op.annotations) for s in sites), None)


def inputs(columns: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    a = (torch.randn(ROWS, STEPS * 32, generator=g) / 4).half()
    b = (torch.randn(STEPS * 32, columns, generator=g) / 4).half()
    return a, b


def expected(a, b, factor):
    acc = torch.zeros(ROWS, b.shape[1], dtype=torch.float64)
    for k in range(STEPS):
        part = slice(k * 32, k * 32 + 32)
        acc = acc * factor[k].double()[:, None] + a[:, part].double() @ b[part].double()
    return acc


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_factors_of_one_and_others(target):
    """A single factor other than one in a warp, in each place in turn; all one; none one; zero and NaN."""
    func = scaled()
    assert chosen(func, target) == "by"
    run = simulate(func, target)
    a, b = inputs(128, 3)
    g = torch.Generator().manual_seed(4)
    cases = [torch.ones(STEPS, ROWS), torch.rand(STEPS, ROWS, generator=g)]
    for row in (0, 7, 8, 17, 63):
        one = torch.ones(STEPS, ROWS)
        one[2, row] = 0.25
        cases.append(one)
    special = torch.ones(STEPS, ROWS)
    special[1, 5], special[3, 40] = 0.0, float("nan")
    cases.append(special)
    for factor in cases:
        c = torch.full((ROWS, 128), float("nan"))
        run(a, b, factor, c)
        torch.testing.assert_close(c.double(), expected(a, b, factor), rtol=1e-5, atol=1e-5, equal_nan=True)


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


@pytest.mark.parametrize("target", ["llvm", "sm_80", "sm_90"])
def test_maxima_that_grow_little_by_little(target):
    """Attention whose scores grow by less than the kept growth with each tile, and by much more over all of them."""
    from tvm_tile.ops import registry

    spec = registry.get("flash_attention")
    shape = spec.complete({"batch": 1, "heads": 1, "seq": 64, "dim": 128, "seq_kv": 512})
    func = spec.make(shape, "float16", target if target != "llvm" else "cpu", block_M=64, block_N=32)
    tensors, outputs = spec.inputs(shape, "float16", "cpu", torch.Generator().manual_seed(9))
    q, k = tensors[0], tensors[1]
    q[..., 0], k[..., 0] = 4.0, torch.linspace(-80, 80, 512, dtype=torch.float16)[None, :, None].expand_as(k[..., 0])
    want = spec.reference(shape, "float16", tensors)
    run = tvm_tile.compile(func, target="llvm") if target == "llvm" else simulate(func, target)
    for position in outputs:
        tensors[position].fill_(float("nan"))
    run(*tensors)
    rtol, atol = spec.tolerance(shape, "float16")
    for position, value in zip(outputs, want, strict=True):
        torch.testing.assert_close(tensors[position].double(), value.double(), rtol=rtol, atol=atol)


def online(outer: float, factored: bool | None = None):
    """Sums of weighted rows by an online softmax whose factors are written as a difference of products."""

    @T.prim_func
    def main(
        X: T.Tensor((ROWS, STEPS * 32), "float16"),
        B: T.Tensor((STEPS * 32, 128), "float16"),
        C: T.Tensor((ROWS, 128), "float32"),
        Factors: T.Tensor((STEPS, ROWS), "float32"),
    ):
        with T.Kernel(1, threads=128) as bx:
            x, w = T.alloc_fragment((ROWS, 32), "float32"), T.alloc_fragment((ROWS, 32), "float16")
            B_s, acc = T.alloc_shared((32, 128), "float16"), T.alloc_fragment((ROWS, 128), "float32")
            top, old = T.alloc_fragment((ROWS,), "float32"), T.alloc_fragment((ROWS,), "float32")
            by = T.alloc_fragment((ROWS,), "float32")
            T.clear(acc)
            T.fill(top, -1e4)
            for k in T.Pipelined(STEPS, num_stages=2):
                T.copy(B[k * 32, 0], B_s)
                T.copy(X[0, k * 32], x)
                T.copy(top, old)
                T.reduce_max(x, top, dim=1, clear=False)
                for i in T.Parallel(ROWS):
                    by[i] = T.exp2(old[i] * outer - outer * top[i])
                T.copy(by, Factors[k, 0])
                for i, j in T.Parallel(ROWS, 32):
                    w[i, j] = T.exp2(x[i, j] * outer - top[i] * outer)
                for i, j in T.Parallel(ROWS, 128):
                    acc[i, j] *= by[i]
                T.gemm(w, B_s, acc)
            T.copy(acc, C)

    if factored is not None:
        schedule = tvm_tile.schedule.rule.TileSchedule(main)
        site = next(s for k in schedule.kernels for s in k.sites if s.name == "parallel")
        schedule.annotate(site, "tile.factored", int(factored))
        return schedule.finished()
    return main


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_equal_maxima_give_exactly_one(target):
    """Large scores whose maximum is in the first tile: products of them differ by more than an ulp of one."""
    g = torch.Generator().manual_seed(8)
    x = torch.rand(ROWS, STEPS * 32, generator=g).half() * 100 + 1000
    x[:, 3] = 1101.5
    b = torch.randn(STEPS * 32, 128, generator=g).half()
    outer = 0.1234567
    c, factors = torch.full((ROWS, 128), float("nan")), torch.full((STEPS, ROWS), float("nan"))
    simulate(online(outer), target)(x, b, c, factors)
    assert bool((factors[0] == 0).all()) and bool((factors[1:] == 1).all())
    weights = torch.exp2((x.double() - x.double().max(1, keepdim=True).values) * outer)
    torch.testing.assert_close(c.double(), weights @ b.double(), rtol=5e-3, atol=5e-3)


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
