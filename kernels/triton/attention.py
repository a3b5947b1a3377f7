"""Attention of a pass's rows through an `AttentionView`, on CUDA: what `kernels.reference.attention` defines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels.triton.attention_kernels import (
    ancestor_table_kernel,
    ancestors_kernel,
    prefix_kernel,
)
from treeeagle_edge.kernels.triton.launch import Launch, operand_dtype, power_of_two, processors
from treeeagle_edge.kernels.triton.operands import KVScales
from treeeagle_edge.kernels.view import AttentionView

MAX_HEAD_DIM = 128
MIN_TILE = 16  # the least that tensor cores multiply
MAX_TILE = 128  # rows: the compiler spills beyond them
_SCALED_TILE = 64  # where scales take registers, too
_MIN_SPLIT = 128  # slots: a shorter split would write more than it reads
_TABLE = "_ancestor_table"


@dataclass(frozen=True)
class AncestorTable:
    """Which slots of a pass each query row reads: its ancestors, then itself."""

    slots: Tensor  # [M, R] int64; the first counts[m] of line m, in reading order, the rest not written
    counts: Tensor  # [M] int32


@dataclass(frozen=True)
class _Tile:
    """How much one program of the prefix kernel takes."""

    rows: int
    slots: int
    num_warps: int


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: AttentionView,
    dtype: torch.dtype | None = None,
    scales: KVScales | None = None,
) -> Tensor:
    """Same contract as `reference.attention`, on CUDA; with `scales`, keys and values are int8.

    query: [M, heads, head_dim] of a floating dtype; keys, values: [slots, kv_heads, head_dim], fp16, bf16, fp32 or
    int8. Products take their factors in the dtype of the pool, 16 bits for int8, and add up in fp32.
    Raises CannotRunError for heads of more than 128.
    """
    if query.shape[2] > MAX_HEAD_DIM:
        raise CannotRunError(
            f"triton attention has heads of {MAX_HEAD_DIM} at most, and these are of {query.shape[2]}",
            "use reference",
        )
    table = ancestor_table(view)
    out = torch.empty(query.shape, dtype=dtype or query.dtype, device=query.device)
    for launch in launches(query, keys, values, view, table, out, scales):
        launch.run()
    return out


def launches(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: AttentionView,
    table: AncestorTable,
    out: Tensor,
    scales: KVScales | None = None,
) -> list[Launch]:
    """The kernels of one call: the prefix in splits, where there is one, then ancestors and the merge into `out`.

    Where the view has a length of its own, grids are those of its whole prefix, whatever the length.
    """
    rows, heads, dim = query.shape
    kv_heads, length = keys.shape[1], view.prefix.shape[0]
    group = heads // kv_heads
    assert heads == group * kv_heads
    width = _operand_width(query.dtype, keys.dtype)
    tile = choose_tile(rows * group, width, MAX_TILE if scales is None else _SCALED_TILE)
    tiles = -(-rows * group // tile.rows)
    split_length = choose_split(length, tiles * kv_heads, processors(query.device), tile.slots)
    splits = -(-length // split_length)
    partial = torch.empty(max(splits, 1), rows * heads, dim, dtype=torch.float32, device=query.device)
    peaks = torch.empty(partial.shape[:2], dtype=torch.float32, device=query.device)
    shared = {
        **_operands(query, keys, values, scales or KVScales(peaks, peaks)),
        "partial": partial,
        "peaks": peaks,
        "group": group,
        "kv_heads": kv_heads,
        "head_dim": dim,
        "block_d": power_of_two(dim, MIN_TILE),
        "operand": operand_dtype(width),
        "quantized": scales is not None,
        "known_length": view.rows if view.length is None else view.length,  # not read without a length
        "on_device": view.length is not None and length > 0,
        "least_split": _MIN_SPLIT,
    }
    over_ancestors = {
        "table": table.slots,
        "counts": table.counts,
        "out": out,
        "num_nodes": rows,
        "table_width": table.slots.shape[1],
        "splits": splits,
        "block_g": power_of_two(group, MIN_TILE),
        "block_n": MIN_TILE,
        "prefix_block": tile.slots,
    }
    last = Launch(ancestors_kernel, (rows, kv_heads), shared | over_ancestors)
    if not splits:
        return [last]
    over_prefix = {
        "prefix": view.prefix,
        "num_rows": rows * group,
        "length": length,
        "split_length": split_length,
        "block_q": tile.rows,
        "block_n": tile.slots,
    }
    grid = (tiles, kv_heads, splits)
    return [Launch(prefix_kernel, grid, shared | over_prefix, num_warps=tile.num_warps), last]


def _operands(query: Tensor, keys: Tensor, values: Tensor, scales: KVScales) -> dict[str, Any]:
    """What is read, how it lies in memory, and how it is scaled. Scales of a pool that has none are never read."""
    assert query.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride()
    before, after = split_scale(query.shape[2])
    return {
        "query": query,
        "keys": keys,
        "values": values,
        "key_scales": scales.keys,
        "value_scales": scales.values,
        "query_stride_m": query.stride(0),
        "query_stride_h": query.stride(1),
        "stride_slot": keys.stride(0),
        "stride_head": keys.stride(1),
        "scale_stride_slot": scales.keys.stride(0),
        "before": before,
        "after": after,
    }


def _operand_width(query: torch.dtype, pool: torch.dtype) -> torch.dtype:
    """Dtype that products take their factors in: the pool's; for int8, which bf16 holds exactly, 16 bits."""
    if pool != torch.int8:
        return pool
    return torch.float16 if query == torch.float16 else torch.bfloat16


