"""The index functions on TVM expressions agree with ints, and the emitted expressions are simple."""

import itertools
import operator
import random
from types import SimpleNamespace

import pytest

from tvm_tile.layout import (
    MMA,
    SharedLayout,
    accumulator_fragment,
    default_fragment,
    find_instruction,
    lanes_for_reduce,
    load_a,
    load_b,
    partition,
    register_in,
)

from .strategies import random_fragment

tvm = pytest.importorskip("tvm")
from tvm import sym, tirx  # noqa: E402


@pytest.fixture(scope="module")
def evaluate():
    """Value of an expression, with variables replaced by constants through the simplifier."""
    def run(expr, **values):
        if isinstance(expr, (int, bool)):
            return int(expr)
        analyzer = sym.Analyzer()
        expr = expr.asobject() if hasattr(expr, "asobject") else expr
        for name, value in values.items():
            analyzer.bind(VARS[name], tirx.IntImm("int32", value))
        result = analyzer.simplify(expr)
        if isinstance(result, tirx.IntImm):
            return int(result)
        # The simplifier leaves an XOR of two constants alone: what remains is a constant Python expression.
        return eval(str(result), {"T": SimpleNamespace(BitwiseXor=operator.xor)})
    return run


VARS = {name: tirx.Var(name, "int32") for name in ("t", "r", "i", "j")}
T, R, ROW, COL = (VARS[n] for n in ("t", "r", "i", "j"))


def sample(rng, *extents, count=25):
    return [tuple(rng.randrange(n) for n in extents) for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_fragment(seed, evaluate):
    rng = random.Random(seed)
    f = random_fragment(rng, 512, 2)
    coords, owner, primary, active = f.coords(T, R), f.owner((ROW, COL)), f.is_primary(T), f.active(T)
    for t, r in sample(rng, f.used_threads, f.registers):
        assert tuple(evaluate(c, t=t, r=r) for c in coords) == f.coords(t, r)
    for i, j in sample(rng, *f.padded_shape):
        assert tuple(evaluate(o, i=i, j=j) for o in owner) == f.owner((i, j))
    for t in range(f.threads):
        assert evaluate(primary, t=t) == int(f.is_primary(t))
        assert evaluate(active, t=t) == int(f.active(t))


def test_reduction_and_reading(evaluate):
    rng = random.Random(1)
    f = default_fragment((16, 96), 96, 32)
    plan = lanes_for_reduce(f, 1)
    for (t,) in sample(rng, 96):
        for expr, want in ((plan.rank(T), plan.rank(t)), (plan.group(T), plan.group(t)),
                           (plan.writes(T), plan.writes(t))):
            assert evaluate(expr, t=t) == int(want)
    whole = default_fragment((16, 96), 1, 32)
    for t, r in sample(rng, 96, f.registers):
        assert evaluate(register_in(whole, f, T, R), t=t, r=r) == register_in(whole, f, t, r)


@pytest.mark.parametrize("layout", [
    SharedLayout.row_major((24, 40), 16), SharedLayout.padded((24, 40), 16, 8),
    SharedLayout.swizzled((24, 64), 16, 128), SharedLayout.swizzled((24, 128), 16, 64),
    SharedLayout.swizzled((24, 48), 16, 32), SharedLayout.swizzled((24, 32), 32, 128)], ids=repr)
def test_shared_layout(layout, evaluate):
    rng = random.Random(2)
    offset, back = layout.offset(ROW, COL), layout.coords(T)
    for i, j in sample(rng, *layout.shape):
        assert evaluate(offset, i=i, j=j) == layout.offset(i, j)
        assert tuple(evaluate(c, t=layout.offset(i, j)) for c in back) == (i, j)
    if layout.columns * layout.dtype_bits % 128 == 0:
        chunk = layout.chunk_offset(ROW, COL)
        for i, j in sample(rng, layout.rows, layout.columns // layout.chunk_elements):
            assert evaluate(chunk, i=i, j=j) == layout.chunk_offset(i, j)


def test_matrix_moves(evaluate):
    inst = find_instruction(MMA, "bfloat16", "bfloat16", "float32", 80)
    for move in (load_a(inst), load_b(inst, 4), load_b(inst, 4, True), load_a(inst, trans=True)):
        address = move.address(T)
        for t in range(32):
            assert tuple(evaluate(a, t=t) for a in address) == move.address(t)


def operations(expr):
    """Arithmetic nodes in an expression."""
    return str(expr).count("//") + str(expr).count("%") + str(expr).count("*") + str(expr).count("^")


def test_emitted_expressions_are_lean():
    inst = find_instruction(MMA, "bfloat16", "bfloat16", "float32", 80)
    c = accumulator_fragment(inst, partition("FullRow", 64, 64, 4, inst))
    for (row, column), reg in zip((c.coords(T, reg) for reg in range(c.registers)), itertools.count()):
        # warp * 16 + lane // 4 % 8 + 8 * half, and lane % 4 * 2 + a constant
        assert operations(row) <= 4 and operations(column) <= 2, (reg, row, column)
    assert operations(SharedLayout.swizzled((64, 64), 16, 128).chunk_offset(ROW, COL)) <= 4
    assert operations(SharedLayout.row_major((64, 64), 16).offset(ROW, COL)) == 1
