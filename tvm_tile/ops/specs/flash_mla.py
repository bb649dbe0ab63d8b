"""What the tools know of ``flash_mla``."""

from __future__ import annotations

from ..common import divisor_tile, target_class
from ..flash_mla import default_splits, default_tiles, flash_mla
from ..footprint import Footprint, Tile, cdiv
from ..registry import OpSpec, poisoned, random_tensor, torch_dtype
from .attention_math import plain_attention

__all__ = ["FlashMLA"]


class FlashMLA(OpSpec):
    """Latent attention decode."""

    name = "flash_mla"
    doc = "DeepSeek multi-head latent attention decode: dense or paged cache, split-KV"
    shape_params = {
        "batch": (int, 4, "sequences"),
        "heads": (int, 64, "query heads"),
        "kv_heads": (int, 1, "heads of the cache, a divisor of heads"),
        "kv_len": (int, 1024, "rows of the cache for a sequence"),
        "dim": (int, 512, "width of the latent part"),
        "pe_dim": (int, 64, "width of the rotary part"),
        "packed": (bool, False, "one query tensor and one cache tensor of width dim + pe_dim"),
        "page_size": (int, None, "paged cache: rows of a page"),
        "ragged": (bool, False, "sequences of random lengths, 0 and kv_len among them; else all kv_len"),
        "num_splits": (int, 1, "slices of a sequence that run in parallel; 0 chooses for a GPU of 132 SMs"),
    }
    dtypes = ["bfloat16", "float16", "float32"]
    tunables = {
        "block_H": [16, 32, 64, 128],
        "block_N": [16, 32, 64, 128],
        "num_stages": [0, 1, 2, 3],
        "threads": [128, 256, 384],
    }

    sizes = ("batch", "heads", "kv_len")
    options = {"num_splits": [1, 2, 3, 4, 6, 8, 12, 16, 32]}
    coupled = (("block_H", "block_N"), ("block_N", "num_stages"), ("block_H", "threads"), ("num_splits", "block_N"))

    def complete(self, shape=None):
        """Shape with num_splits resolved."""
        out = super().complete(shape)
        if out["num_splits"] == 0:
            out["num_splits"] = default_splits(out["batch"], out["heads"], out["kv_len"], 64, 64)
        return out

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.flash_mla.default_tiles`."""
        shape = self.complete(shape)
        tiles = default_tiles(shape["heads"] // shape["kv_heads"], shape["dim"], dtype, target, shape["pe_dim"])
        if shape["page_size"]:
            tiles["block_N"] = divisor_tile(shape["page_size"], tiles["block_N"])
        return tiles

    def extents(self, shape):
        """Query heads of a head of the cache, and its rows."""
        return {"block_H": max(16, shape["heads"] // shape["kv_heads"]), "block_N": max(16, shape["kv_len"])}

    def shape_class(self, shape):
        """The number of query heads that share a head of the cache belongs to the class."""
        fixed, sizes = super().shape_class(shape)
        fixed["group"] = sizes["heads"] // fixed.pop("kv_heads")
        return fixed, sizes

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA of the attention kernel; the one that combines splits is small."""
        bh, bn, dim, pe = config["block_H"], config["block_N"], shape["dim"], shape["pe_dim"]
        kv, k_pe = Tile("KV_shared", bn * dim, dtype, staged=True), Tile("K_pe_shared", bn * pe, dtype, staged=True)
        splits = shape["num_splits"]
        rows = ("scores_max", "scores_max_prev", "scores_scale", "scores_sum", "logsum")
        late = () if splits > 1 else (Tile("O_shared", bh * dim, dtype, late=True),)
        heads = divisor_tile(shape["heads"] // shape["kv_heads"], bh)
        # sm_90: a front makes the probabilities, a back accumulates, and Q leaves its memory to a third slot
        split = target_class(target) == "sm_90" and (bh, config["threads"]) == (64, 256) and kv.bytes <= bn * 1024
        return Footprint(
            threads=config["threads"],
            stages=config["num_stages"],
            shared=(
                Tile("Q_shared", bh * dim, dtype),
                Tile("Q_pe_shared", bh * pe, dtype),
                kv,
                k_pe,
                Tile("S_shared", bh * bn, dtype),
                *late,
            ),
            fragments=(
                Tile("acc_s", bh * bn, "float32"),
                Tile("acc_o", bh * dim, "float32"),
                *(Tile(name, bh, "float32") for name in rows),
            ),
            products=((bh, bn, dim), (bh, bn, pe), (bh, dim, bn)),
            ctas=shape["heads"] // heads * shape["batch"] * splits,
            iterations=max(1, cdiv(cdiv(shape["kv_len"], bn), splits)),
            load_bytes=kv.bytes + k_pe.bytes,
            flops=2 * bh * bn * (2 * dim + pe),
            slots=3 if split and config["num_stages"] > 1 else 0,
        )

    def illegal(self, shape, dtype, target, config):
        """Tiles that cross pages, and more splits than tiles."""
        page, block = shape["page_size"], config["block_N"]
        if page and page % block:
            return f"block_N: {block} does not divide page_size {page}"
        tiles = cdiv(shape["kv_len"], block)
        splits = shape["num_splits"]
        return f"num_splits: {splits} of {tiles} tiles" if splits > tiles else None

    def build(self, shape, dtype, target, **tunables):
        """The kernel."""
        options = {key: value for key, value in shape.items() if key != "ragged"}
        return flash_mla(**options, dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """Q, [Q_pe], KV, [K_pe], [BlockTable], Lengths, [glse, Output_partial], Output, Lse.

        What lies in the cache beyond a sequence's length is NaN, as a kernel must not depend on it.
        """
        import torch

        batch, heads, kv_len, dim, pe_dim = (shape[k] for k in ("batch", "heads", "kv_len", "dim", "pe_dim"))
        lengths = torch.full((batch,), kv_len, dtype=torch.int32)
        if shape["ragged"]:
            lengths = torch.randint(0, kv_len + 1, (batch,), generator=generator, device=generator.device)
            lengths = lengths.to(torch.int32).cpu()
            lengths[0] = kv_len
            if batch > 1:
                lengths[1] = 0
        q = random_tensor((batch, heads, dim + pe_dim), dtype, generator)
        cache = random_tensor((batch, kv_len, shape["kv_heads"], dim + pe_dim), dtype, generator)
        for b in range(batch):
            cache[b, int(lengths[b]) :] = float("nan")
        tensors = []
        if shape["page_size"]:
            cache, table = _paged(cache, shape["page_size"], generator)
        parts = [q, cache] if shape["packed"] else [q[..., :dim], q[..., dim:], cache[..., :dim], cache[..., dim:]]
        tensors += [part.contiguous() for part in parts]
        if shape["page_size"]:
            tensors.append(table)
        tensors.append(lengths)
        splits = shape["num_splits"]
        if splits > 1:
            tensors += [poisoned((batch, heads, splits), "float32"), poisoned((batch, heads, splits, dim), "float32")]
        outputs = [poisoned((batch, heads, dim), dtype), poisoned((batch, heads), "float32")]
        return tensors + outputs, [len(tensors), len(tensors) + 1]

    def unpack(self, shape, tensors):
        """(q ``[batch, heads, dim + pe_dim]``, list of each sequence's cache ``[length, kv_heads, dim + pe_dim]``)."""
        import torch

        rest = list(tensors)
        if shape["packed"]:
            q, cache = rest.pop(0), rest.pop(0)
        else:
            q, q_pe, kv, k_pe = (rest.pop(0) for _ in range(4))
            q, cache = torch.cat([q, q_pe], -1), torch.cat([kv, k_pe], -1)
        table = rest.pop(0) if shape["page_size"] else None
        lengths = rest.pop(0).tolist()
        if table is None:
            return q, [cache[b, :length] for b, length in enumerate(lengths)]
        return q, [cache[table[b].long()].flatten(0, 1)[:length] for b, length in enumerate(lengths)]

    def expected(self, shape, dtype, tensors):
        """Head by head, in float64 for float32 and in float32 otherwise."""
        import torch

        q, caches = self.unpack(shape, tensors)
        wide = torch.float64 if dtype == "float32" else torch.float32
        scale = (shape["dim"] + shape["pe_dim"]) ** -0.5
        group = shape["heads"] // shape["kv_heads"]
        out = torch.zeros(tensors[-2].shape, dtype=wide, device=q.device)
        lse = torch.zeros(tensors[-1].shape, dtype=wide, device=q.device)
        for b, cache in enumerate(caches):
            for g in range(shape["kv_heads"]):
                heads = slice(g * group, (g + 1) * group)
                keys = cache[:, g].to(wide)
                out[b, heads], lse[b, heads] = plain_attention(
                    q[b, heads].to(wide), keys, keys[:, : shape["dim"]], scale
                )
        return [out, lse]

    def tolerance(self, shape, dtype):
        """The rounding of the weights and of the output."""
        return {"float32": (2e-5, 2e-5), "float16": (2e-3, 2e-3)}.get(dtype, (1.6e-2, 1.6e-2))

    def flops(self, shape):
        """2 (2 dim + pe_dim) for each query head and row of a full cache."""
        shape = self.complete(shape)
        return 2 * shape["batch"] * shape["heads"] * shape["kv_len"] * (2 * shape["dim"] + shape["pe_dim"])

    def bytes(self, shape, dtype):
        """Queries, a full cache and the output once, and Lse."""
        shape = self.complete(shape)
        size = torch_dtype(dtype).itemsize
        width = shape["dim"] + shape["pe_dim"]
        queries = shape["batch"] * shape["heads"]
        cache = shape["batch"] * shape["kv_len"] * shape["kv_heads"] * width
        return (queries * (width + shape["dim"]) + cache) * size + 4 * queries

    @property
    def peers(self):
        """``torch``: two matrix products and a softmax over the whole batch."""
        return {"torch": self._torch}

    def _torch(self, shape, dtype, tensors):
        import torch

        shape = self.complete(shape)
        q, caches = self.unpack(shape, tensors)
        batch, group, dim = shape["batch"], shape["heads"] // shape["kv_heads"], shape["dim"]
        width = dim + shape["pe_dim"]
        cache = torch.zeros(batch, shape["kv_len"], shape["kv_heads"], width, dtype=q.dtype, device=q.device)
        for b, rows in enumerate(caches):
            cache[b, : rows.shape[0]] = rows
        lengths = torch.tensor([rows.shape[0] for rows in caches], device=q.device)
        seen = torch.arange(shape["kv_len"], device=q.device)[None, :] < lengths[:, None]
        bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))[
            :, None, None, :
        ]
        keys = cache.permute(0, 2, 3, 1)
        values = cache[..., :dim].transpose(1, 2)
        query = q.view(batch, shape["kv_heads"], group, width) * width**-0.5
        return lambda: torch.softmax(query @ keys + bias, dim=-1) @ values


def _paged(cache, page_size: int, generator):
    """The cache in pages of random order, NaN in what is not used, and the block table."""
    import torch

    batch, kv_len = cache.shape[:2]
    columns = -(-kv_len // page_size)
    whole = (batch, columns * page_size, *cache.shape[2:])
    padded = torch.full(whole, float("nan"), dtype=cache.dtype, device=cache.device)
    padded[:, :kv_len] = cache
    order = torch.randperm(batch * columns, generator=generator, device=generator.device)
    pages = torch.empty(batch * columns, page_size, *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    pages[order] = padded.view(batch * columns, page_size, *cache.shape[2:])
    return pages, order.view(batch, columns).to(torch.int32)
