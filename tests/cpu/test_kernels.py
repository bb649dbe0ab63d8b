"""Whole kernels on the CPU: the optimised and the reference lowering against numpy, poisoned outputs, odd sizes."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_tile.language as T

from .harness import compile_kernel, narrow_targets, numpy_dtype, poisoned

HOW = ("optimised", "reference")
rng = np.random.default_rng()


def random(shape, dtype="float32") -> np.ndarray:
    kind = numpy_dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(max(info.min, -9), min(info.max, 9), shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def check(got, want, tolerance=1e-5) -> None:
    np.testing.assert_allclose(
        got.astype("float64"), np.asarray(want).astype("float64"), rtol=tolerance, atol=tolerance
    )


# ------------------------------------------------------------------ copies and element-wise code
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows,columns", [(1, 1), (7, 3), (64, 64), (60, 60), (100, 65), (65, 200)])
@pytest.mark.parametrize(
    "source,target",
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float16"),
        ("float16", "bfloat16"),
        ("int8", "int32"),
        ("float32", "float64"),
    ],
)
def test_copy_of_any_shape_and_type(how, rows, columns, source, target):
    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), source), B: T.Tensor((rows, columns), target)):
        with T.Kernel(T.ceildiv(columns, 48), T.ceildiv(rows, 32), threads=64) as (bx, by):
            tile = T.alloc_shared((32, 48), target)
            T.copy(A[by * 32, bx * 48], tile)
            T.copy(tile, B[by * 32, bx * 48])

    a, b = random((rows, columns), source), poisoned((rows, columns), target)
    compile_kernel(kernel, how)(a, b)
    np.testing.assert_array_equal(b, a.astype("float32").astype(numpy_dtype(target)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [0, 1, 7, 1000, 1001])
def test_symbolic_length(how, n):
    size = T.dynamic("size")

    @T.prim_func
    def kernel(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32"), C: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 128), threads=128) as bx:
            for i in T.Parallel(128):
                C[bx * 128 + i] = A[bx * 128 + i] + B[bx * 128 + i]

    a, b, c = random((n,)), random((n,)), poisoned((n,), "float32")
    compile_kernel(kernel, how)(a, b, c)
    check(c, a + b)


@pytest.mark.parametrize("how", HOW)
def test_safe_value_outside_of_the_tensor(how):
    @T.prim_func
    def kernel(A: T.Tensor((60, 60), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            tile = T.alloc_shared((64, 64), "float32")
            T.annotate_safe_value({A: -T.infinity("float32")})
            T.copy(A[0, 0], tile)
            T.copy(tile, B)

    a, b = random((60, 60)), poisoned((64, 64), "float32")
    compile_kernel(kernel, how)(a, b)
    want = np.full((64, 64), -np.inf, "float32")
    want[:60, :60] = a
    np.testing.assert_array_equal(b, want)


@pytest.mark.parametrize("how", HOW)
def test_elementwise_with_branches_broadcasts_and_strides(how):
    @T.prim_func
    def kernel(
        A: T.Tensor((50, 70), "float32"),
        R: T.Tensor((50,), "float32"),
        B: T.Tensor((70, 50), "float32"),
        C: T.Tensor((50, 70), "int32"),
    ):
        with T.Kernel(T.ceildiv(50, 32), T.ceildiv(70, 32), threads=64) as (bx, by):
            tile = T.alloc_fragment((32, 32), "float32")
            T.copy(A[bx * 32, by * 32], tile)
            for i, j in T.Parallel(32, 32):
                if i > j:
                    tile[i, j] = tile[i, j] * R[bx * 32 + i]
                else:
                    tile[i, j] = T.if_then_else(j % 3 == 0, -tile[i, j], T.max(tile[i, j], 0.25))
            for i, j in T.Parallel(32, 32):
                B[by * 32 + j, bx * 32 + i] = tile[i, j]
            for i, j in T.Parallel(32, 32):
                C[bx * 32 + i, by * 32 + j] = (i * 7 + j) // 5 + (i - j) % 4

    a, r = random((50, 70)), random((50,))
    b, c = poisoned((70, 50), "float32"), poisoned((50, 70), "int32")
    compile_kernel(kernel, how)(a, r, b, c)
    row, column = np.meshgrid(np.arange(50), np.arange(70), indexing="ij")
    i, j = row % 32, column % 32
    want = np.where(i > j, a * r[:, None], np.where(j % 3 == 0, -a, np.maximum(a, 0.25)))
    check(b, want.T)
    np.testing.assert_array_equal(c, (i * 7 + j) // 5 + (i - j) % 4)


@pytest.mark.parametrize("how", HOW)
def test_snapshot_swaps(how):
    @T.prim_func
    def kernel(A: T.Tensor((40,), "float32"), B: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            for i in T.Parallel(40):
                t = A[i]
                A[i] = B[i]
                B[i] = t

    a, b = random((40,)), random((40,))
    x, y = a.copy(), b.copy()
    compile_kernel(kernel, how)(x, y)
    np.testing.assert_array_equal(x, b)
    np.testing.assert_array_equal(y, a)


@pytest.mark.parametrize("how", HOW)
def test_gather_through_a_table(how):
    @T.prim_func
    def kernel(
        A: T.Tensor((100, 24), "float32"),
        Table: T.Tensor((40,), "int32"),
        B: T.Tensor((40, 24), "float32"),
        C: T.Tensor((40,), "float32"),
    ):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            for i, j in T.Parallel(40, 24):
                B[i, j] = A[Table[i], j]
            for i in T.Parallel(40):
                C[i] = T.if_then_else(Table[i] > 50, A[Table[i], 3], 0.5)

    a, table = random((100, 24)), rng.integers(0, 100, 40).astype("int32")
    b, c = poisoned((40, 24), "float32"), poisoned((40,), "float32")
    compile_kernel(kernel, how)(a, table, b, c)
    np.testing.assert_array_equal(b, a[table])
    np.testing.assert_array_equal(c, np.where(table > 50, a[table, 3], np.float32(0.5)))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_mathematics_of_every_float_type(how, dtype):
    names = ("exp2", "exp", "log2", "log", "tanh", "sigmoid", "erf", "sqrt", "rsqrt", "abs", "floor", "ceil")

    @T.prim_func
    def kernel(A: T.Tensor((37,), dtype), B: T.Tensor((12, 37), dtype)):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            for i in T.Parallel(37):
                B[0, i] = T.exp2(A[i])
                B[1, i] = T.exp(A[i])
                B[2, i] = T.log2(A[i])
                B[3, i] = T.log(A[i])
                B[4, i] = T.tanh(A[i])
                B[5, i] = T.sigmoid(A[i])
                B[6, i] = T.erf(A[i])
                B[7, i] = T.sqrt(A[i])
                B[8, i] = T.rsqrt(A[i])
                B[9, i] = T.abs(A[i])
                B[10, i] = T.floor(A[i])
                B[11, i] = T.ceil(A[i])

    import math

    a = np.abs(random((37,), "float32") * 2 + 0.1).astype(numpy_dtype(dtype))
    b = poisoned((12, 37), dtype)
    compile_kernel(kernel, how)(a, b)
    x = a.astype("float64")
    want = {
        "exp2": np.exp2(x),
        "exp": np.exp(x),
        "log2": np.log2(x),
        "log": np.log(x),
        "tanh": np.tanh(x),
        "sigmoid": 1 / (1 + np.exp(-x)),
        "erf": np.vectorize(math.erf)(x),
        "sqrt": np.sqrt(x),
        "rsqrt": 1 / np.sqrt(x),
        "abs": np.abs(x),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }
    for n, name in enumerate(names):
        tolerance = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
        np.testing.assert_allclose(b[n].astype("float64"), want[name], rtol=tolerance, atol=tolerance, err_msg=name)


# ------------------------------------------------------------------ reductions and scans
REDUCTIONS = {
    "max": np.max,
    "min": np.min,
    "sum": np.sum,
    "absmax": lambda x, axis: np.abs(x).max(axis),
    "abssum": lambda x, axis: np.abs(x).sum(axis),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize(
    "shape,dim", [((16, 64), 1), ((16, 64), 0), ((5, 7), 1), ((37, 23), 0), ((9, 130), 1), ((3, 20, 33), 1)]
)
@pytest.mark.parametrize("clear", [True, False])
def test_reductions(how, kind, shape, dim, clear):
    reduce = getattr(T, f"reduce_{kind}")
    rest = tuple(e for d, e in enumerate(shape) if d != dim)

    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(rest, "float32")):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            tile = T.alloc_fragment(shape, "float32")
            out = T.alloc_fragment(rest, "float32")
            T.copy(A, tile)
            T.copy(B, out)
            reduce(tile, out, dim=dim, clear=clear)
            T.copy(out, B)

    a, b = random(shape), random(rest)
    old = b.copy()
    compile_kernel(kernel, how)(a, b)
    want = REDUCTIONS[kind](a.astype("float64"), axis=dim)
    if not clear:
        want = {"max": np.maximum, "min": np.minimum, "sum": np.add, "absmax": np.maximum, "abssum": np.add}[kind](
            old, want
        )
    check(b, want)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dim", [0, 1])
def test_nan_propagates_through_max_and_min(how, dim):
    @T.prim_func
    def kernel(A: T.Tensor((40, 40), "float32"), B: T.Tensor((40,), "float32"), C: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            tile = T.alloc_fragment((40, 40), "float32")
            high, low = T.alloc_fragment((40,), "float32"), T.alloc_fragment((40,), "float32")
            T.copy(A, tile)
            T.reduce_max(tile, high, dim=dim)
            T.reduce_min(tile, low, dim=dim)
            T.copy(high, B)
            T.copy(low, C)

    a = random((40, 40))
    places = rng.integers(0, 40, (20, 2))
    a[places[:, 0], places[:, 1]] = np.nan
    b, c = np.zeros(40, "float32"), np.zeros(40, "float32")
    compile_kernel(kernel, how)(a, b, c)
    np.testing.assert_array_equal(b, a.max(dim))
    np.testing.assert_array_equal(c, a.min(dim))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", ["int32", "int8", "float16"])
def test_reductions_of_other_types(how, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((9, 50), dtype), B: T.Tensor((9,), dtype), C: T.Tensor((9,), dtype)):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            tile = T.alloc_fragment((9, 50), dtype)
            high, low = T.alloc_fragment((9,), dtype), T.alloc_fragment((9,), dtype)
            T.copy(A, tile)
            T.reduce_max(tile, high, dim=1)
            T.reduce_min(tile, low, dim=1)
            T.copy(high, B)
            T.copy(low, C)

    a, b, c = random((9, 50), dtype), poisoned((9,), dtype), poisoned((9,), dtype)
    compile_kernel(kernel, how)(a, b, c)
    np.testing.assert_array_equal(b, a.max(1))
    np.testing.assert_array_equal(c, a.min(1))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum(how, dim, reverse):
    @T.prim_func
    def kernel(A: T.Tensor((13, 30), "float32"), B: T.Tensor((13, 30), "float32")):
        with T.Kernel(1, threads=64) as bx:  # noqa: F841
            tile = T.alloc_shared((13, 30), "float32")
            T.copy(A, tile)
            T.cumsum(tile, dim=dim, reverse=reverse)
            T.copy(tile, B)

    a, b = random((13, 30)), poisoned((13, 30), "float32")
    compile_kernel(kernel, how)(a, b)
    want = np.flip(np.cumsum(np.flip(a, dim), dim), dim) if reverse else np.cumsum(a, dim)
    check(b, want)


@pytest.mark.parametrize("how", HOW)
def test_votes(how):
    @T.prim_func
    def kernel(A: T.Tensor((4, 30), "int32"), B: T.Tensor((4, 2), "int32")):
        with T.Kernel(4, threads=64) as bx:
            tile = T.alloc_shared((30,), "int32")
            T.copy(A[bx, 0:30], tile)
            some = T.any_of(tile)
            every = T.all_of(tile)
            B[bx, 0] = T.cast(some, "int32")
            B[bx, 1] = T.cast(every, "int32")

    a = np.zeros((4, 30), "int32")
    a[1, 17], a[2, :] = 3, 1
    b = poisoned((4, 2), "int32")
    compile_kernel(kernel, how)(a, b)
    np.testing.assert_array_equal(b, [[0, 0], [1, 0], [1, 1], [0, 0]])


# ------------------------------------------------------------------ effects
@pytest.mark.parametrize("how", HOW)
def test_atomics_from_many_ctas(how):
    @T.prim_func
    def kernel(
        A: T.Tensor((2000, 33), "float32"),
        Sum: T.Tensor((33,), "float32"),
        Count: T.Tensor((2,), "int32"),
        High: T.Tensor((33,), "float32"),
    ):
        with T.Kernel(2000, threads=64) as bx:
            T.atomic_add(Count[0], 1)
            for i in T.Parallel(33):
                T.atomic_add(Sum[i], A[bx, i])
                T.atomic_max(High[i], A[bx, i])
                T.atomic_add(Count[1], i)

    a = random((2000, 33))
    total, count, high = np.zeros(33, "float32"), np.zeros(2, "int32"), np.full(33, -np.inf, "float32")
    compile_kernel(kernel, how)(a, total, count, high)
    check(total, a.astype("float64").sum(0), 1e-3)
    np.testing.assert_array_equal(high, a.max(0))
    np.testing.assert_array_equal(count, [2000, 2000 * 33 * 32 // 2])


@pytest.mark.parametrize("how", HOW)
def test_atomic_returns_the_value_before(how):
    @T.prim_func
    def kernel(Next: T.Tensor((1,), "int32"), Out: T.Tensor((500,), "int32")):
        with T.Kernel(500, threads=32) as bx:  # noqa: F841
            for i in T.Parallel(1):
                slot = T.atomic_add(Next[i], 1, return_prev=True)
                Out[slot] = slot

    counter, out = np.zeros(1, "int32"), poisoned((500,), "int32")
    compile_kernel(kernel, how)(counter, out)
    assert counter[0] == 500
    np.testing.assert_array_equal(out, np.arange(500))


@pytest.mark.parametrize("how", HOW)
def test_print_and_assert(how, capfd):
    @T.prim_func
    def kernel(A: T.Tensor((3,), "float32"), n: T.int32):
        with T.Kernel(1, threads=32) as bx:  # noqa: F841
            tile = T.alloc_shared((3,), "float32")
            T.copy(A, tile)
            T.print(n, "n is 100%")
            T.print(tile)
            T.print(A[1] * 2.0)
            T.device_assert(n < 5, "n is too large")

    call = compile_kernel(kernel, how)
    call(np.array([1.5, -2.25, 3.0], "float32"), 4)
    text = capfd.readouterr().out
    assert text.splitlines() == ["n is 100% 4", "tile[0] = 1.5", "tile[1] = -2.25", "tile[2] = 3", "-4.5"]
    with pytest.raises(RuntimeError, match="n is too large"):
        call(np.zeros(3, "float32"), 5)


# ------------------------------------------------------------------ control flow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_loops_variables_and_conditions(how, count):
    @T.prim_func
    def kernel(
        A: T.Tensor((5, 20), "float32"),
        Keep: T.Tensor((5,), "int32"),
        n: T.int32,
        B: T.Tensor((20,), "float32"),
        C: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(1, threads=32) as bx:  # noqa: F841
            total = T.alloc_fragment((20,), "float32")
            row = T.alloc_shared((20,), "float32")
            kept = T.alloc_var("int32", init=0)
            T.clear(total)
            for k in T.Pipelined(n, num_stages=2):
                if Keep[k] != 0:
                    T.copy(A[k, 0:20], row)
                    for i in T.Parallel(20):
                        total[i] += row[i]
                    kept = kept + 1
            T.copy(total, B)
            C[0] = kept

    a, keep = random((5, 20)), np.array([1, 0, 1, 1, 0], "int32")
    b, c = poisoned((20,), "float32"), poisoned((1,), "int32")
    compile_kernel(kernel, how)(a, keep, count, b, c)
    check(b, a[:count][keep[:count] != 0].sum(0))
    assert c[0] == (keep[:count] != 0).sum()


@pytest.mark.parametrize("how", HOW)
def test_two_kernels_and_strided_tensor(how):
    rows, stride = T.dynamic("rows, stride")

    @T.prim_func
    def kernel(
        A: T.StridedTensor((rows, 24), (stride, 1), "float32"),
        Scratch: T.Tensor((rows, 24), "float32"),
        B: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=32) as bx:
            for i in T.Parallel(24):
                Scratch[bx, i] = A[bx, i] * 2.0
        with T.Kernel(rows, threads=32) as bx:
            row, out = T.alloc_fragment((24,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(Scratch[bx, 0:24], row)
            T.reduce_sum(row, out, dim=0)
            T.copy(out, B[bx : bx + 1])

    import tvm
    import tvm_ffi

    base = random((11, 40))
    scratch, b = poisoned((11, 24), "float32"), poisoned((11,), "float32")
    strided = tvm_ffi.from_dlpack(base[:, :24])
    from .harness import PIPELINES, host_target, lower_cpu, lower_reference

    target = host_target()
    lowered = lower_cpu(kernel, target) if how == "optimised" else lower_reference(kernel)
    built = tvm.compile(lowered.with_attr("global_symbol", "main"), target, tir_pipeline=PIPELINES[how == "optimised"])
    tensors = [tvm.runtime.tensor(scratch), tvm.runtime.tensor(b)]
    built["main"](strided, *tensors)
    check(tensors[1].numpy(), base[:, :24].sum(1) * 2)


@pytest.mark.parametrize("how", HOW)
def test_views_share_memory(how):
    @T.prim_func
    def kernel(A: T.Tensor((16, 32), "float32"), B: T.Tensor((32, 16), "float32"), C: T.Tensor((16, 32), "uint32")):
        with T.Kernel(1, threads=32) as bx:  # noqa: F841
            tile = T.alloc_shared((16, 32), "float32")
            T.copy(A, tile)
            other = T.reshape(tile, (32, 16))
            T.copy(other, B)
            bits = T.view(tile, dtype="uint32")
            for i, j in T.Parallel(16, 32):
                bits[i, j] = bits[i, j] ^ T.uint32(0x80000000)
            for i, j in T.Parallel(16, 32):
                tile[i, j] = tile[i, j] * 2.0
            T.copy(bits, C)

    a, b, c = random((16, 32)), poisoned((32, 16), "float32"), poisoned((16, 32), "uint32")
    compile_kernel(kernel, how)(a, b, c)
    np.testing.assert_array_equal(b, a.reshape(32, 16))
    np.testing.assert_array_equal(c.view("float32"), -2 * a)


@pytest.mark.parametrize("name", narrow_targets())
def test_narrower_vector_units(name):
    target = narrow_targets()[name]

    @T.prim_func
    def kernel(
        A: T.Tensor((50, 70), "bfloat16"),
        B: T.Tensor((70, 45), "bfloat16"),
        C: T.Tensor((50, 45), "float32"),
        D: T.Tensor((50,), "float32"),
    ):
        with T.Kernel(T.ceildiv(50, 32), threads=64) as bx:
            a, b = T.alloc_shared((32, 70), "bfloat16"), T.alloc_shared((70, 48), "bfloat16")
            acc, high = T.alloc_fragment((32, 48), "float32"), T.alloc_fragment((32,), "float32")
            T.copy(A[bx * 32, 0], a)
            T.copy(B[0:70, 0:48], b)
            T.gemm(a, b, acc, clear_accum=True)
            T.reduce_max(acc, high, dim=1)
            for i, j in T.Parallel(32, 48):
                acc[i, j] = T.exp2(acc[i, j] - high[i])
            T.copy(acc, C[bx * 32, 0])
            T.copy(high, D[bx * 32])

    a, b = random((50, 70), "bfloat16"), random((70, 45), "bfloat16")
    c, d = poisoned((50, 45), "float32"), poisoned((50,), "float32")
    compile_kernel(kernel, "optimised", target)(a, b, c, d)
    product = a.astype("float64") @ b.astype("float64")
    high = np.maximum(product.max(1), 0)  # the tile's padding columns are 0
    check(d, high, 1e-4)
    check(c, np.exp2(product - high[:, None]), 1e-4)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("symbolic", [False, True])
def test_more_than_two_to_the_31_elements(how, symbolic):
    """Attention over 65,536 tokens went wrong by 32-bit offsets elsewhere: the far rows must be the ones touched."""
    rows, columns = 70000, 32768
    n = T.dynamic("n") if symbolic else rows

    @T.prim_func
    def kernel(A: T.Tensor((n, columns), "int8"), B: T.Tensor((4, 64), "int8"), first: T.int32):
        with T.Kernel(4, threads=32) as bx:
            tile = T.alloc_shared((64,), "int8")
            T.copy(A[first + bx, columns - 64 : columns], tile)
            T.copy(tile, B[bx, 0:64])
            for i in T.Parallel(64):
                A[first + bx, i] = tile[i]

    a, b = np.zeros((rows, columns), "int8"), poisoned((4, 64), "int8")  # only the touched pages become real
    far = random((4, 64), "int8")
    a[-4:, -64:] = far
    call = compile_kernel(kernel, how)
    import tvm_ffi

    call(tvm_ffi.from_dlpack(a), b, rows - 4)
    np.testing.assert_array_equal(b, far)
    np.testing.assert_array_equal(a[-4:, :64], far)
    assert not a[:4, :64].any()


def test_assembly_of_elementwise_code_has_no_scalar_calls():
    """exp2 of a tile stays in vector registers: no call of the C library's exp2f."""
    import tvm

    from .harness import PIPELINES, host_target, lower_cpu

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=64) as bx:
            tile = T.alloc_fragment((64, 64), "float32")
            T.copy(A, tile)
            for i, j in T.Parallel(64, 64):
                tile[i, j] = T.exp2(tile[i, j])
            T.copy(tile, B)

    lowered = lower_cpu(kernel, host_target()).with_attr("global_symbol", "main")
    built = tvm.compile(lowered, host_target(), tir_pipeline=PIPELINES[True])
    assert "exp2f" not in built.mod.inspect_source("s")