def ancestor_table(view: AttentionView) -> AncestorTable:
    """The view's table, made at its first use in a pass and kept with the view, as its own cached properties are.

    Made on the device: its width is the number of rows, since to know the depth would mean to wait for the device.
    """
    table: AncestorTable | None = view.__dict__.get(_TABLE)
    if table is None:
        rows, width = view.visible.shape
        device = view.visible.device
        table = AncestorTable(
            torch.empty(rows, width, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
        table_launch(view, table).run()
        view.__dict__[_TABLE] = table
    return table


def table_launch(view: AttentionView, table: AncestorTable) -> Launch:
    """What fills `table` from who may see whom."""
    rows, width = view.visible.shape
    assert view.rows.stride(0) == 1
    arguments = {
        "visible": view.visible,
        "rows": view.rows,
        "table": table.slots,
        "counts": table.counts,
        "num_rows": width,
        "visible_stride_m": view.visible.stride(0),
        "visible_stride_r": view.visible.stride(1),
        "block_r": power_of_two(width, MIN_TILE),
    }
    return Launch(ancestor_table_kernel, (rows,), arguments, num_warps=1)


def choose_tile(rows: int, dtype: torch.dtype, most: int = MAX_TILE) -> _Tile:
    """A tile of the prefix for `rows` (nodes times grouped heads): all of them, as far as a block's registers reach
    (`resources`).
    """
    if dtype == torch.float32:  # no tensor cores: products of fp32 are exact to the last bits, and slow
        return _Tile(MIN_TILE, 16, 4)
    tall = power_of_two(rows, MIN_TILE, most)
    return _Tile(tall, 32, 8 if tall >= 128 else 4)


def choose_split(length: int, programs: int, cores: int, block: int) -> int:
    """Slots a split, a multiple of `block`: enough splits that `programs` a split keep `cores` busy, none tiny."""
    splits = max(1, -(-2 * cores // programs))
    fair = -(-length // splits)
    return -(-max(fair, _MIN_SPLIT) // block) * block


def split_scale(head_dim: int) -> tuple[float, float]:
    """Two factors of log2(e) / sqrt(head_dim): a power of two for Q, so that scaling rounds nothing, and the rest."""
    scale = math.log2(math.e) / math.sqrt(head_dim)
    power = 2.0 ** math.floor(math.log2(scale))
    return power, scale / power
