"""Keys and values on their way to the pool: rotated, quantised where the pool is int8, written to their slots."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeeagle_edge.kernels.triton.launch import Launch, power_of_two
from treeeagle_edge.kernels.triton.operands import HeadNorm, Pool, Rotation


@triton.jit
def _put(
    low: tl.tensor,  # [block] first half of a head
    high: tl.tensor,  # its second half
    pool: tl.tensor,  # one row a (slot, head)
    scales: tl.tensor,
    line: tl.tensor,  # slot * kv_heads + head
    half: tl.constexpr,
    block: tl.constexpr,
    quantized: tl.constexpr,
    tiny: tl.constexpr = 1e-30,  # the inverse of what is smaller could overflow: it becomes 0
) -> None:
    """Write one head, in int8 with the largest value at 127; what is not finite is kept as a scale of NaN."""
    j = tl.arange(0, block)
    if quantized:
        largest = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        finite = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        broken = tl.sum(finite.to(tl.int32), 0) < block
        scale = tl.where(broken, float("nan"), largest / 127.0)
        inverse = tl.where(broken | (largest < tiny), 0.0, 127.0 / tl.maximum(largest, tiny))
        low = tl.where(broken, 0.0, tl.floor(low * inverse + 0.5))
        high = tl.where(broken, 0.0, tl.floor(high * inverse + 0.5))
        tl.store(scales + line, scale)
    target = pool + line * (2 * half) + j
    tl.store(target, low.to(pool.dtype.element_ty), mask=j < half)
    tl.store(target + half, high.to(pool.dtype.element_ty), mask=j < half)


# positions and slots are parts of longer tensors, wherever these may begin: no second kernel for every other one
@triton.jit(do_not_specialize_on_alignment=("positions", "slots"))
def write_kernel(
    qkv: tl.tensor,  # [M, heads + 2 kv_heads, head_dim]; without rotation [M, 2 kv_heads, head_dim]
    cos: tl.tensor,  # [positions, half] float32
    sin: tl.tensor,
    positions: tl.tensor,  # [M] int64
    norm: tl.tensor,  # [heads + kv_heads, head_dim]
    slots: tl.tensor,  # [M] int64
    query: tl.tensor,  # [M, heads, head_dim], out
    keys: tl.tensor,  # [slots, kv_heads, head_dim], written
    values: tl.tensor,
    key_scales: tl.tensor,  # [slots, kv_heads] float32, written where quantized
    value_scales: tl.tensor,
    stride_m: int,
    stride_h: int,
    eps: float,
    heads: tl.constexpr,  # 0 without rotation: then there are keys and values only
    kv_heads: tl.constexpr,
    half: tl.constexpr,  # head_dim / 2
    block: tl.constexpr,
    rotates: tl.constexpr,
    normalizes: tl.constexpr,
    quantized: tl.constexpr,
) -> None:
    """Grid (M, heads of qkv): one head of one row, in two halves, since rotate-half pairs i with i + half."""
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, block)
    real = j < half
    source = qkv + m * stride_m + head * stride_h + j
    low = tl.load(source, mask=real, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    if rotates and head < heads + kv_heads:  # queries and keys; values are not rotated
        if normalizes:
            factor = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * half) + eps)
            weights = norm + head * (2 * half) + j
            low *= factor * tl.load(weights, mask=real, other=0.0).to(tl.float32)
            high *= factor * tl.load(weights + half, mask=real, other=0.0).to(tl.float32)
        angle = tl.load(positions + m) * half + j
        c = tl.load(cos + angle, mask=real, other=0.0)
        s = tl.load(sin + angle, mask=real, other=0.0)
        low, high = low * c - high * s, high * c + low * s
    if head < heads:
        target = query + (m * heads + head) * (2 * half) + j
        tl.store(target, low.to(query.dtype.element_ty), mask=real)
        tl.store(target + half, high.to(query.dtype.element_ty), mask=real)
    else:
        slot = tl.load(slots + m)
        if head < heads + kv_heads:
            _put(low, high, keys, key_scales, slot * kv_heads + (head - heads), half, block, quantized)
        else:
            line = slot * kv_heads + (head - heads - kv_heads)
            _put(low, high, values, value_scales, line, half, block, quantized)


def write(kv: Tensor, slots: Tensor, pool: Pool) -> None:
    """Write `kv` [M, 2 kv_heads, head_dim], keys first, of any floating dtype, to `slots` [M] int64 of the pool."""
    write_launch(kv, slots, pool).run()


def rotate_and_write(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
    pool: Pool,
    dtype: torch.dtype,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to `slots` [M] int64; returns the queries [M, heads, head_dim].

    qkv: [M, heads + 2 kv_heads, head_dim] of any floating dtype: queries, keys, values. The queries come in `dtype`.
    """
    heads = qkv.shape[1] - 2 * pool.keys.shape[1]
    query = torch.empty(qkv.shape[0], heads, qkv.shape[2], dtype=dtype, device=qkv.device)
    write_launch(qkv, slots, pool, rotation, norm, query).run()
    return query


def write_launch(
    qkv: Tensor,
    slots: Tensor,
    pool: Pool,
    rotation: Rotation | None = None,
    norm: HeadNorm | None = None,
    query: Tensor | None = None,
) -> Launch:
    """The kernel of both: with `rotation` there are queries in front, which go to `query`."""
    rows, parts, dim = qkv.shape
    kv_heads = pool.keys.shape[1]
    assert dim % 2 == 0
    assert qkv.stride(2) == 1
    assert (rotation is None) == (query is None)
    assert pool.keys.is_contiguous()
    assert pool.values.is_contiguous()
    assert slots.stride(0) == 1
    assert rotation is None or rotation.positions.stride(0) == 1
    assert norm is None or norm.weight.is_contiguous()
    unused = pool.keys  # a pointer that is never followed
    scales = pool.scales
    arguments: dict[str, Any] = {
        "qkv": qkv,
        "cos": unused if rotation is None else rotation.cos,
        "sin": unused if rotation is None else rotation.sin,
        "positions": slots if rotation is None else rotation.positions,
        "norm": unused if norm is None else norm.weight,
        "slots": slots,
        "query": unused if query is None else query,
        "keys": pool.keys,
        "values": pool.values,
        "key_scales": unused if scales is None else scales.keys,
        "value_scales": unused if scales is None else scales.values,
        "stride_m": qkv.stride(0),
        "stride_h": qkv.stride(1),
        "eps": 0.0 if norm is None else norm.eps,
        "heads": parts - 2 * kv_heads,
        "kv_heads": kv_heads,
        "half": dim // 2,
        "block": power_of_two(dim // 2),
        "rotates": rotation is not None,
        "normalizes": norm is not None,
        "quantized": scales is not None,
    }
    return Launch(write_kernel, (rows, parts), arguments, num_warps=1)
