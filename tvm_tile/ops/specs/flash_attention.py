"""What the tools know of ``flash_attention``."""

from __future__ import annotations

from ..common import divisor_tile, round_up
from ..flash_attention import default_threads, default_tiles, flash_attention
from ..footprint import Footprint, Tile, cdiv
from ..registry import OpSpec, poisoned, random_tensor, torch_dtype
from .attention_math import plain_attention, visible

__all__ = ["FlashAttention"]


class FlashAttention(OpSpec):
    """Attention with an online softmax."""

    name = "flash_attention"
    doc = "attention: MHA, GQA, MQA, causal, sliding window, block-sparse, bias, variable length"
    shape_params = {
        "batch": (int, 1, "sequences"),
        "heads": (int, 8, "query heads"),
        "kv_heads": (int, None, "heads of K and V, a divisor of heads (all by default)"),
        "seq": (int, 1024, "query rows of a sequence"),
        "seq_kv": (int, None, "keys of a sequence (seq by default)"),
        "dim": (int, 64, "width of a head"),
        "causal": (bool, False, "a query sees no later key"),
        "window": (int, None, "sliding window: keys that a query sees, its own included"),
        "block_mask": (int, None, "block-sparse: rows and keys of a block"),
        "density": (float, 0.5, "block-sparse: share of the blocks that are not skipped, which are random"),
        "bias": (bool, False, "add a bias to the scores"),
        "varlen": (bool, False, "sequences of random lengths, one after another"),
    }
    dtypes = ["float16", "bfloat16", "float32"]
    tunables = {
        "block_M": [64, 128, 192, 256],
        "block_N": [32, 64, 80, 128, 176, 256],
        "num_stages": [0, 1, 2, 3],
        "threads": [128, 256, 384],
    }

    sizes = ("batch", "heads", "seq", "seq_kv")
    coupled = (("block_M", "block_N"), ("block_N", "num_stages"), ("block_M", "threads"))

    def complete(self, shape=None):
        """Shape with kv_heads and seq_kv resolved."""
        out = super().complete(shape)
        out["kv_heads"] = out["heads"] if out["kv_heads"] is None else out["kv_heads"]
        out["seq_kv"] = out["seq"] if out["seq_kv"] is None else out["seq_kv"]
        return out

    def defaults(self, shape, dtype, target):
        """See :func:`tvm_tile.ops.flash_attention.default_tiles`."""
        shape = self.complete(shape)
        # the lengths are symbolic with varlen
        seq, seq_kv = (None, None) if shape["varlen"] else (shape["seq"], shape["seq_kv"])
        skips = shape["causal"] or shape["window"] is not None or shape["block_mask"] is not None
        heads = shape["batch"] * shape["heads"]
        tiles = default_tiles(seq, seq_kv, shape["dim"], dtype, target, heads, skips=skips, bias=bool(shape["bias"]))
        if shape["block_mask"]:
            tiles |= {name: divisor_tile(shape["block_mask"], tiles[name]) for name in ("block_M", "block_N")}
        return tiles

    def configured(self, shape, dtype, target, config=None):
        """The CTA's size follows block_M unless it is given."""
        shape, tunables = super().configured(shape, dtype, target, config)
        if "threads" not in (config or {}):
            tunables["threads"] = default_threads(tunables["block_M"], target)
        return shape, tunables

    def extents(self, shape):
        """Rows and keys of a sequence."""
        return {"block_M": max(16, shape["seq"]), "block_N": max(16, shape["seq_kv"])}

    def shape_class(self, shape):
        """The number of query heads that share a head of K, not the number of those, belongs to the class."""
        fixed, sizes = super().shape_class(shape)
        fixed["group"] = sizes["heads"] // fixed.pop("kv_heads")
        return fixed, sizes

    def footprint(self, shape, dtype, target, config):
        """The tiles of one CTA; iterations are the mean over the query blocks."""
        bm, bn, width = config["block_M"], config["block_N"], round_up(shape["dim"], 16)
        k, v = (Tile(name, bn * width, dtype, staged=True) for name in ("K_shared", "V_shared"))
        rows = ("scores_max", "scores_max_prev", "scores_scale", "scores_sum", "logsum")
        blocks = cdiv(shape["seq"], bm)
        return Footprint(
            threads=config["threads"],
            stages=config["num_stages"],
            shared=(Tile("Q_shared", bm * width, dtype), k, v),
            fragments=(
                Tile("acc_s", bm * bn, "float32"),
                Tile("acc_s_cast", bm * bn, dtype, converted=True),
                Tile("acc_o", bm * width, "float32"),
                *(Tile(name, bm, "float32") for name in rows),
            ),
            products=((bm, bn, width), (bm, width, bn)),
            ctas=blocks * shape["heads"] * shape["batch"],
            iterations=max(1, cdiv(sum(self._tiles_of(shape, i, bm, bn) for i in range(blocks)), blocks)),
            load_bytes=k.bytes + v.bytes,
            flops=4 * bm * bn * width,
        )

    def _tiles_of(self, shape, block: int, bm: int, bn: int) -> int:
        """Key tiles that a query block visits."""
        first_row = block * bm + shape["seq_kv"] - shape["seq"]
        last, first, window = shape["seq_kv"], 0, shape["window"]
        if shape["causal"]:
            last = min(last, first_row + bm)
        elif window is not None:
            last = min(last, first_row + bm + window - 1)
        if window is not None:
            first = max(first_row - window + 1, 0)
        return max(0, cdiv(last, bn) - first // bn)

    def illegal(self, shape, dtype, target, config):
        """Tiles that do not divide the blocks of the mask."""
        sparse = shape["block_mask"]
        for name in ("block_M", "block_N"):
            if sparse and sparse % config[name]:
                return f"{name}: {config[name]} does not divide block_mask {sparse}"
        return None

    def build(self, shape, dtype, target, **tunables):
        """The kernel; with varlen the total lengths are symbolic."""
        options = {
            key: shape[key] for key in ("batch", "heads", "kv_heads", "dim", "causal", "window", "block_mask", "bias")
        }
        lengths = (
            {"seq_q": None, "seq_kv": None} if shape["varlen"] else {"seq_q": shape["seq"], "seq_kv": shape["seq_kv"]}
        )
        return flash_attention(**options, **lengths, varlen=shape["varlen"], dtype=dtype, target=target, **tunables)

    def arguments(self, shape, dtype, generator):
        """Q, K, V, [CuQ, CuK], [Bias], [BlockMask], Out, Lse."""
        import torch

        batch, heads, kv_heads, dim = shape["batch"], shape["heads"], shape["kv_heads"], shape["dim"]
        seq, seq_kv = shape["seq"], shape["seq_kv"]
        extra = []
        if shape["varlen"]:
            # the longest sequence first, then random ones, empty ones included
            cu = []
            for longest in (seq, seq_kv):
                lengths = torch.randint(0, longest + 1, (batch,), generator=generator, device=generator.device).cpu()
                lengths[0] = longest
                cu.append(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32))
            extra = cu
            q_lead, k_lead, lse_shape = (int(cu[0][-1]),), (int(cu[1][-1]),), (heads, int(cu[0][-1]))
        else:
            q_lead, k_lead, lse_shape = (batch, seq), (batch, seq_kv), (batch, heads, seq)
        tensors = [
            random_tensor((*q_lead, heads, dim), dtype, generator),
            random_tensor((*k_lead, kv_heads, dim), dtype, generator),
            random_tensor((*k_lead, kv_heads, dim), dtype, generator),
            *extra,
        ]
        if shape["bias"]:
            tensors.append(random_tensor((1, heads, seq, seq_kv), dtype, generator))
        if shape["block_mask"]:
            block = shape["block_mask"]
            size = (batch, heads, -(-seq // block), -(-seq_kv // block))
            kept = torch.rand(size, generator=generator, device=generator.device) < shape["density"]
            tensors.append(kept.to(torch.int8))
        outputs = [poisoned((*q_lead, heads, dim), dtype), poisoned(lse_shape, "float32")]
        return tensors + outputs, [len(tensors), len(tensors) + 1]

    def expected(self, shape, dtype, tensors):
        """Head by head, in float64 for float32 and in float32 otherwise."""
        import torch

        q, k, v = tensors[:3]
        rest = list(tensors[3:-2])
        wide = torch.float64 if dtype == "float32" else torch.float32
        scale = shape["dim"] ** -0.5
        group = shape["heads"] // shape["kv_heads"]
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.zeros(tensors[-1].shape, dtype=wide, device=q.device)
        cu = [t.tolist() for t in (rest.pop(0), rest.pop(0))] if shape["varlen"] else None
        bias = rest.pop(0) if shape["bias"] else None
        blocks = rest.pop(0) if shape["block_mask"] else None
        for b in range(shape["batch"]):
            if cu:
                rows, keys = slice(cu[0][b], cu[0][b + 1]), slice(cu[1][b], cu[1][b + 1])
                qb, kb, vb, ob, lb = q[rows], k[keys], v[keys], out[rows], lse[:, rows]
            else:
                qb, kb, vb, ob, lb = q[b], k[b], v[b], out[b], lse[b]
            seen = visible(qb.shape[0], kb.shape[0], shape["causal"], shape["window"], q.device)
            for h in range(shape["heads"]):
                here = seen
                if blocks is not None:
                    size = shape["block_mask"]
                    whole = blocks[b, h].bool().repeat_interleave(size, 0).repeat_interleave(size, 1)
                    here = seen & whole[: seen.shape[0], : seen.shape[1]]
                ob[:, h], lb[h] = plain_attention(
                    qb[:, h].to(wide),
                    kb[:, h // group].to(wide),
                    vb[:, h // group].to(wide),
                    scale,
                    here,
                    None if bias is None else bias[0, h].to(wide),
                )
        return [out, lse]

    def tolerance(self, shape, dtype):
        """The rounding of the weights and of the output."""
        return {"float32": (2e-5, 2e-5), "float16": (2e-3, 2e-3)}.get(dtype, (1.6e-2, 1.6e-2))

    def flops(self, shape):
        """4 dim for each query and key that it sees, the expected number of blocks; short sequences count as long."""
        shape = self.complete(shape)
        pairs = 0
        for row in range(shape["seq"]):
            position = row + shape["seq_kv"] - shape["seq"]
            high, low = shape["seq_kv"], 0
            if shape["causal"]:
                high = min(high, position + 1)
            if shape["window"] is not None:
                low = max(low, position - shape["window"] + 1)
                high = min(high, position + shape["window"])
            pairs += max(0, high - low)
        kept = shape["density"] if shape["block_mask"] else 1
        return int(4 * shape["batch"] * shape["heads"] * shape["dim"] * pairs * kept)

    def bytes(self, shape, dtype):
        """Q, K, V, O once and Lse."""
        shape = self.complete(shape)
        rows = shape["batch"] * shape["seq"] * shape["heads"]
        keys = shape["batch"] * shape["seq_kv"] * shape["kv_heads"]
        size = torch_dtype(dtype).itemsize
        total = 2 * (rows + keys) * shape["dim"] * size + 4 * rows
        return total + (shape["heads"] * shape["seq"] * shape["seq_kv"] * size if shape["bias"] else 0)

    @property
    def peers(self):
        """``torch``: scaled_dot_product_attention as it chooses; ``torch_flash``: its FlashAttention-2 backend."""
        return {"torch": self._sdpa, "torch_flash": self._flash}

    def _sdpa(self, shape, dtype, tensors):
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        from ...errors import TileError

        shape = self.complete(shape)
        if shape["varlen"]:
            raise TileError("torch's attention takes no running sums of lengths")
        q, k, v = (t.transpose(1, 2) for t in tensors[:3])
        options = {"enable_gqa": True} if shape["kv_heads"] != shape["heads"] else {}
        if shape["window"] is None and not shape["bias"] and not shape["block_mask"]:
            if shape["causal"] and shape["seq"] != shape["seq_kv"]:
                mask = visible(shape["seq"], shape["seq_kv"], True, None, q.device)
                return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
            return lambda: scaled_dot_product_attention(q, k, v, is_causal=shape["causal"], **options)
        mask = visible(shape["seq"], shape["seq_kv"], shape["causal"], shape["window"], q.device)
        if shape["block_mask"]:
            size = shape["block_mask"]
            blocks = tensors[4 if shape["bias"] else 3].bool().repeat_interleave(size, 2).repeat_interleave(size, 3)
            mask = mask & blocks[:, :, : shape["seq"], : shape["seq_kv"]]
        if shape["bias"]:
            mask = torch.where(mask, tensors[3], float("-inf"))
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    def _flash(self, shape, dtype, tensors):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from ...errors import TileError

        if not tensors[0].is_cuda:
            raise TileError("torch's FlashAttention-2 runs on GPUs only")
        call = self._sdpa(shape, dtype, tensors)

        def run():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return call()

        return run
