"""Attention in plain PyTorch: the definition that every other backend is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.limits import ATTENTION_SCORES


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: AttentionView | BatchView,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(Q K^T / sqrt(head_dim)) V for the query rows of one pass, read through `view`.

    query: [M, heads, head_dim], any floating dtype; keys, values: [slots, kv_heads, head_dim], of one layer; query
    head h reads KV head h // (heads / kv_heads). Returns [M, heads, head_dim] in `dtype`, that of `query` where None.

    Q is scaled before the product and everything is accumulated in fp32, so that large Q and K cannot overflow a
    16-bit range. K and V are never repeated for grouped heads. What a row may not read never reaches it, not even as
    0 x NaN: a node whose numbers are not finite spoils only itself and its descendants.
    """
    dtype = dtype or query.dtype
    if isinstance(view, BatchView):
        return _attend_each(query, keys, values, view).to(dtype)
    scaled = query.float() * query.shape[-1] ** -0.5
    k, v = view.read(keys).float(), view.read(values).float()
    hidden = None if view.is_open else view.hidden
    # a weight of 0 times NaN is NaN, so NaN in V has to go; a row that may read it still has NaN scores from K
    if hidden is not None:
        shared = view.prefix.shape[0]
        read = v[:shared] if view.beyond is None else v[:shared].masked_fill(view.beyond[:, None, None], 0.0)
        v = torch.cat((read, v[shared:].nan_to_num(0.0, 0.0, 0.0)))
    rows, heads = query.shape[0], query.shape[1]
    step = max(1, ATTENTION_SCORES // (heads * k.shape[0]))
    if rows <= step:
        return _attend(scaled, k, v, hidden).to(dtype)
    blocks = [
        _attend(scaled[i : i + step], k, v, None if hidden is None else hidden[i : i + step])
        for i in range(0, rows, step)
    ]
    return torch.cat(blocks).to(dtype)


def _attend(scaled: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """scaled: [m, heads, hd]; k, v: [S, kv_heads, hd], all float32; hidden: [m, S] bool."""
    rows, heads, dim = scaled.shape
    length, kv_heads = k.shape[0], k.shape[1]
    group = heads // kv_heads
    grouped = scaled.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, rows * group, dim)
    scores = torch.bmm(grouped, k.permute(1, 2, 0))
    if hidden is not None:
        scores.view(kv_heads, rows, group, length).masked_fill_(hidden[:, None], float("-inf"))
    mixed = torch.bmm(torch.softmax(scores, dim=-1), v.transpose(0, 1))
    return mixed.view(kv_heads, rows, group, dim).transpose(0, 1).reshape(rows, heads, dim)


def _attend_each(query: Tensor, keys: Tensor, values: Tensor, view: BatchView) -> Tensor:
    """[M, heads, hd]: every row over keys of its own, by PyTorch's scaled_dot_product_attention."""
    rows = query.shape[0]
    k, v = (
        pool[view.slots.flatten()].view(rows, -1, *pool.shape[1:]).transpose(1, 2) for pool in (keys, values)
    )
    mixed = F.scaled_dot_product_attention(
        query[:, :, None].to(k.dtype), k, v, attn_mask=view.readable[:, None, None], enable_gqa=True
    )
    return mixed[:, :, 0]
