"""What the tools know of ``dequant_gemm`` and ``grouped_gemm``."""

from __future__ import annotations

import math

from ..dequant_gemm import default_tiles as dequant_tiles
from ..dequant_gemm import dequant_gemm
from ..footprint import Footprint, Tile, cdiv
from ..gemm import default_tiles as gemm_tiles
from ..grouped_gemm import grouped_gemm
from ..registry import OpSpec, poisoned, random_tensor, torch_dtype

__all__ = ["DequantGemm", "GroupedGemm"]

_TUNABLES = {
    "block_M": [16, 32, 64, 128, 256],
    "block_N": [64, 128, 256],
    "block_K": [32, 64, 128, 256],
    "num_stages": [0, 2, 3, 4],
    "threads": [128, 256],
}
_COUPLED = (("block_M", "block_N"), ("block_K", "num_stages"), ("block_M", "threads"), ("block_N", "threads"))


class DequantGemm(OpSpec):
    """Product with 4-bit weights."""

    name = "dequant_gemm"
    doc = "matrix product with 4-bit weights, a scale (and zero point) for each group"
    shape_params = {
        "m": (int, 16, "rows of C"),
        "n": (int, 1024, "columns of C"),
        "k": (int, 1024, "length of the sums"),
        "group_size": (int, 128, "weights that share a scale"),
        "zeros": (bool, False, "a zero point for each group, else 8"),
    }
    dtypes = ["float16", "bfloat16"]
    tunables = _TUNABLES
    sizes = ("m", "n", "k")
    coupled = _COUPLED

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.dequant_gemm.default_tiles`."""
        shape = self.complete(shape)
        return dequant_tiles(shape["m"], shape["n"], shape["k"], target)

    def extents(self, shape):
        """Rows, columns and length of the sums."""
        return {"block_M": max(16, shape["m"]), "block_N": shape["n"], "block_K": shape["k"]}

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA; the expanded weights are made on the chip, so they are not staged."""
        bm, bn, bk = config["block_M"], config["block_N"], config["block_K"]
        a = Tile("A_shared", bm * bk, dtype, staged=True)
        packed = Tile("Packed_shared", bn * bk // 2, "uint8", staged=True)
        return Footprint(
            threads=config["threads"],
            stages=config["num_stages"],
            shared=(a, packed, Tile("W_shared", bn * bk, dtype)),
            fragments=(Tile("C_local", bm * bn, "float32"),),
            products=((bm, bn, bk),),
            ctas=cdiv(shape["m"], bm) * cdiv(shape["n"], bn),
            iterations=cdiv(shape["k"], bk),
            load_bytes=a.bytes + packed.bytes,
            flops=2 * bm * bn * bk,
        )

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        return dequant_gemm(**shape, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """A, Packed, Scales, [Zeros], C."""
        import torch

        m, n, k = shape["m"], shape["n"], shape["k"]
        groups = (n, k // shape["group_size"])
        tensors = [
            random_tensor((m, k), dtype, generator),
            random_tensor((n, k // 2), "uint8", generator),
            random_tensor(groups, dtype, generator, scale=0.1),
        ]
        if shape["zeros"]:
            tensors.append(torch.randint(0, 16, groups, generator=generator, device=generator.device).to(torch.uint8))
        tensors.append(poisoned((m, n), dtype))
        return tensors, [len(tensors) - 1]

    def weights(self, shape, dtype, tensors):
        """The weights ``[n, k]`` rounded to the op's dtype."""
        import torch

        packed, scales = tensors[1].to(torch.int32), tensors[2].float()
        q = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).float()
        size = shape["group_size"]
        zero = tensors[3].float().repeat_interleave(size, 1) if shape["zeros"] else 8.0
        return ((q - zero) * scales.repeat_interleave(size, 1)).to(torch_dtype(dtype))

    def expected(self, shape, dtype, tensors):
        """float32."""
        return [tensors[0].float() @ self.weights(shape, dtype, tensors).float().T]

    def tolerance(self, shape, dtype):
        """One rounding of the output, and the rounding of a sum of k products."""
        return {"float16": 1e-3}.get(dtype, 8e-3), 4e-6 * math.sqrt(shape.get("k", 1024))

    def flops(self, shape):
        """2 m n k."""
        shape = self.complete(shape)
        return 2 * shape["m"] * shape["n"] * shape["k"]

    def bytes(self, shape, dtype):
        """A, the packed weights, scales, zero points and C once."""
        shape = self.complete(shape)
        m, n, k = shape["m"], shape["n"], shape["k"]
        size, groups = torch_dtype(dtype).itemsize, n * (k // shape["group_size"])
        return (m * k + m * n + groups) * size + n * k // 2 + (groups if shape["zeros"] else 0)

    @property
    def peers(self):
        """``torch``: its matrix product with the weights already expanded."""
        return {"torch": self._torch}

    def _torch(self, shape, dtype, tensors):
        weights = self.weights(self.complete(shape), dtype, tensors)
        return lambda: tensors[0] @ weights.T


class GroupedGemm(OpSpec):
    """A product for each group of rows."""

    name = "grouped_gemm"
    doc = "matrix products of groups of rows with weights of their own (mixture of experts)"
    shape_params = {
        "total": (int, 1024, "rows of all groups"),
        "groups": (int, 8, "groups"),
        "n": (int, 512, "columns of C"),
        "k": (int, 512, "length of the sums"),
    }
    dtypes = ["float16", "bfloat16", "float32"]
    tunables = _TUNABLES
    sizes = ("total", "groups", "n", "k")
    coupled = _COUPLED

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.gemm.default_tiles`, for a group of average size."""
        shape = self.complete(shape)
        return gemm_tiles(-(-shape["total"] // shape["groups"]), shape["n"], shape["k"], dtype, target)

    def extents(self, shape):
        """Rows of all groups, columns and length of the sums."""
        return {"block_M": max(16, shape["total"]), "block_N": shape["n"], "block_K": max(32, shape["k"])}

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA."""
        bm, bn, bk = config["block_M"], config["block_N"], config["block_K"]
        a, w = Tile("A_shared", bm * bk, dtype, staged=True), Tile("W_shared", bn * bk, dtype, staged=True)
        return Footprint(
            threads=config["threads"],
            stages=config["num_stages"],
            shared=(a, w),
            fragments=(Tile("C_local", bm * bn, "float32"),),
            products=((bm, bn, bk),),
            ctas=(cdiv(shape["total"], bm) + shape["groups"]) * cdiv(shape["n"], bn),
            iterations=cdiv(shape["k"], bk),
            load_bytes=a.bytes + w.bytes,
            flops=2 * bm * bn * bk,
        )

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        return grouped_gemm(**shape, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """A, W, Offsets (random, empty groups are likely), C."""
        import torch

        total, groups, n, k = (shape[key] for key in ("total", "groups", "n", "k"))
        cuts = torch.randint(0, total + 1, (groups - 1,), generator=generator, device=generator.device)
        cuts = cuts.cpu().sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).to(torch.int32)
        return [
            random_tensor((total, k), dtype, generator),
            random_tensor((groups, n, k), dtype, generator),
            offsets,
            poisoned((total, n), dtype),
        ], [3]

    def expected(self, shape, dtype, tensors):
        """float64 for float32, else float32."""
        import torch

        a, w, offsets, c = tensors
        wide = torch.float64 if dtype == "float32" else torch.float32
        out = torch.zeros(c.shape, dtype=wide, device=c.device)
        bounds = offsets.tolist()
        for g in range(shape["groups"]):
            rows = slice(bounds[g], bounds[g + 1])
            out[rows] = a[rows].to(wide) @ w[g].to(wide).T
        return [out]

    def tolerance(self, shape, dtype):
        """One rounding of the output, and the rounding of a sum of k products."""
        return {"float32": 1e-5, "float16": 1e-3}.get(dtype, 8e-3), 4e-6 * math.sqrt(shape.get("k", 512))

    def flops(self, shape):
        """2 total n k."""
        shape = self.complete(shape)
        return 2 * shape["total"] * shape["n"] * shape["k"]

    def bytes(self, shape, dtype):
        """A, W and C once."""
        shape = self.complete(shape)
        total, groups, n, k = (shape[key] for key in ("total", "groups", "n", "k"))
        return (total * (n + k) + groups * n * k) * torch_dtype(dtype).itemsize

    @property
    def peers(self):
        """``torch``: one matrix product after another."""
        return {"torch": self._torch}

    def _torch(self, shape, dtype, tensors):
        import torch

        a, w, offsets, c = tensors
        bounds, out = offsets.tolist(), torch.empty_like(c)

        def run():
            for g in range(w.shape[0]):
                if bounds[g + 1] > bounds[g]:
                    torch.mm(a[bounds[g] : bounds[g + 1]], w[g].T, out=out[bounds[g] : bounds[g + 1]])
            return out

        return run
