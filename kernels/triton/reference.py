"""What the Triton kernels compute, in plain PyTorch: the definitions that tests hold them to.

Attention's is `kernels.reference.attention`; over an int8 pool it is the same over `dequantize` of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE, INT8_MOST, HeadNorm, Pool, Rotation


def write(kv: Tensor, slots: Tensor, pool: Pool) -> None:
    """Keys and values [M, 2 kv_heads, head_dim] into the rows of the pool at `slots` [M]."""
    kv_heads = pool.keys.shape[1]
    halves = (kv[:, :kv_heads].float(), kv[:, kv_heads:].float())
    if pool.scales is None:
        for half, rows in zip(halves, (pool.keys, pool.values), strict=True):
            rows[slots] = half.to(rows.dtype)
        return
    for half, rows, scales in zip(
        halves, (pool.keys, pool.values), (pool.scales.keys, pool.scales.values), strict=True
    ):
        rows[slots], scales[slots] = quantize(half)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, kv_heads, head_dim] float32 -> int8 of the same shape, and scales [M, kv_heads] float32.

    A head with a value that is not finite becomes zeros with a scale of NaN: it spoils what reads it, nothing else.
    """
    largest = x.abs().amax(dim=-1)
    broken = ~x.isfinite().all(dim=-1)
    scales = torch.where(broken, float("nan"), largest / INT8_MOST)
    inverse = torch.where(broken | (largest < 1e-30), 0.0, INT8_MOST / largest)
    whole = torch.floor(x * inverse[..., None] + 0.5)
    return torch.where(broken[..., None], 0.0, whole).to(torch.int8), scales


def dequantize(pool: Pool) -> tuple[Tensor, Tensor]:
    """Keys and values [slots, kv_heads, head_dim] float32 that an int8 pool stands for."""
    assert pool.scales is not None
    return pool.keys * pool.scales.keys[..., None], pool.values * pool.scales.values[..., None]


def rotate_and_write(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
    pool: Pool,
    dtype: torch.dtype,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Queries [M, heads, head_dim] in `dtype`, rotated; keys, rotated, and values go to the pool."""
    kv_heads, dim = pool.keys.shape[1:]
    x = qkv.float()
    rotating, values = x[:, :-kv_heads], x[:, -kv_heads:]
    if norm is not None:
        rotating = F.rms_norm(rotating, (dim,), None, norm.eps) * norm.weight.float()
    cos, sin = (table[rotation.positions][:, None] for table in (rotation.cos, rotation.sin))
    low, high = rotating.chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    write(torch.cat((rotated[:, -kv_heads:], values), dim=1), slots, pool)
    return rotated[:, :-kv_heads].to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[M, H] in `dtype`, computed in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """`x` becomes x + scale * branch, rounded to its dtype; the result is the RMSNorm of that."""
    x.copy_(x.float() + scale * branch.float())
    return rms_norm(x, weight, eps, dtype)


def silu_gate(wide: Tensor) -> Tensor:
    """[M, 2 I] -> [M, I], computed in float32."""
    gate, up = wide.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(wide.dtype)


def unpack_4bit(packed: Tensor, absmax: Tensor, code: Tensor, in_size: int, dtype: torch.dtype) -> Tensor:
    """[out, in] in `dtype`: what a 4-bit weight stands for; see `matmul_4bit.matmul_4bit` for the arguments."""
    pairs = packed.reshape(-1, 1)
    entries = torch.cat((pairs >> 4, pairs & 15), dim=1).reshape(-1, BLOCK_SIZE).long()
    return (code[entries] * absmax[:, None]).reshape(-1, in_size).to(dtype)


def matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y = x W^T + b, accumulated in float32, in the dtype of x."""
    weight = unpack_4bit(packed, absmax, code, x.shape[1], x.dtype)
    y = x.float() @ weight.float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)
