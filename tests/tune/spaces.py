"""Ops with small kernels whose configurations misbehave in known ways."""

from __future__ import annotations

from tvm_tile.ops.footprint import Footprint, Tile
from tvm_tile.ops.registry import OpSpec, poisoned, random_tensor


def add_kernel(n: int, block: int, offset: float, threads: int = 64):
    """``B = A + offset``."""
    import tvm_tile.language as T

    @T.prim_func
    def add(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=threads) as bx:
            for i in T.Parallel(block):
                B[bx * block + i] = A[bx * block + i] + T.float32(offset)

    return add


class Add(OpSpec):
    """``B = A + 1`` with a second decision, ``mode``, that says how a configuration behaves."""

    name = "tuning_test_add"
    doc = "adds one"
    shape_params = {"n": (int, 1000, "elements"), "seed": (int, 0, "told apart in databases")}
    dtypes = ["float32"]
    sizes = ("n",)
    tunables = {"block": [8, 16, 32, 64, 128], "mode": ["good", "illegal", "hangs", "crashes", "wrong", "refused"]}
    coupled = (("block", "mode"),)
    cpu_tunables = ("block", "mode")
    modes = ("good",)

    def defaults(self, shape, dtype, target):
        return {"block": 32, "mode": "good"}

    def choices(self, shape, dtype, target):
        return {"block": self.tunables["block"], "mode": list(self.modes)}

    def illegal(self, shape, dtype, target, config):
        return "test rule: declared illegal" if config["mode"] == "illegal" else None

    def footprint(self, shape, dtype, target, config):
        block = config["block"]
        return Footprint(64, 0, (), (Tile("tile", block, "float32"),), (), -(-shape["n"] // block), 1, 4 * block, 0)

    def build(self, shape, dtype, target, block, mode):
        import os
        import time

        from tvm_tile.errors import TileShapeError

        if mode == "hangs":
            time.sleep(3600)
        if mode == "crashes":
            os.abort()
        if mode == "refused":
            raise TileShapeError("test compiler: no such tile")
        return add_kernel(shape["n"], block, 2.0 if mode == "wrong" else 1.0)

    def arguments(self, shape, dtype, generator):
        size = (shape["n"],)
        return [random_tensor(size, dtype, generator), poisoned(size, dtype)], [1]

    def expected(self, shape, dtype, tensors):
        return [tensors[0].double() + 1.0]

    def tolerance(self, shape, dtype):
        return 1e-6, 1e-6

    def flops(self, shape):
        return 0

    def bytes(self, shape, dtype):
        return 8 * self.complete(shape)["n"]


class MeasuresBadly(Add):
    """Kernels are fine, but running them hangs or kills the process: their inputs are made where they are measured."""

    name = "tuning_test_runs"

    def build(self, shape, dtype, target, block, mode):
        return add_kernel(shape["n"], block, 1.0)

    options = {"seed": [1, 2, 3]}  # 1 is fine, 2 hangs, 3 crashes

    def choices(self, shape, dtype, target):
        return {"block": [32, 64], "seed": self.options["seed"]}

    def complete(self, shape=None):
        out = super().complete(shape)
        out["seed"] = out["seed"] or 1
        return out

    def arguments(self, shape, dtype, generator):
        import ctypes
        import time

        if shape["seed"] == 2:
            time.sleep(3600)
        if shape["seed"] == 3:
            ctypes.string_at(0)
        return super().arguments(shape, dtype, generator)
