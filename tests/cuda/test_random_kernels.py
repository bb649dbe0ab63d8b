"""Kernels of random structure and sizes: attention-like and recurrent ones, beside the reference lowering on the CPU.

Each seed draws tile sizes, threads, stages, dtypes and what the loop does: branches around iterations and on the last
tile, a second product into the scores, operands in registers or shared memory, stores inside of the loop, a loop around
the loop. What does not fit the machine is refused with an error of the user's, and counts as passed.
"""

import dataclasses
import random

import pytest
import torch

import tvm_tile
import tvm_tile.language as T
from tvm_tile.errors import TileError

from .harness import generator, verify

SEEDS = [*range(6), *(pytest.param(n, marks=pytest.mark.heavy) for n in range(6, 40))]


@dataclasses.dataclass
class Attention:
    """What a kernel like attention with an online softmax does."""

    width: int
    columns: int
    block: int
    stages: int
    dtype: str
    keys: int
    length: int
    rows: int
    threads: int
    second: bool
    bias: bool
    clears: bool
    registers: bool
    masked: bool
    rounds: int
    dumps: bool
    staged: bool

    @staticmethod
    def draw(rng: random.Random) -> "Attention":
        block = rng.choice([16, 32, 48, 64, 128])
        keys = rng.choice([3 * block + 5, 5 * block, 2 * block - 1, 7, block])
        rows, threads = rng.choice([(64, 128), (128, 256), (128, 256), (192, 384), (128, 128), (64, 256), (64, 256)])

        def chance(share: float) -> bool:
            return rng.random() < share

        return Attention(
            width=rng.choice([64, 96, 128, 160, 256]), columns=rng.choice([32, 64, 96, 128]), block=block,
            stages=rng.choice([2, 2, 3, 4]), dtype=rng.choice(["float16", "bfloat16"]), keys=keys,
            length=rng.choice([keys, max(keys - 3, 0), keys // 2, 1, 0]), rows=rows, threads=threads,
            second=chance(0.5), bias=chance(0.4), clears=chance(0.5), registers=chance(0.4), masked=chance(0.4),
            rounds=rng.choice([1, 1, 2]), dumps=chance(0.3), staged=chance(0.3),
        )  # fmt: skip

    def kernel(self):
        c, dtype, rows, block = self, self.dtype, self.rows, self.block
        policy = T.GemmWarpPolicy.FullRow if c.registers else T.GemmWarpPolicy.Square

        @T.prim_func
        def main(
            Q: T.Tensor((rows, c.width), dtype),
            Q2: T.Tensor((rows, 48), dtype),
            K: T.Tensor((c.keys, c.width), dtype),
            K2: T.Tensor((c.keys, 48), dtype),
            V: T.Tensor((c.keys, c.columns), dtype),
            Bias: T.Tensor((c.keys,), "float32"),
            Mask: T.Tensor((64,), "int32"),
            Out: T.Tensor((2, rows, c.columns), "float32"),
            Lse: T.Tensor((2, rows), "float32"),
            Dump: T.Tensor((2, c.keys + 128, rows), dtype),
            length: T.int32,
        ):
            with T.Kernel(2, threads=c.threads) as bx:
                q, k = T.alloc_shared((rows, c.width), dtype), T.alloc_shared((block, c.width), dtype)
                q2, k2 = T.alloc_shared((rows, 48), dtype), T.alloc_shared((block, 48), dtype)
                v, p = T.alloc_shared((block, c.columns), dtype), T.alloc_shared((rows, block), dtype)
                s, acc = T.alloc_fragment((rows, block), "float32"), T.alloc_fragment((rows, c.columns), "float32")
                high, before = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
                scale, part = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
                total, narrow = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows, block), dtype)
                T.copy(Q, q)
                if c.second:
                    T.copy(Q2, q2)
                T.clear(acc)
                T.clear(total)
                T.fill(high, -1e30)
                tiles = T.ceildiv(length, block)
                half = T.ceildiv(tiles, 2)
                first = bx * half
                for turn in T.serial(c.rounds):
                    for step in T.Pipelined(T.max(T.min(half, tiles - first), 0), num_stages=c.stages):
                        active = True
                        if c.masked:
                            active = Mask[(first + step + turn) % 64] != 0
                        if active:
                            start = (first + step) * block
                            T.copy(K[start, 0], k)
                            if c.second:
                                T.copy(K2[start, 0], k2)
                            T.copy(V[start, 0], v)
                            T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=policy)
                            if c.second:
                                T.gemm(q2, k2, s, transpose_B=True, policy=policy)
                            if c.bias:
                                for i, j in T.Parallel(rows, block):
                                    s[i, j] += Bias[start + j]
                            if start + block > length:
                                for i, j in T.Parallel(rows, block):
                                    s[i, j] = T.if_then_else(start + j < length, s[i, j], -1e30)
                                if c.clears:
                                    for i, j in T.Parallel(block, c.columns):
                                        if start + i >= length:
                                            v[i, j] = 0
                            if c.dumps:
                                for i, j in T.Parallel(rows, block):
                                    Dump[bx, start + j, i] = T.cast(T.max(s[i, j], -100), dtype)
                            T.copy(high, before)
                            T.reduce_max(s, high, dim=1, clear=False)
                            for i in T.Parallel(rows):
                                scale[i] = T.exp2(before[i] - high[i])
                            for i, j in T.Parallel(rows, block):
                                s[i, j] = T.exp2(s[i, j] - high[i])
                            T.reduce_sum(s, part, dim=1)
                            if c.registers:
                                T.copy(s, narrow)
                            else:
                                T.copy(s, p)
                            for i in T.Parallel(rows):
                                total[i] = total[i] * scale[i] + part[i]
                            for i, j in T.Parallel(rows, c.columns):
                                acc[i, j] *= scale[i]
                            if c.registers:
                                T.gemm(narrow, v, acc, policy=policy)
                            else:
                                T.gemm(p, v, acc)
                for i, j in T.Parallel(rows, c.columns):
                    acc[i, j] = T.if_then_else(total[i] == 0, 0, acc[i, j] / total[i])
                if c.staged:
                    out = T.alloc_shared((rows, c.columns), "float32")
                    T.copy(acc, out)
                    T.copy(out, Out[bx, :, :])
                else:
                    T.copy(acc, Out[bx, :, :])
                for i in T.Parallel(rows):
                    total[i] = T.if_then_else(total[i] == 0, 0, T.log2(total[i]) + high[i])
                T.copy(total, Lse[bx, :])

        return main

    def arguments(self, seed: int):
        """Arguments, and the positions of what is written."""
        g, kind = generator(seed), getattr(torch, self.dtype)
        shapes = [(self.rows, self.width), (self.rows, 48), (self.keys, self.width), (self.keys, 48)]
        tensors = [(torch.randn(*shape, generator=g) / 4).to(kind) for shape in [*shapes, (self.keys, self.columns)]]
        if self.clears:
            tensors[4][self.length :] = float("nan")
        tensors += [torch.randn(self.keys, generator=g), torch.randint(0, 2, (64,), generator=g, dtype=torch.int32)]
        tensors += [torch.full((2, self.rows, self.columns), torch.nan), torch.full((2, self.rows), torch.nan)]
        dump = torch.zeros(2, self.keys + 128, self.rows, dtype=kind)  # not all of it is written
        return [*tensors, dump, self.length], [7, 8, 9]