@pytest.mark.parametrize("how", HOW)
def test_inner_loops_and_local_arrays(how):
    @T.prim_func
    def kernel(A: T.Tensor((40, 8), "float32"), B: T.Tensor((40, 8), "float32"), C: T.Tensor((40,), "float32")):
        with T.Kernel(1, threads=64) as bx:
            total = T.alloc_fragment((40,), "float32")
            T.clear(total)
            for i in T.Parallel(40):
                for k in T.serial(8):
                    total[i] += A[i, k] * A[i, k]
            for i in T.Parallel(40):
                for k in T.unroll(8):
                    if k % 2 == 0:
                        B[i, k] = A[i, k] / total[i]
                    else:
                        B[i, k] = A[i, 7 - k]
            T.copy(total, C)

    a, b, c = random((40, 8)), poisoned((40, 8), "float32"), poisoned((40,), "float32")
    compile_kernel(kernel, how)(a, b, c)
    total = (a * a).sum(1)
    check(c, total)
    check(b, np.where(np.arange(8) % 2 == 0, a / total[:, None], a[:, ::-1]))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ctas", [1, 3, 50])
def test_persistent_tiles_and_grid_panels(how, ctas):
    @T.prim_func
    def kernel(A: T.Tensor((70, 50), "float32"), B: T.Tensor((70, 50), "float32"), n: T.int32):
        with T.Kernel(n, threads=64) as bx:
            T.use_swizzle(4)
            tile = T.alloc_shared((16, 16), "float32")
            for i, j in T.Persistent([T.ceildiv(70, 16), T.ceildiv(50, 16)], n, bx):
                T.copy(A[i * 16, j * 16], tile)
                for x, y in T.Parallel(16, 16):
                    tile[x, y] = tile[x, y] + T.cast(i * 100 + j, "float32")
                T.copy(tile, B[i * 16, j * 16])

    a, b = random((70, 50)), poisoned((70, 50), "float32")
    compile_kernel(kernel, how)(a, b, ctas)
    check(b, a + np.arange(70)[:, None] // 16 * 100 + np.arange(50) // 16)


@pytest.mark.parametrize("how", HOW)
def test_while_and_uniform_memory(how):
    """Collatz: a loop whose condition reads a variable, values kept in shared and per-CTA memory."""

    @T.prim_func
    def kernel(Start: T.Tensor((30,), "int32"), Steps: T.Tensor((30,), "int32")):
        with T.Kernel(30, threads=32) as bx:
            value = T.alloc_var("int32", init=Start[bx])
            steps = T.alloc_var("int32", init=0)
            while value != 1:
                value = T.if_then_else(value % 2 == 0, value // 2, 3 * value + 1)
                steps = steps + 1
            Steps[bx] = steps

    def collatz(x):
        return 0 if x == 1 else 1 + collatz(x // 2 if x % 2 == 0 else 3 * x + 1)

    start, steps = np.arange(1, 31, dtype="int32"), poisoned((30,), "int32")
    compile_kernel(kernel, how)(start, steps)
    np.testing.assert_array_equal(steps, [collatz(int(x)) for x in start])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seed", range(6))
def test_masks_of_attention_shapes(how, seed):
    """Causal and window masks over ragged tiles: tiles inside, outside and across every edge."""
    generator = np.random.default_rng(seed)
    queries, keys = (int(x) for x in generator.integers(1, 90, 2))
    window, shift = int(generator.integers(1, 60)), int(generator.integers(-20, 20))

    @T.prim_func
    def kernel(S: T.Tensor((queries, keys), "bfloat16"), Out: T.Tensor((queries, keys), "bfloat16")):
        with T.Kernel(T.ceildiv(queries, 32), T.ceildiv(keys, 32), threads=64) as (bx, by):
            tile = T.alloc_fragment((32, 32), "float32")
            T.copy(S[bx * 32, by * 32], tile)
            for i, j in T.Parallel(32, 32):
                q, k = bx * 32 + i + shift, by * 32 + j
                tile[i, j] = T.if_then_else(q >= k and q - k < window and k < keys, tile[i, j], -T.infinity("float32"))
            T.copy(tile, Out[bx * 32, by * 32])

    s, out = random((queries, keys), "bfloat16"), poisoned((queries, keys), "bfloat16")
    compile_kernel(kernel, how)(s, out)
    q, k = np.arange(queries)[:, None] + shift, np.arange(keys)[None, :]
    want = np.where((q >= k) & (q - k < window), s.astype("float32"), -np.inf)
    np.testing.assert_array_equal(out.astype("float32"), want)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [1, 16, 45])
def test_bool_tensors_with_ragged_edges(how, n):
    @T.prim_func
    def kernel(M: T.Tensor((n,), "bool"), A: T.Tensor((48, n), "float32"), B: T.Tensor((48, n), "float32"),
               Not: T.Tensor((n,), "bool")):  # fmt: skip
        with T.Kernel(T.ceildiv(n, 16), threads=64) as bx:
            mask = T.alloc_shared((16,), "bool")
            T.copy(M[bx * 16], mask)
            for i, j in T.Parallel(48, 16):
                if mask[j]:
                    B[i, bx * 16 + j] = A[i, bx * 16 + j]
                else:
                    B[i, bx * 16 + j] = 0.0
            for j in T.Parallel(16):
                Not[bx * 16 + j] = not mask[j]

    m, a = rng.integers(0, 2, n).astype(bool), random((48, n))
    b, inverted = poisoned((48, n), "float32"), np.zeros(n, bool)
    compile_kernel(kernel, how)(m, a, b, inverted)
    np.testing.assert_array_equal(b, np.where(m, a, 0))
    np.testing.assert_array_equal(inverted, ~m)
