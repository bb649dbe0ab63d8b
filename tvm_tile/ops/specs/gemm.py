"""What the tools know of ``gemm``."""

from __future__ import annotations

import math

from tvm_tile.language import GemmWarpPolicy

from ...errors import TileError
from ..footprint import Footprint, Tile, cdiv
from ..gemm import default_tiles, gemm
from ..registry import OpSpec, poisoned, random_tensor, torch_dtype

__all__ = ["Gemm"]


class Gemm(OpSpec):
    """Matrix product."""

    name = "gemm"
    doc = "matrix product C = op(A) op(B) (+ bias), ragged sizes, transposes, split-K"
    shape_params = {
        "m": (int, 1024, "rows of C"),
        "n": (int, 1024, "columns of C"),
        "k": (int, 1024, "length of the sums"),
        "trans_a": (bool, False, "A is stored (k, m)"),
        "trans_b": (bool, True, "B is stored (n, k)"),
        "bias": (bool, False, "add a row vector"),
        "scaled": (bool, False, "multiply by a factor of A and one of B"),
        "split_k": (int, 1, "slices of K that run in parallel; 0 leaves it to the tuner (1 untuned)"),
    }
    dtypes = ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"]
    tunables = {
        "block_M": [32, 64, 128, 256, 512],
        "block_N": [32, 64, 128, 192, 256],
        "block_K": [16, 32, 64, 128, 256, 512],
        "num_stages": [0, 2, 3, 4, 6, 8],
        "threads": [128, 256, 384],
        "policy": [GemmWarpPolicy.Square, GemmWarpPolicy.FullRow, GemmWarpPolicy.FullCol],
        "panel": [1, 4, 8, 16],
    }
    sizes = ("m", "n", "k")
    options = {"split_k": [1, 2, 4, 8, 16]}
    coupled = (
        ("block_M", "block_N"),
        ("block_K", "num_stages"),
        ("block_M", "threads"),
        ("block_N", "threads"),
        ("block_N", "policy"),
        ("split_k", "block_K"),
    )

    def complete(self, shape=None):
        """Shape with split_k resolved."""
        out = super().complete(shape)
        out["split_k"] = out["split_k"] or 1
        return out

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.gemm.default_tiles`."""
        tiles = default_tiles(shape["m"], shape["n"], shape["k"], dtype, target)
        return {**tiles, "policy": GemmWarpPolicy.Square, "panel": 8}

    def extents(self, shape):
        """Rows, columns and length of a slice."""
        return {"block_M": shape["m"], "block_N": shape["n"], "block_K": max(32, shape["k"])}

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA of the product; the kernel that adds slices is small."""
        bm, bn, bk = config["block_M"], config["block_N"], config["block_K"]
        accum = "int32" if dtype == "int8" else "float32"
        a, b = Tile("A_shared", bm * bk, dtype, staged=True), Tile("B_shared", bk * bn, dtype, staged=True)
        return Footprint(
            threads=config["threads"],
            stages=config["num_stages"],
            shared=(a, b),
            fragments=(Tile("C_local", bm * bn, accum),),
            products=((bm, bn, bk),),
            ctas=cdiv(shape["m"], bm) * cdiv(shape["n"], bn) * shape["split_k"],
            iterations=cdiv(cdiv(shape["k"], bk), shape["split_k"]),
            load_bytes=a.bytes + b.bytes,
            flops=2 * bm * bn * bk,
        )

    def illegal(self, shape, dtype, target, config):
        """More slices than K has tiles."""
        tiles = cdiv(shape["k"], config["block_K"])
        return f"split_k: {shape['split_k']} slices of {tiles} tiles" if shape["split_k"] > tiles else None

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        return gemm(**shape, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """A, B, [scale_a, scale_b], [bias], [partial], C."""
        m, n, k = shape["m"], shape["n"], shape["k"]
        out, accum = self._out(dtype), "int32" if dtype == "int8" else "float32"
        tensors = [
            random_tensor((k, m) if shape["trans_a"] else (m, k), dtype, generator),
            random_tensor((n, k) if shape["trans_b"] else (k, n), dtype, generator),
        ]
        if shape["scaled"]:
            # factors that are no powers of two, and leave the result's size as it is
            tensors += [abs(random_tensor((1,), "float32", generator)) + 0.1 for _ in range(2)]
            tensors[-1] /= tensors[-2] * tensors[-1] * 1.1
        if shape["bias"]:
            tensors.append(random_tensor((n,), out, generator))
        if shape["split_k"] > 1:
            tensors.append(poisoned((shape["split_k"], m, n), accum))
        tensors.append(poisoned((m, n), out))
        return tensors, [len(tensors) - 1]

    def _out(self, dtype: str) -> str:
        return {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}.get(dtype, dtype)

    def expected(self, shape, dtype, tensors):
        """float64 for float32, int32 wrap-around for int8, else float32."""
        import torch

        a, b = tensors[0], tensors[1]
        a = a.T if shape["trans_a"] else a
        b = b.T if shape["trans_b"] else b
        if dtype == "int8":
            # float64 holds these sums exactly
            out = a.double() @ b.double()
            if shape["bias"]:
                out = out + tensors[2].double()
            return [((out.to(torch.int64) + 2**31) % 2**32 - 2**31).to(torch.int32)]
        wide = torch.float64 if dtype == "float32" else torch.float32
        out = a.to(wide) @ b.to(wide)
        if shape["scaled"]:
            out = out * (tensors[2] * tensors[3]).to(wide)
        return [out + tensors[self._bias(shape)].to(wide) if shape["bias"] else out]

    @staticmethod
    def _bias(shape) -> int:
        """Position of the row vector among the arguments."""
        return 4 if shape["scaled"] else 2

    def tolerance(self, shape, dtype):
        """Half a unit in the last place of the output, and the error of the sum.

        Inputs have unit variance, so sums and partial sums are about ``sqrt(k)``. Tensor cores truncate a sum once a
        step of 16 products (32 bytes): to float32's 23 bits, for float8 operands to about 13 bits (Hopper; an
        implementation that adds in float32 is inside of that too).
        """
        if dtype == "int8":
            return 0.0, 0.0
        k = shape["k"]
        out = self._out(dtype)
        half_unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[out]
        eight_bit = dtype.startswith("float8")
        steps = -(-k // (32 if eight_bit else 16))
        kept = 2.0**-13 if eight_bit else 2.0**-23
        relative = half_unit + (1e-5 if out == "float32" else steps * kept / 2)
        return relative, 4e-6 * math.sqrt(k) + 2 * steps * kept * math.sqrt(k)

    def flops(self, shape):
        """2 m n k."""
        shape = self.complete(shape)
        return 2 * shape["m"] * shape["n"] * shape["k"]

    def bytes(self, shape, dtype):
        """A, B and C once."""
        shape = self.complete(shape)
        m, n, k = shape["m"], shape["n"], shape["k"]
        return (m * k + n * k) * torch_dtype(dtype).itemsize + m * n * torch_dtype(self._out(dtype)).itemsize

    @property
    def peers(self):
        """``torch``: its matrix product of the same dtype."""
        return {"torch": self._torch}

    def _torch(self, shape, dtype, tensors):
        import torch

        shape = self.complete(shape)
        a, b = tensors[0], tensors[1]
        a = a.T if shape["trans_a"] else a
        b = b.T if shape["trans_b"] else b
        out = torch.empty_like(tensors[-1])
        bias = tensors[self._bias(shape)] if shape["bias"] else None
        if dtype == "int8":
            return lambda: torch._int_mm(a, b)
        if dtype.startswith("float8"):
            if not a.is_cuda:
                raise TileError(f"torch has no product of {dtype} on a CPU")
            one = torch.ones((), device=a.device)
            scales = [t[0] for t in tensors[2:4]] if shape["scaled"] else [one, one]
            return lambda: torch._scaled_mm(a, b, *scales, bias=bias, out_dtype=torch.bfloat16)
        if shape["scaled"]:
            raise TileError(f"torch has no scaled product of {dtype}")
        if bias is not None:
            return lambda: torch.addmm(bias, a, b, out=out)
        return lambda: torch.mm(a, b, out=out)
