"""Plain TensorIR and tile kernels that the runtime's tests compile."""

from tvm.script import tirx as S


def scaled_add(n=128, dtype="float32"):
    """C[i, j] = A[i, j] + B[j] * s with a symbolic number of rows."""

    @S.prim_func(s_tir=True)
    def scaled_add(a: S.handle, B: S.Buffer((n,), dtype), s: S.int32, c: S.handle):
        m = S.int64()
        A = S.match_buffer(a, (m, n), dtype)
        C = S.match_buffer(c, (m, n), dtype)
        for i, j in S.grid(m, n):
            with S.sblock("add"):
                vi, vj = S.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + B[vj] * S.Cast(dtype, s)

    return scaled_add


def doubled_columns():
    """B[i, j] = A[i, j // 2]: a size that is an expression of a symbolic one."""

    @S.prim_func(s_tir=True)
    def doubled_columns(a: S.handle, b: S.handle):
        m = S.int64()
        A = S.match_buffer(a, (3, m), "float32")
        B = S.match_buffer(b, (3, m * 2), "float32")
        for i, j in S.grid(3, m * 2):
            with S.sblock("copy"):
                vi, vj = S.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj // 2]

    return doubled_columns


def copy(n, dtype):
    """B = A."""

    @S.prim_func(s_tir=True)
    def copy(A: S.Buffer((n,), dtype), B: S.Buffer((n,), dtype)):
        for i in S.serial(n):
            with S.sblock("copy"):
                vi = S.axis.spatial(n, i)
                B[vi] = A[vi]

    return copy


def constant(value):
    """B = A + value, to tell kernels apart by a float."""

    @S.prim_func(s_tir=True)
    def constant(A: S.Buffer((16,), "float32"), B: S.Buffer((16,), "float32")):
        for i in S.serial(16):
            with S.sblock("add"):
                vi = S.axis.spatial(16, i)
                B[vi] = A[vi] + S.float32(value)

    return constant


def gpu_add(blocks=4):
    """A thread-bound kernel: B = A / 3 over blocks of 256 threads."""
    n = blocks * 256

    @S.prim_func(s_tir=True)
    def gpu_add(A: S.Buffer((n,), "float32"), B: S.Buffer((n,), "float32")):
        for i in S.thread_binding(blocks, thread="blockIdx.x"):
            for j in S.thread_binding(256, thread="threadIdx.x"):
                with S.sblock("add"):
                    vi = S.axis.spatial(n, i * 256 + j)
                    B[vi] = A[vi] / S.float32(3)

    return gpu_add


def tile_gemm(m, n, k, block=32, dtype="float32"):
    """C = A @ B.T as a tile kernel; ``m`` may be None for a symbolic size that must be a multiple of 4."""
    import tvm_tile.language as T

    if m is not None:

        @T.prim_func
        def tile_gemm(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), C: T.Tensor((m, n), dtype)):
            with T.Kernel(T.ceildiv(n, block), T.ceildiv(m, block), threads=128) as (bx, by):
                A_shared = T.alloc_shared((block, block), dtype)
                B_shared = T.alloc_shared((block, block), dtype)
                acc = T.alloc_fragment((block, block), "float32")
                T.clear(acc)
                for ko in T.Pipelined(T.ceildiv(k, block), num_stages=2):
                    T.copy(A[by * block, ko * block], A_shared)
                    T.copy(B[bx * block, ko * block], B_shared)
                    T.gemm(A_shared, B_shared, acc, transpose_B=True)
                T.copy(acc, C[by * block, bx * block])

        return tile_gemm

    rows = T.dynamic("rows")

    @T.prim_func
    def tile_rows(A: T.Tensor((rows, n), dtype), C: T.Tensor((rows, n), dtype)):
        T.assume(rows % 4 == 0)
        with T.Kernel(T.ceildiv(rows, 4), threads=32) as bx:
            tile = T.alloc_shared((4, n), dtype)
            T.copy(A[bx * 4, 0], tile)
            for i, j in T.Parallel(4, n):
                C[bx * 4 + i, j] = tile[i, j] * 2

    return tile_rows
