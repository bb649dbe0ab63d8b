"""What the tools know of ``softmax`` and ``rmsnorm``."""

from __future__ import annotations

from .. import normalize
from ..footprint import ITEM_BYTES, Footprint, Tile, cdiv
from ..registry import OpSpec, poisoned, random_tensor, torch_dtype

__all__ = ["RMSNorm", "Softmax"]

_TUNABLES = {"block_M": [1, 2, 4, 8], "block_N": [128, 256, 512, 1024], "threads": [64, 128, 256]}
_SHAPE = {"rows": (int, 1024, "rows"), "columns": (int, 1024, "elements of a row")}


class _RowWise(OpSpec):
    """What both have in common."""

    shape_params = _SHAPE
    dtypes = ["float16", "bfloat16", "float32"]
    tunables = _TUNABLES
    sizes = ("rows", "columns")
    coupled = (("block_M", "block_N"), ("block_N", "threads"))

    def extents(self, shape):
        """Rows and columns."""
        return {"block_M": shape["rows"], "block_N": max(128, shape["columns"])}

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA; the loop over the columns runs twice."""
        bm, bn = config["block_M"], config["block_N"]
        return Footprint(
            threads=config["threads"],
            stages=2,
            shared=(),
            fragments=(Tile("x", bm * bn, "float32"), *(Tile(name, bm, "float32") for name in self.row_fragments)),
            products=(),
            ctas=cdiv(shape["rows"], bm),
            iterations=2 * cdiv(shape["columns"], bn),
            load_bytes=bm * bn * ITEM_BYTES[dtype],
            flops=0,
        )

    #: Fragments of one element a row.
    row_fragments: tuple[str, ...] = ()

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.normalize.default_tiles`."""
        shape = self.complete(shape)
        return normalize.default_tiles(shape["rows"], shape["columns"], dtype, target)

    def tolerance(self, shape, dtype):
        """One rounding of the output."""
        return {"float32": (1e-5, 1e-6), "float16": (1e-3, 1e-6)}.get(dtype, (8e-3, 1e-6))

    def bytes(self, shape, dtype):
        """X and Y once."""
        shape = self.complete(shape)
        return 2 * shape["rows"] * shape["columns"] * torch_dtype(dtype).itemsize

    @property
    def peers(self):
        """``torch``: its own operator."""
        return {"torch": self._torch}


class Softmax(_RowWise):
    """Softmax of rows."""

    name = "softmax"
    doc = "softmax of each row"
    row_fragments = ("top", "top_prev", "part", "total")

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        return normalize.softmax(**shape, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """X, Y."""
        size = (shape["rows"], shape["columns"])
        return [random_tensor(size, dtype, generator, scale=4.0), poisoned(size, dtype)], [1]

    def expected(self, shape, dtype, tensors):
        """float64."""
        return [tensors[0].double().softmax(dim=1)]

    def flops(self, shape):
        """No products."""
        return 0

    def _torch(self, shape, dtype, tensors):
        return lambda: tensors[0].softmax(dim=1)


class RMSNorm(_RowWise):
    """Root-mean-square normalisation of rows."""

    name = "rmsnorm"
    doc = "root-mean-square normalisation of each row, with weights"
    row_fragments = ("total",)

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        return normalize.rmsnorm(**shape, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """X, Weight, Y."""
        size = (shape["rows"], shape["columns"])
        weight = random_tensor(size[1:], dtype, generator)
        return [random_tensor(size, dtype, generator, scale=4.0), weight, poisoned(size, dtype)], [2]

    def expected(self, shape, dtype, tensors):
        """float64."""
        x = tensors[0].double()
        return [x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * tensors[1].double()]

    def flops(self, shape):
        """No products."""
        return 0

    def _torch(self, shape, dtype, tensors):
        import torch

        x, weight = tensors[:2]
        return lambda: torch.nn.functional.rms_norm(x, (x.shape[1],), weight, eps=1e-6)
