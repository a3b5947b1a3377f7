"""Attention whose result for a row depends, bit for bit, on nothing but what the row reads.

The plain reference multiplies all rows with all slots at once, so its rounding changes with the number of rows and
slots, and with where an ancestor lies. Here each row gathers its own slots in reading order and goes through them in
blocks of fixed size, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867). Blocks beyond a row's end
change nothing, since exp(-inf) is exactly 0 and exp(0) exactly 1. Where the number of rows is fixed too, every
product has the same shape in every pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.kernels.view import AttentionView

BLOCK = 64  # keys a step


def attention(
    query: Tensor, keys: Tensor, values: Tensor, view: AttentionView, dtype: torch.dtype | None = None
) -> Tensor:
    """Same contract as `reference.attention`; equal bits for a row wherever its ancestors sit, for a given M.

    query: [M, heads, head_dim]; keys, values: [slots, kv_heads, head_dim]; the result is like `query`, in `dtype`.
    """
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    own = view.own_slots(BLOCK)
    scaled = (query.float() * dim**-0.5).reshape(rows * kv_heads, group, dim)
    highest = scaled.new_full((rows, kv_heads, group, 1), float("-inf"))
    total = scaled.new_zeros(rows, kv_heads, group, 1)
    mixed = scaled.new_zeros(rows, kv_heads, group, dim)
    for start in range(0, own.slots.shape[1], BLOCK):
        slots = own.slots[:, start : start + BLOCK].reshape(-1)
        hidden = ~own.readable[:, None, None, start : start + BLOCK]
        k = _by_head(keys.index_select(0, slots), rows)
        v = _by_head(values.index_select(0, slots), rows)
        scores = torch.bmm(scaled, k.transpose(1, 2)).view(rows, kv_heads, group, BLOCK)
        scores.masked_fill_(hidden, float("-inf"))
        raised = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        weights = torch.exp(scores - raised)
        shrink = torch.exp(highest - raised)
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        added = torch.bmm(weights.view(rows * kv_heads, group, BLOCK), v)
        mixed = mixed * shrink + added.view(rows, kv_heads, group, dim)
        highest = raised
    return (mixed / total).view(rows, heads, dim).to(dtype or query.dtype)


def _by_head(gathered: Tensor, rows: int) -> Tensor:
    """[rows * BLOCK, kv_heads, hd] -> [rows * kv_heads, BLOCK, hd] float32, contiguous: a matrix a row and head."""
    _, kv_heads, dim = gathered.shape
    by_head = gathered.view(rows, BLOCK, kv_heads, dim).transpose(1, 2).float()
    return by_head.reshape(rows * kv_heads, BLOCK, dim)
