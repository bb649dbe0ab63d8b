"""Peers of ``tvm-tile bench`` on a GPU, beside those that an op's description has: cuDNN, flex_attention, Triton.

``peer(shape, dtype, tensors)`` returns a function without arguments that computes the op on the same tensors and
returns the result; it raises where the peer cannot compute it, and the reason is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..errors import TileError

__all__ = ["aligned", "peers_of"]


def peers_of(spec, device: str) -> dict[str, Callable]:
    """All peers of an op on ``"cpu"`` or ``"cuda"``, by name."""
    found = dict(spec.peers)
    if device == "cuda":
        found |= {name: functools.partial(make, spec) for name, make in _GPU.get(spec.name, {}).items()}
    return found


def aligned(result, like):
    """A peer's result as the op's output lies, or None where it is something else.

    Parameters
    ----------
    result : object
        What the peer returned.
    like : torch.Tensor
        The op's output; attention's ``[batch, seq, heads, dim]`` may come as ``[batch, heads, seq, dim]``.
    """
    import torch

    if isinstance(result, tuple) and result:
        result = result[0]
    if not isinstance(result, torch.Tensor):
        return None
    if result.shape != like.shape and result.dim() == 4 and result.transpose(1, 2).shape == like.shape:
        return result.transpose(1, 2)
    return result.reshape(like.shape) if result.numel() == like.numel() else None


# ------------------------------------------------------------------ gemm


def _fast_accumulation(spec, shape, dtype, tensors):
    import torch

    if not dtype.startswith("float8"):
        raise TileError("only float8 products have a mode of faster sums")
    if shape["bias"] or shape.get("scaled"):
        raise TileError("measured without bias and scales only")
    a, b = tensors[0], tensors[1]
    a, b = a.T if shape["trans_a"] else a, b.T if shape["trans_b"] else b
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _triton_gemm(spec, shape, dtype, tensors):
    from . import peers_triton

    peers_triton.check_dtype(dtype)
    if shape["bias"] or shape.get("scaled") or shape["trans_a"] or not shape["trans_b"]:
        raise TileError("the Triton kernel computes A B^T")
    import torch

    a, b = tensors[:2]
    out = torch.empty_like(tensors[-1])

    def run():
        peers_triton.matmul(a, b, out)
        return out

    return run


# ------------------------------------------------------------------ attention


def _plain(shape) -> bool:
    return not (shape["varlen"] or shape["bias"] or shape["block_mask"]) and shape["window"] is None


def _cudnn(spec, shape, dtype, tensors):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = spec.complete(shape)
    if not _plain(shape) or (shape["causal"] and shape["seq"] != shape["seq_kv"]):
        raise TileError("with a mask as a tensor cuDNN computes all scores")
    call = spec.peers["torch"](shape, dtype, tensors)

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return run


@functools.lru_cache(maxsize=1)
def _compiled_flex(key):
    """flex_attention compiled for one problem; ``key`` alone tells problems apart."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def _flex(spec, shape, dtype, tensors):
    import torch
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    shape = spec.complete(shape)
    if shape["varlen"] or shape["bias"]:
        raise TileError("measured with masks only")
    q, k, v = (t.transpose(1, 2) for t in tensors[:3])
    seq, seq_kv, causal, window = shape["seq"], shape["seq_kv"], shape["causal"], shape["window"]
    size = shape["block_mask"]
    if not causal and window is None and not size:
        raise TileError("there is nothing to mask")
    if size:
        if causal or window is not None or seq % size or seq_kv % size:
            raise TileError("measured with whole blocks only")
        kept = tensors[3].bool()
        order = kept.int().argsort(dim=-1, descending=True, stable=True).int()
        count = kept.sum(-1).int()
        # whole blocks: no element of them needs a mask
        mask = BlockMask.from_kv_blocks(torch.zeros_like(count), torch.zeros_like(order), count, order, BLOCK_SIZE=size)
    else:
        offset = seq_kv - seq

        def seen(batch, head, i, j):
            ok = j <= i + offset if causal else j >= 0
            if window is not None:
                ok = ok & (j > i + offset - window) & (j < i + offset + window)
            return ok

        mask = create_block_mask(seen, None, None, seq, seq_kv, device=q.device)
    key = tuple(shape.items()) + (dtype,)
    call = _compiled_flex(key)
    grouped = shape["heads"] != shape["kv_heads"]
    return lambda: call(q, k, v, block_mask=mask, enable_gqa=grouped)


def _triton_attention(spec, shape, dtype, tensors):
    import torch

    from . import peers_triton

    shape = spec.complete(shape)
    peers_triton.check_dtype(dtype)
    if not _plain(shape) or shape["dim"] & (shape["dim"] - 1):
        raise TileError("the Triton kernel computes causal and full attention of widths that are powers of two")
    q, k, v = tensors[:3]
    out = torch.empty_like(q)

    def run():
        peers_triton.attention(q, k, v, out, shape["causal"])
        return out

    return run


_GPU: dict[str, dict[str, Callable]] = {
    "gemm": {"torch_fast_accum": _fast_accumulation, "triton": _triton_gemm},
    "flash_attention": {"cudnn": _cudnn, "flex": _flex, "triton": _triton_attention},
}
