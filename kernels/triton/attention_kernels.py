"""Tree attention in Triton: a table of ancestors, the prefix in splits, and ancestors merged with the splits.

FlashAttention's running softmax (Dao, arXiv 2307.08691; Milakov and Gimelshein, arXiv 1805.02867) with the keys split
over the grid as in flash-decoding. Exponents are to base 2, whose factor is part of the scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("num_rows", "visible_stride_m", "visible_stride_r"),
    do_not_specialize_on_alignment=("rows",),
)
def ancestor_table_kernel(
    visible: tl.tensor,  # [M, R] bool
    rows: tl.tensor,  # [R] int64 slots
    table: tl.tensor,  # [M, R] int64, out
    counts: tl.tensor,  # [M] int32, out
    num_rows: int,
    visible_stride_m: int,
    visible_stride_r: int,
    block_r: tl.constexpr,
) -> None:
    """One program a query row: gathers the slots that the row may read at the front of its line, in reading order."""
    m = tl.program_id(0)
    r = tl.arange(0, block_r)
    there = r < num_rows
    granted = tl.load(visible + m * visible_stride_m + r * visible_stride_r, mask=there, other=0).to(tl.int32)
    place = tl.cumsum(granted, 0) - 1
    slots = tl.load(rows + r, mask=there, other=0)
    tl.store(table + m * num_rows + place, slots, mask=granted != 0)
    tl.store(counts + m, tl.sum(granted, 0))


@triton.jit
def _load_query(
    pointers: tl.tensor, real: tl.tensor, before: tl.constexpr, operand: tl.constexpr
) -> tl.tensor:
    """Rows of Q in the type of the products, scaled first: by a power of two, which rounds nothing."""
    return (tl.load(pointers, mask=real, other=0.0).to(tl.float32) * before).to(operand)


@triton.jit
def _read_slots(
    query: tl.tensor,  # [rows, block_d], scaled
    slots: tl.tensor,  # int64 slots, of which those at start .. stop - 1 are read
    start: tl.tensor,
    stop: tl.tensor,
    kv_head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    stride_slot: tl.tensor,
    stride_head: tl.tensor,
    scale_stride_slot: tl.tensor,
    after: tl.constexpr,
    head_dim: tl.constexpr,
    rows: tl.constexpr,
    block_d: tl.constexpr,
    block_n: tl.constexpr,
    operand: tl.constexpr,
    quantized: tl.constexpr,
) -> tl.tensor:
    """Every query row reads the same slots: its highest score, the sum of exponentials, and their mix [rows, block_d].

    What lies beyond `stop` is not loaded, so nothing can leak.
    """
    d = tl.arange(0, block_d)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, block_d], tl.float32)
    for first in range(start, stop, block_n):
        n = first + tl.arange(0, block_n)
        there = n < stop
        slot = tl.load(slots + n, mask=there, other=0)
        offsets = (slot * stride_slot + kv_head * stride_head)[:, None] + d[None, :]
        real = there[:, None] & (d < head_dim)[None, :]
        k = tl.load(keys + offsets, mask=real, other=0).to(operand)
        v = tl.load(values + offsets, mask=real, other=0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * after
        if quantized:
            scale_offsets = slot * scale_stride_slot + kv_head
            scores *= tl.load(key_scales + scale_offsets, mask=there, other=0.0)[None, :]
            v = v.to(tl.float32) * tl.load(value_scales + scale_offsets, mask=there, other=0.0)[:, None]
        scores = tl.where(there[None, :], scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        # -inf where nothing was read yet, nor now: 0 serves in its place
        pivot = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(operand), v.to(operand), mixed * shrink[:, None], input_precision="ieee")
        highest = raised
    return highest, total, mixed


@triton.jit
def _even_split(
    length: tl.tensor, splits: tl.tensor, least: tl.constexpr, block_n: tl.constexpr
) -> tl.tensor:
    """Slots a split where the device alone knows the length: even, whole blocks, and none shorter than `least`."""
    return tl.cdiv(tl.maximum(tl.cdiv(length, splits), least), block_n) * block_n


@triton.jit(
    do_not_specialize=("num_rows", "length", "split_length"),
    do_not_specialize_on_alignment=("prefix", "known_length"),
)
def prefix_kernel(
    query: tl.tensor,  # [M, heads, head_dim]
    keys: tl.tensor,  # [slots, kv_heads, head_dim], or int8 with
    values: tl.tensor,
    key_scales: tl.tensor,  # [slots, kv_heads] float32
    value_scales: tl.tensor,
    prefix: tl.tensor,  # [length] int64 slots
    known_length: tl.tensor,  # [1] int64 on the device, which stands for `length` where `on_device`
    partial: tl.tensor,  # [splits, M * heads, head_dim] float32, out: what a split alone would give
    peaks: tl.tensor,  # [splits, M * heads] float32, out: log2 of the split's sum of exponentials
    num_rows: int,  # M * group
    length: int,
    split_length: int,
    query_stride_m: int,
    query_stride_h: int,
    stride_slot: int,
    stride_head: int,
    scale_stride_slot: int,
    before: tl.constexpr,
    after: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_d: tl.constexpr,
    block_q: tl.constexpr,
    block_n: tl.constexpr,
    operand: tl.constexpr,
    quantized: tl.constexpr,
    on_device: tl.constexpr,
    least_split: tl.constexpr,
) -> None:
    """Grid (tiles of rows, KV heads, splits). Row i of a KV head is query head i % group of node i // group.

    All nodes and grouped heads of a tile share every key that is loaded: prefix slots are read by all, without a mask.
    With `on_device`, the grid is made for the longest prefix, and splits beyond the real one do nothing.
    """
    i = tl.program_id(0) * block_q + tl.arange(0, block_q)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if on_device:
        length = tl.load(known_length).to(tl.int32)
        split_length = _even_split(length, tl.num_programs(2), least_split, block_n)
    d = tl.arange(0, block_d)
    head = kv_head * group + i % group
    real = (i < num_rows)[:, None] & (d < head_dim)[None, :]
    offsets = (i // group).to(tl.int64) * query_stride_m + head * query_stride_h
    q = _load_query(query + offsets[:, None] + d[None, :], real, before, operand)

    start = split * split_length
    highest, total, mixed = _read_slots(
        *(q, prefix, start, tl.minimum(start + split_length, length), kv_head),
        *(keys, values, key_scales, value_scales, stride_slot, stride_head, scale_stride_slot),
        *(after, head_dim, block_q, block_d, block_n, operand, quantized),
    )

    if on_device:  # noqa: SIM102 (a condition at compile time)
        if start >= length:  # asked here and not before, where it would cost registers all the way
            return
    row = split * (num_rows * kv_heads) + (i // group) * (group * kv_heads) + head
    divisor = tl.where(total == 0.0, 1.0, total)  # every score -inf: the split weighs nothing
    tl.store(partial + row.to(tl.int64)[:, None] * head_dim + d[None, :], mixed / divisor[:, None], mask=real)
    peak = tl.where(total == 0.0, float("-inf"), highest + tl.log2(divisor))
    tl.store(peaks + row, peak, mask=i < num_rows)


@triton.jit(
    do_not_specialize=("num_nodes", "table_width", "splits"), do_not_specialize_on_alignment=("known_length",)
)
def ancestors_kernel(
    query: tl.tensor,  # [M, heads, head_dim]
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,  # [M, table_width] int64: the first counts[m] slots of line m are read by node m
    counts: tl.tensor,
    known_length: tl.tensor,  # as prefix_kernel has it
    partial: tl.tensor,  # as prefix_kernel left them
    peaks: tl.tensor,
    out: tl.tensor,  # [M, heads, head_dim] of any floating dtype
    num_nodes: int,  # M
    table_width: int,
    splits: int,
    query_stride_m: int,
    query_stride_h: int,
    stride_slot: int,
    stride_head: int,
    scale_stride_slot: int,
    before: tl.constexpr,
    after: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_d: tl.constexpr,
    block_g: tl.constexpr,
    block_n: tl.constexpr,
    operand: tl.constexpr,
    quantized: tl.constexpr,
    on_device: tl.constexpr,
    least_split: tl.constexpr,
    prefix_block: tl.constexpr,
) -> None:
    """Grid (nodes, KV heads): reads the node's own ancestors, itself the last, then merges the splits of the prefix.

    A node's line of the table names nothing else, so what siblings hold, NaN included, cannot reach it.
    """
    node, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d = tl.arange(0, block_g), tl.arange(0, block_d)
    head = kv_head * group + g
    real = (g < group)[:, None] & (d < head_dim)[None, :]
    offsets = node * query_stride_m + head * query_stride_h
    q = _load_query(query + offsets[:, None] + d[None, :], real, before, operand)

    highest, total, mixed = _read_slots(
        *(q, table + node * table_width, 0, tl.load(counts + node), kv_head),
        *(keys, values, key_scales, value_scales, stride_slot, stride_head, scale_stride_slot),
        *(after, head_dim, block_g, block_d, block_n, operand, quantized),
    )

    line = node * (group * kv_heads) + head
    if on_device:  # only splits that were written
        length = tl.load(known_length).to(tl.int32)
        splits = tl.cdiv(length, _even_split(length, splits, least_split, prefix_block))
    # fetched ahead: each split is a wait for memory and little else
    for split in tl.range(0, splits, num_stages=3):
        row = split * num_nodes * (group * kv_heads) + line
        peak = tl.load(peaks + row, mask=g < group, other=float("-inf"))
        part = tl.load(partial + row[:, None] * head_dim + d[None, :], mask=real, other=0.0)
        raised = tl.maximum(highest, peak)
        pivot = tl.where(raised == float("-inf"), 0.0, raised)
        shrink, weight = tl.exp2(highest - pivot), tl.exp2(peak - pivot)
        total = total * shrink + weight
        mixed = mixed * shrink[:, None] + part * weight[:, None]
        highest = raised
    tl.store(out + line[:, None] * head_dim + d[None, :], mixed / total[:, None], mask=real)
