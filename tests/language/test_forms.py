"""Where kernels can be written: modules, factories, classes, Relax modules, macros, notebooks."""

import importlib
import linecache
import textwrap

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_tile
import tvm_tile.language as T

from .harness import out, rand, run

SCALE = 3.0


@T.prim_func
def module_level(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
    """A docstring is no statement."""
    with T.Kernel(1, threads=32) as bx:
        for i in T.Parallel(8):
            B[i] = A[i] * SCALE


def factory(block, dtype="float32"):
    n = T.dynamic("n")

    @T.prim_func
    def scale(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(T.ceildiv(n, block), threads=32) as bx:
            tile = T.alloc_fragment((block,), dtype)
            T.copy(A[bx * block], tile)
            for i in T.Parallel(block):
                tile[i] = tile[i] * SCALE
            T.copy(tile, B[bx * block])

    return scale


class Holder:
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):  # noqa: N805
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(8):
                B[i] = A[i] * SCALE

    def make(self, block):
        self.block = block

        @T.prim_func
        def inner(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
            with T.Kernel(8 // self.block, threads=32) as bx:
                for i in T.Parallel(self.block):
                    B[bx * self.block + i] = A[bx * self.block + i] * SCALE

        return inner


@pytest.mark.parametrize("kernel", [module_level, factory(4), factory(5), Holder.kernel, Holder().make(2)])
def test_kernel_from(kernel):
    a, b = rand(np.random.default_rng(0), 8), out(8)
    run(kernel, a, b)
    np.testing.assert_array_equal(b, a * np.float32(3))


def test_decorator_with_arguments():
    @T.prim_func(private=True)
    def hidden(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            A[0] = 1.0

    assert hidden.attrs is None or "global_symbol" not in hidden.attrs
    assert module_level.attrs["global_symbol"] == "module_level"


def execute(source, file, name="made_by_exec"):
    """Execute text as a notebook cell would be."""
    source = textwrap.dedent(source)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": name}
    exec(compile(source, file, "exec"), namespace)
    return namespace


def test_postponed_annotations():
    namespace = execute(
        """
        from __future__ import annotations
        import tvm_tile.language as T

        def factory(length, dtype):
            m = T.dynamic("m")
            @T.prim_func
            def kernel(A: T.Tensor((m, length), dtype), s: T.float32):
                with T.Kernel(m, threads=32) as bx:
                    for i in T.Parallel(length):
                        A[bx, i] = A[bx, i] * s
            return kernel
        """,
        "<postponed>",
    )
    a = rand(np.random.default_rng(0), (3, 5))
    expected = a * np.float32(2)
    run(namespace["factory"](5, "float32"), a, 2.0)
    np.testing.assert_array_equal(a, expected)


def test_notebook_cell():
    namespace = execute(
        """
        import tvm_tile.language as T
        N = 6
        @T.prim_func
        def kernel(A: T.Tensor((N,), "int32")):
            with T.Kernel(1, threads=32) as bx:
                for i in T.Parallel(N):
                    A[i] = i * i
        """,
        "<cell 1>",
    )
    a = out(6, "int32")
    run(namespace["kernel"], a)
    assert a.tolist() == [0, 1, 4, 9, 16, 25]


def test_source_that_cannot_be_read_is_a_clear_error():
    with pytest.raises(tvm_tile.TileSyntaxError, match="source of kernel cannot be read") as info:
        exec("import tvm_tile.language as T\n@T.prim_func\ndef kernel(n: T.int32):\n    pass", {"__name__": "nowhere"})
    assert "linecache" in str(info.value)


def test_inside_a_relax_module():
    @I.ir_module
    class Module:
        @T.prim_func
        def add(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32"), C: T.Tensor((16,), "float32")):
            with T.Kernel(2, threads=32) as bx:
                for i in T.Parallel(8):
                    C[bx * 8 + i] = A[bx * 8 + i] + B[bx * 8 + i]

        @R.function
        def main(x: R.Tensor((16,), "float32"), y: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
            with R.dataflow():
                z = R.call_tir(Module.add, (x, y), out_ty=R.Tensor((16,), "float32"))
                R.output(z)
            return z

    assert tvm_tile.ir.is_tile_function(Module["add"])
    rng = np.random.default_rng(0)
    a, b, c = rand(rng, 16), rand(rng, 16), out(16)
    run(Module["add"], a, b, c)
    np.testing.assert_array_equal(c, a + b)
    importlib.import_module("tvm_tile.runtime.pipeline")  # registers the pipeline by its name
    built = tvm.compile(Module, "llvm", tir_pipeline="tvm_tile")
    machine = tvm.relax.VirtualMachine(built, tvm.cpu())
    z = machine["main"](tvm.runtime.tensor(a), tvm.runtime.tensor(b)).numpy()
    np.testing.assert_array_equal(z, a + b)


def test_mistake_inside_a_module_is_a_tile_error():
    with pytest.raises(tvm_tile.TileSyntaxError, match="no T.cpoy"):

        @I.ir_module
        class Module:
            @T.prim_func
            def broken(A: T.Tensor((16,), "float32")):
                with T.Kernel(2, threads=32) as bx:
                    T.cpoy(A, A)


def test_wrong_keyword_of_a_relax_operator_is_not_blamed_on_the_tile_language():
    with pytest.raises(Exception, match=r"call_tir\(\) got an unexpected keyword argument 'out_sinf'") as info:

        @I.ir_module
        class Module:
            @T.prim_func
            def add(A: T.Tensor((16,), "float32"), C: T.Tensor((16,), "float32")):
                with T.Kernel(2, threads=32) as bx:
                    for i in T.Parallel(8):
                        C[bx * 8 + i] = A[bx * 8 + i]

            @R.function
            def main(x: R.Tensor((16,), "float32")) -> R.Tensor((16,), "float32"):
                with R.dataflow():
                    z = R.call_tir(Module.add, (x,), out_sinf=R.Tensor((16,), "float32"))
                    R.output(z)
                return z

    assert "T.call_tir" not in str(info.value)


# ---------------------------------------------------------------------------------------------------- macros


@T.macro
def load_scaled(source, tile, scale=1.0):
    T.copy(source, tile)
    for i in T.Parallel(tile.shape[0]):
        tile[i] = tile[i] * scale * SCALE


@T.macro
def clamp(x, low, high):
    """Expressions."""
    return T.max(T.min(x, high), low)


@T.macro
def count_down(tile, n):
    if n > 0:
        for i in T.Parallel(4):
            tile[i] += float(n)
        count_down(tile, n - 1)


def test_module_level_macros():
    @T.prim_func
    def kernel(A: T.Tensor((3, 4), "float32"), B: T.Tensor((3, 4), "float32")):
        with T.Kernel(1, threads=32) as bx:
            tile = T.alloc_shared((4,), "float32")
            load_scaled(A[0, 0], tile)  # an element start
            T.copy(tile, B[0, 0])
            load_scaled(A[1, 0:4], tile, scale=2.0)  # a slice
            count_down(tile, 3)
            T.copy(tile, B[1, 0])
            for i in T.Parallel(4):
                B[2, i] = clamp(A[2, i], -0.5, 0.5)

    a, b = rand(np.random.default_rng(0), (3, 4)), out((3, 4))
    run(kernel, a, b)
    np.testing.assert_allclose(b, [a[0] * 3, a[1] * 6 + 6, np.clip(a[2], -0.5, 0.5)], rtol=1e-6)


def test_macro_inside_a_kernel_sees_its_names():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=32) as bx:
            tile = T.alloc_shared((4,), "float32")

            @T.macro
            def add(value):
                for i in T.Parallel(4):
                    tile[i] += value

            T.copy(A[bx * 4], tile)
            add(1.0)
            add(T.cast(bx, "float32"))
            T.copy(tile, B[bx * 4])

    a, b = rand(np.random.default_rng(0), 8), out(8)
    run(kernel, a, b)
    np.testing.assert_allclose(b, a + 1 + np.repeat([0, 1], 4), rtol=1e-6)


@T.macro
def store_then_use(buffer, old):
    buffer[0] = 100
    buffer[1] = old


@T.macro
def bump(counter, by):
    counter = counter + by


@T.macro
def raise_at(element, value):
    return T.atomic_max(element, value, return_prev=True)


def test_macro_arguments_are_values_taken_at_the_call():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            n = T.alloc_var("int32", init=5)
            store_then_use(A, A[0])  # the old value, although the macro changes it first
            bump(n, 2)  # variables are passed by reference
            A[2] = n
            A[3] = raise_at(A[1], 50)  # an element can be a target

    a = np.array([7, 8, 9, 10], "int32")
    run(kernel, a)
    assert a.tolist() == [100, 50, 7, 7]


def test_macro_with_early_return_and_loops():
    @T.macro
    def pick(n, x):
        if n == 0:
            return x
        for k in range(x + 1, x + 3):
            pass
        return x * n

    @T.prim_func
    def kernel(A: T.Tensor((3,), "int32"), m: T.int32):
        with T.Kernel(1, threads=32) as bx:
            A[0] = pick(0, m)
            A[1] = pick(2, m)
            A[2] = pick(3, 4)

    a = out(3, "int32")
    run(kernel, a, 6)
    assert a.tolist() == [6, 12, 12]


def test_macro_that_never_ends_is_an_error():
    with pytest.raises(tvm_tile.TileSyntaxError, match="too deeply"):

        @T.macro
        def forever(n):
            forever(n + 1)

        @T.prim_func
        def kernel(A: T.Tensor((3,), "int32")):
            with T.Kernel(1, threads=32) as bx:
                forever(0)


def test_everything_of_the_stock_dialect_remains():
    from tvm.script import tirx

    for name in ("float32", "cast", "exp", "ceildiv", "Select", "Buffer", "max", "let", "handle"):
        assert getattr(T, name) is getattr(tirx, name)
    assert {"copy", "exp2", "float16"} <= set(dir(T))


def test_buffer_annotation():
    m = T.dynamic("m")

    @T.prim_func
    def kernel(A: T.Buffer((4, 4), "float32"), B: T.Buffer((m, 4), "float32")):
        with T.Kernel(1, threads=32) as bx:
            T.copy(A[0:2, :], B[0, 0])

    a, b = rand(np.random.default_rng(0), (4, 4)), out((3, 4))
    run(kernel, a, b)
    np.testing.assert_array_equal(b[:2], a[:2])
