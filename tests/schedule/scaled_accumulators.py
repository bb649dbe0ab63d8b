"""Accumulators that a loop scales by factors, for the tests of the rule and of its code."""

import tvm_tile
import tvm_tile.language as T

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
