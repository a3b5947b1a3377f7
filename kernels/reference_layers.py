"""What a layer does between its matrix products, in plain PyTorch: the definition for all other backends.

Residual sums keep the dtype of the stream; norms and rotations are computed in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.kernels.triton.operands import HeadNorm, Pool, Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[M, H] in `dtype`: `x` [M, H] over its root mean square, times `weight` [H] of the dtype of `x`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps).to(dtype)


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Add `scale` times `branch` [M, H] to the residual stream `x` [M, H] in place, and return the sum's `rms_norm`."""
    return rms_norm(x.add_(branch, alpha=scale), weight, eps, dtype)


def rotate_and_write(
    qkv: Tensor,
    rotation: Rotation,
    slots: Tensor,
    pool: Pool,
    dtype: torch.dtype,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to `slots` [M] int64 of the pool, and return the queries.

    qkv: [M, heads + 2 kv_heads, head_dim] of any floating dtype: queries, keys, values. With `norm`, every query and
    key head is normalised first. The queries come as [M, heads, head_dim] in `dtype`. The pool's dtype is floating.
    """
    kv_heads, dim = pool.keys.shape[1:]
    rotating = qkv[:, :-kv_heads]
    if norm is not None:
        rotating = F.rms_norm(rotating.float(), (dim,), None, norm.eps) * norm.weight
    rotated = rotate(rotating, *rotation.rows)
    pool.keys.index_copy_(0, slots, rotated[:, -kv_heads:].to(pool.keys.dtype))
    pool.values.index_copy_(0, slots, qkv[:, -kv_heads:].to(pool.values.dtype))
    return rotated[:, :-kv_heads].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of `x` [M, heads, head_dim]; `cos`, `sin` [M, 1, head_dim] float32 are `Rotation.rows`.

    Returns float32: pairs (i, i + head_dim / 2) turned by their angle.
    """
    x = x.float()
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_gate(wide: Tensor) -> Tensor:
    """[M, I] in the dtype of `wide` [M, 2 I]: SiLU of its first half, rounded, times its second."""
    half = wide.shape[-1] // 2
    return F.silu(wide[:, :half]).mul_(wide[:, half:])
