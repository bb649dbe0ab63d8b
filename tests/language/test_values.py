"""Value semantics: what a name stands for, when a value is taken, what cannot be rebound."""

import numpy as np
import pytest

import tvm_tile
import tvm_tile.language as T

from .harness import out, rand, run


def ints(*values):
    return np.array(values, "int32")


def test_swap_through_a_name():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            t = A[0]
            A[0] = A[1]
            A[1] = t

    a = ints(1, 2, 3, 4)
    run(kernel, a)
    assert a.tolist() == [2, 1, 3, 4]


def test_swap_in_every_iteration_of_parallel():
    @T.prim_func
    def kernel(A: T.Tensor((50,), "float32"), B: T.Tensor((50,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(50):
                t = A[i]
                A[i] = B[i]
                B[i] = t

    rng = np.random.default_rng(0)
    a, b = rand(rng, 50), rand(rng, 50)
    before = a.copy(), b.copy()
    run(kernel, a, b)
    np.testing.assert_array_equal(a, before[1])
    np.testing.assert_array_equal(b, before[0])


def test_tuple_assignment_takes_all_values_first():
    @T.prim_func
    def kernel(A: T.Tensor((6,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            A[0], A[1] = A[1], A[0]
            x, A[2] = A[2], A[3] + 10
            A[3] = x
            (a, b), c = (A[4], A[5]), 7
            A[4], A[5] = b + c, a

    a = ints(1, 2, 3, 4, 5, 6)
    run(kernel, a)
    assert a.tolist() == [2, 1, 14, 3, 13, 5]


def test_several_targets_get_one_value():
    @T.prim_func
    def kernel(A: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            A[0] = A[1] = A[0] + 1

    a = ints(1, 2, 3)
    run(kernel, a)
    assert a.tolist() == [2, 2, 3]


def test_variable_is_read_and_written_by_its_name():
    @T.prim_func
    def kernel(A: T.Tensor((5,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32) as bx:
            total = T.alloc_var("int32", init=0)
            last: T.int32 = 100
            for i in range(n):
                before = total
                total = total + A[i]
                total += before * 0
                last = before
            A[0] = total
            A[1] = last
            x = total  # a value: later writes do not change it
            total = 0
            A[2] = x
            A[3] = total

    a = ints(1, 2, 3, 4, 5)
    run(kernel, a, 5)
    assert a.tolist() == [15, 10, 15, 0, 5]


def test_while_on_a_variable():
    @T.prim_func
    def kernel(A: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            n = T.alloc_var("int32", init=A[0])
            steps = T.alloc_var("int32", init=0)
            while n != 1:
                if n % 2 == 0:
                    n = n // 2
                else:
                    n = 3 * n + 1
                steps = steps + 1
            A[1] = steps

    a = ints(27, 0)
    run(kernel, a)
    assert a[1] == 111


@pytest.mark.parametrize("n", [0, 3, True])
def test_if_on_a_python_value_is_decided_at_parse_time(n):
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            if n:
                x = 1
            else:
                x = 2
            # the chosen branch is straight-line code
            A[0] = x
            A[1] = 10 if n else 20
            A[2] = n and 5
            A[3] = x if n or x > 7 else x + 1

    a = out(4, "int32")
    run(kernel, a)
    assert a.tolist() == [1 if n else 2, 10 if n else 20, (n and 5), 1 if n else 3]
    assert "if " not in kernel.script().split("sblock_attr")[-1]


def test_the_branch_not_taken_is_not_even_evaluated():
    table = {}

    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            A[0] = table["missing"] if table else 1
            if table and table["missing"] > 0:
                A[1] = 1
            for i in range(1, 4):
                A[i] = i

    a = out(4, "int32")
    run(kernel, a)
    assert a.tolist() == [1, 1, 2, 3]


def test_run_time_conditions():
    @T.prim_func
    def kernel(A: T.Tensor((12,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(12):
                if 2 <= i < 5:
                    A[i] = 1
                elif i == 7 or (i > 9 and not i == 11):
                    A[i] = 2
                else:
                    A[i] = 3 if i % 2 == 0 else T.if_then_else(i < n, 4, 5)

    a = out(12, "int32")
    run(kernel, a, 8)
    expected = [
        1 if 2 <= i < 5 else 2 if i == 7 or i == 10 else 3 if i % 2 == 0 else (4 if i < 8 else 5) for i in range(12)
    ]
    assert a.tolist() == expected


def test_augmented_assignment_of_elements():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(1, threads=32) as bx:
            A[0, 0] += 2
            for i, j in T.Parallel(4, 4):
                A[i, j] *= 2.0
                A[i, j] -= T.cast(i, "float32")
                x = A[i, j]
                x /= 4.0
                A[i, j] = x

    a = rand(np.random.default_rng(0), (4, 4))
    expected = a.copy()
    expected[0, 0] += 2
    expected = (expected * 2 - np.arange(4, dtype="float32")[:, None]) / 4
    run(kernel, a)
    np.testing.assert_allclose(a, expected, rtol=1e-6)


def test_python_data_unrolls_at_parse_time():
    scales, names = [2.0, 3.0, 5.0], {"a": 1, "b": 2}

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            total = 0.0
            for n, s in enumerate(scales):
                total = total + s  # straight-line code: rebinding is fine
                A[n] = total
            for (name, value), other in zip(names.items(), (10, 20), strict=True):
                A[2 + value] = value * other
            squares = [i * i for i in (1, 2, 3)]
            A[5] = sum(squares)
            A[6] = (lambda x: x + 1)(squares[-1])
            A[7] = len("abc") + max(1, 2)

    a = out(8)
    run(kernel, a)
    assert a.tolist() == [2, 5, 10, 10, 40, 14, 10, 5]


def test_ranges_of_expressions_and_steps():
    @T.prim_func
    def kernel(A: T.Tensor((6, 40), "int32"), lo: T.int32, hi: T.int32):
        with T.Kernel(1, threads=32) as bx:
            T.clear(A)
            for i in range(lo, hi):
                A[0, i] = 1
            for i in range(lo, hi, 3):
                A[1, i] = 1
            for i in range(hi, lo, -2):
                A[2, i] = 1
            for i in T.serial(2, 30, step=4):
                A[3, i] = 1
            for i in T.unroll(5):
                A[4, i] = i
            for i, j in T.grid(lo, 2):
                A[5, i * 2 + j] = i + j + 1

    for lo, hi in ((3, 17), (5, 5), (9, 2)):
        a = out((6, 40), "int32")
        run(kernel, a, lo, hi)
        expected = np.zeros((6, 40), "int32")
        for row, indices in enumerate((range(lo, hi), range(lo, hi, 3), range(hi, lo, -2), range(2, 30, 4))):
            expected[row, list(indices)] = 1
        expected[4, :5] = range(5)
        expected[5, : 2 * lo] = [i + j + 1 for i in range(lo) for j in range(2)]
        np.testing.assert_array_equal(a, expected)


def test_loop_bounds_from_memory_are_taken_once():
    @T.prim_func
    def kernel(A: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.serial(A[0]):
                A[0] = 100
                A[1] = A[1] + 1

    a = ints(3, 0, 0)
    run(kernel, a)
    assert a.tolist() == [100, 3, 0]


def test_alias_of_a_buffer_and_of_index_arithmetic():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=32) as bx:
            source = A
            base = bx * 8
            tile = T.alloc_shared((8,), "float32")
            same = tile
            T.copy(source[base], same)
            for i in T.Parallel(8):
                j = 7 - i
                B[base + i] = tile[j]

    a, b = rand(np.random.default_rng(0), 32), out(32)
    run(kernel, a, b)
    np.testing.assert_array_equal(b.reshape(4, 8), a.reshape(4, 8)[:, ::-1])


def test_a_tuple_of_buffers():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            tiles = [T.alloc_shared((8,), "float32") for _ in range(3)]
            for n, tile in enumerate(tiles):
                T.copy(A, tile)
                for i in T.Parallel(8):
                    tile[i] = tile[i] + float(n)
            for i in T.Parallel(8):
                B[i] = tiles[0][i] + tiles[1][i] + tiles[2][i]

    a, b = rand(np.random.default_rng(0), 8), out(8)
    run(kernel, a, b)
    np.testing.assert_allclose(b, 3 * a + 3, rtol=1e-6)
    assert {"tiles_0", "tiles_1", "tiles_2"} <= {x.name for x in tvm_tile.ir.kernels_of(kernel)[0].buffers}


def test_per_thread_scratch_inside_parallel():
    @T.prim_func
    def kernel(A: T.Tensor((6, 4), "float32"), B: T.Tensor((6,), "float32")):
        with T.Kernel(1, threads=32) as bx:
            for i in T.Parallel(6):
                row = T.alloc_local((4,), "float32")
                best = T.alloc_local((1,), "float32")
                best[0] = -T.infinity("float32")
                for j in range(4):
                    row[j] = A[i, j] * A[i, j]
                for j in range(4):
                    best[0] = T.max(best[0], row[j])
                B[i] = best[0]

    a, b = rand(np.random.default_rng(0), (6, 4)), out(6)
    run(kernel, a, b)
    np.testing.assert_allclose(b, (a * a).max(1), rtol=1e-6)


def test_uniform_local_array():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), B: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            table = T.alloc_local((4,), "int32")
            for k in range(4):
                table[k] = A[k] * 2
            for i in T.Parallel(8):
                B[i] = table[i % 4] + table[1]

    a, b = ints(5, 6, 7, 8), out(8, "int32")
    run(kernel, a, b)
    assert b.tolist() == [22, 24, 26, 28] * 2


def test_bounds_of_a_named_slice_are_taken_where_it_is_named():
    @T.macro
    def move(part, index, target):
        index[0] = 0
        T.copy(part, target)

    @T.prim_func
    def kernel(A: T.Tensor((8, 2), "int32"), Index: T.Tensor((2,), "int32"), B: T.Tensor((2, 2), "int32")):
        with T.Kernel(1, threads=32) as bx:
            row = A[Index[0], :]
            Index[0] = 1
            T.copy(row, B[0, :])
            move(A[Index[1], 0:2], Index, B[1, :])

    a, b = np.arange(16, dtype="int32").reshape(8, 2), out((2, 2), "int32")
    run(kernel, a, ints(5, 7), b)
    np.testing.assert_array_equal(b, a[[5, 7]])


def test_truth_of_numbers_in_conditions():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32"), x: T.float32, n: T.int32):
        with T.Kernel(1, threads=32) as bx:
            if n and A[0] > 3:
                A[1] = 1
            if not n or x:
                A[2] = 1
            A[3] = 7 if n else 8
            while A[0]:
                A[0] -= 1

    for x, n in ((0.0, 0), (0.5, 2), (0.0, 1)):
        a = ints(5, 0, 0, 0)
        run(kernel, a, x, n)
        assert a.tolist() == [0, int(n != 0), int(n == 0 or x != 0), 7 if n else 8]


def test_unused_values_leave_no_trace():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "int32")):
        with T.Kernel(1, threads=32) as bx:
            unused = A[0]
            also = unused + 1
            A[1] = 5

    assert "let" not in kernel.script()


def test_scalars_of_every_kind():
    @T.prim_func
    def kernel(A: T.Tensor((4,), "float32"), n: T.int32, wide: T.int64, x: T.float32, flag: T.bool):
        with T.Kernel(1, threads=32) as bx:
            A[0] = n
            A[1] = T.cast(wide // 2, "float32")
            A[2] = x
            A[3] = T.if_then_else(flag, 1, 2)

    a = out(4)
    run(kernel, a, 3, 2**33, 0.5, True)
    assert a.tolist() == [3, 2**32, 0.5, 1]


@pytest.mark.parametrize(
    "dtype, value",
    [
        ("bool", True),
        ("int8", -100),
        ("uint8", 200),
        ("int16", -30000),
        ("uint16", 60000),
        ("int32", -(2**31)),
        ("uint32", 2**31 + 128),
        ("int64", -(2**40)),
        ("uint64", 2**62 + 2**40),
        ("float32", 0.1),
        ("float64", 1 / 3),
    ],
)
def test_scalars_of_every_dtype(dtype, value):
    @T.prim_func
    def kernel(A: T.Tensor((2,), "float64"), x: getattr(T, dtype), n: T.int32):
        with T.Kernel(n, threads=32) as bx:
            A[bx] = T.cast(x, "float64")

    a = out(2, "float64")
    run(kernel, a, value, 2)
    want = float(np.float32(value)) if dtype == "float32" else float(value)
    assert a.tolist() == [want, want]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_narrow_float_scalars_are_refused(dtype):
    with pytest.raises(tvm_tile.TileTypeError, match=f"x: a scalar parameter cannot have dtype {dtype}") as error:

        @T.prim_func
        def kernel(A: T.Tensor((4,), "float32"), x: getattr(T, dtype)):
            with T.Kernel(1, threads=32) as bx:
                A[0] = T.cast(x, "float32")

    assert "declare x: T.float32" in str(error.value)


def test_infinity_of_float8_is_refused():
    """What is stored as float8 saturates, so that an infinity would silently become the largest value."""
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        with pytest.raises(tvm_tile.TileTypeError, match=f"{dtype} has no infinity"):
            T.infinity(dtype)
    with pytest.raises(tvm_tile.TileTypeError, match="float8_e5m2 has no infinity"):

        @T.prim_func
        def kernel(A: T.Tensor((50,), "float8_e5m2"), B: T.Tensor((64,), "float8_e5m2")):
            with T.Kernel(1, threads=32) as bx:
                T.annotate_safe_value({A: float("-inf")})
                T.copy(A[0], B)