@dataclasses.dataclass
class Recurrence:
    """What chunked linear attention does: a state in registers that every chunk reads, decays and adds to."""

    chunk: int
    width: int
    columns: int
    rows: int
    length: int
    threads: int
    dtype: str
    stages: int
    decays: bool
    staged: bool
    sums: bool

    @staticmethod
    def draw(rng: random.Random) -> "Recurrence":
        chunk = rng.choice([32, 64, 128])
        rows = rng.choice([3 * chunk, 2 * chunk + 5, chunk - 3, chunk])
        return Recurrence(
            chunk=chunk, width=rng.choice([32, 64, 128]), columns=rng.choice([32, 48, 64, 128]), rows=rows,
            length=rng.choice([rows, rows, max(rows - chunk, 0), 0]), threads=rng.choice([128, 256]),
            dtype=rng.choice(["float16", "bfloat16"]), stages=rng.choice([0, 1, 2, 3]), decays=rng.random() < 0.5,
            staged=rng.random() < 0.5, sums=rng.random() < 0.5,
        )  # fmt: skip

    def kernel(self):
        c, dtype, chunk = self, self.dtype, self.chunk

        @T.prim_func
        def main(
            Q: T.Tensor((2, c.rows, c.width), dtype),
            K: T.Tensor((2, c.rows, c.width), dtype),
            V: T.Tensor((2, c.rows, c.columns), dtype),
            Decay: T.Tensor((2, c.rows), "float32"),
            Out: T.Tensor((2, c.rows, c.columns), "float32"),
            State: T.Tensor((2, c.width, c.columns), "float32"),
            Highest: T.Tensor((2, c.rows), "float32"),
            n: T.int32,
        ):
            with T.Kernel(2, threads=c.threads) as bx:
                q, k = T.alloc_shared((chunk, c.width), dtype), T.alloc_shared((chunk, c.width), dtype)
                v, p = T.alloc_shared((chunk, c.columns), dtype), T.alloc_shared((chunk, chunk), dtype)
                narrow, out = T.alloc_shared((c.width, c.columns), dtype), T.alloc_shared((chunk, c.columns), "float32")
                s, o = T.alloc_fragment((chunk, chunk), "float32"), T.alloc_fragment((chunk, c.columns), "float32")
                state = T.alloc_fragment((c.width, c.columns), "float32")
                sums, highest = T.alloc_fragment((chunk,), "float32"), T.alloc_fragment((chunk,), "float32")
                T.clear(state)
                T.clear(highest)
                for step in T.Pipelined(T.ceildiv(n, chunk), num_stages=c.stages):
                    T.copy(Q[bx, step * chunk, 0], q)
                    T.copy(K[bx, step * chunk, 0], k)
                    T.copy(V[bx, step * chunk, 0], v)
                    T.copy(state, narrow)
                    T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                    for i, j in T.Parallel(chunk, chunk):
                        s[i, j] = T.if_then_else(i >= j, s[i, j], 0)
                    if c.sums:
                        T.reduce_sum(s, sums, dim=1)
                        for i in T.Parallel(chunk):
                            highest[i] = T.max(highest[i], sums[i])
                    T.copy(s, p)
                    T.gemm(q, narrow, o, clear_accum=True)
                    T.gemm(p, v, o)
                    if c.decays:
                        for i, j in T.Parallel(c.width, c.columns):
                            state[i, j] *= Decay[bx, step]
                    T.gemm(k, v, state, transpose_A=True)
                    if c.staged:
                        T.copy(o, out)
                        T.copy(out, Out[bx, step * chunk : step * chunk + chunk, :])
                    else:
                        T.copy(o, Out[bx, step * chunk : step * chunk + chunk, :])
                    if c.sums:
                        T.copy(highest, Highest[bx, step * chunk : step * chunk + chunk])
                T.copy(state, State[bx, :, :])

        return main

    def arguments(self, seed: int):
        """Arguments, and the positions of what is written."""
        g, kind = generator(seed), getattr(torch, self.dtype)
        shapes = [(2, self.rows, self.width), (2, self.rows, self.width), (2, self.rows, self.columns)]
        tensors = [(torch.randn(*shape, generator=g) / 8).to(kind) for shape in shapes]
        tensors += [torch.rand(2, self.rows, generator=g), torch.zeros(2, self.rows, self.columns)]
        tensors += [torch.zeros(2, self.width, self.columns), torch.zeros(2, self.rows)]
        return [*tensors, self.length], [4, 5, 6]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", [Attention, Recurrence], ids=["attention", "recurrence"])
def test_random_kernels(device, family, seed):
    case = family.draw(random.Random(f"{family.__name__} {seed}"))
    func = case.kernel()
    try:
        kernel = device.compile(func)
    except TileError as error:
        assert "internal" not in str(error).lower(), str(error)
        pytest.skip(f"refused: {error.args[0].splitlines()[0]}")
    args, written = case.arguments(seed)
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    tvm_tile.compile(func, "llvm", lowering="reference", cache=False)(*want)
    # rounding to the narrow dtype of probabilities and of stored scores, once at another place
    verify(kernel, args, {n: want[n] for n in written}, (2e-2, 2e-2), undefined=False)


OTHERS = (pytest.param(n, marks=pytest.mark.slow) for n in (17, 22, 24, 26, 28, 32, 39))


@pytest.mark.parametrize("seed", [15, 20, *OTHERS])
def test_products_are_not_serialised(seed):
    """ptxas finds no accumulator touched before its product is waited for."""
    case = Attention.draw(random.Random(f"Attention {seed}"))
    warnings = tvm_tile.compile(case.kernel(), "sm_90", cache=False).resources.warnings
    assert [w for w in warnings if "serialized" in w] == []
