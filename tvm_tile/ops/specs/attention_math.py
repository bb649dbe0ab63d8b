"""Attention in plain torch, the reference of both attention ops."""

from __future__ import annotations

__all__ = ["plain_attention", "visible"]


def visible(len_q: int, len_kv: int, causal: bool, window: int | None, device="cpu"):
    """bool ``[len_q, len_kv]``: which keys a query sees, the last query standing at the last key."""
    import torch

    position = torch.arange(len_q, device=device)[:, None] + (len_kv - len_q)
    key = torch.arange(len_kv, device=device)[None, :]
    seen = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= key > position - window
        seen &= key < position + window
    return seen


def plain_attention(q, k, v, scale: float, seen=None, bias=None):
    """Softmax attention of one head, a row with no visible key giving 0 and -inf.

    Parameters
    ----------
    q, k, v : Tensor
        ``[queries, dim]``, ``[keys, dim]``, ``[keys, dim_v]`` in the precision to compute in.
    scale : float
        Factor of the scores.
    seen : Tensor, optional
        bool ``[queries, keys]``.
    bias : Tensor, optional
        ``[queries, keys]``, added to the scaled scores.

    Returns
    -------
    (Tensor, Tensor)
        The output and the natural logarithm of the softmax's sum.
    """
    import torch

    scores = (q @ k.T) * scale
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if scores.shape[1] == 0:
        return torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype, device=q.device), torch.full(
            (q.shape[0],), float("-inf"), dtype=q.dtype, device=q.device
        )
    lse = torch.logsumexp(scores, dim=1)
    empty = (scores == float("-inf")).all(dim=1)
    weights = torch.softmax(scores, dim=1).masked_fill(empty[:, None], 0.0)
    return weights @ v, lse
