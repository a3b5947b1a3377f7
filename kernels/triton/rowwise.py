"""What a layer does to a row between its matrix products: RMSNorm, after the residual sum or alone, and SiLU gating."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeeagle_edge.kernels.triton.launch import Launch, power_of_two

MAX_WIDTH = 16384  # elements of a row that one program keeps in registers
_GATE_BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,  # [M, width]; with a branch, x + branch_scale * branch is written back
    branch: tl.tensor,  # [M, width]
    weight: tl.tensor,  # [width]
    out: tl.tensor,  # [M, width], out
    x_stride: int,
    branch_stride: int,
    branch_scale: float,
    eps: float,
    width: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Grid (M): a row is read once; sum, mean square and the normalised row in fp32."""
    m = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, block)
    real = j < width
    row = tl.load(x + m * x_stride + j, mask=real, other=0.0).to(tl.float32)
    if adds:
        added = tl.load(branch + m * branch_stride + j, mask=real, other=0.0).to(tl.float32)
        # the norm is that of the sum as it is stored, rounded to the dtype of x
        kept = (row + branch_scale * added).to(x.dtype.element_ty)
        tl.store(x + m * x_stride + j, kept, mask=real)
        row = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    scaled = row * factor * tl.load(weight + j, mask=real, other=0.0).to(tl.float32)
    tl.store(out + m * width + j, scaled.to(out.dtype.element_ty), mask=real)


@triton.jit
def silu_gate_kernel(
    wide: tl.tensor,  # [M, 2 * width]: gate, then up
    out: tl.tensor,  # [M, width], out
    wide_stride: int,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Grid (M, blocks of a row): silu(gate) * up, computed in fp32 and rounded once."""
    m = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    real = j < width
    gate = tl.load(wide + m * wide_stride + j, mask=real, other=0.0).to(tl.float32)
    up = tl.load(wide + m * wide_stride + width + j, mask=real, other=0.0).to(tl.float32)
    tl.store(out + m * width + j, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[M, H] in `dtype`: x [M, H], of any floating dtype, over its root mean square, times weight [H]."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    norm_launch(x, weight, eps, out).run()
    return out


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, scale: float = 1.0
) -> Tensor:
    """Add `scale` times `branch` [M, H] to the residual stream `x` [M, H] in place, and return the sum's RMSNorm."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    norm_launch(x, weight, eps, out, branch, scale).run()
    return out


def silu_gate(wide: Tensor) -> Tensor:
    """[M, I] in the dtype of `wide` [M, 2 I]: SiLU of its first half times its second."""
    out = torch.empty(wide.shape[0], wide.shape[1] // 2, dtype=wide.dtype, device=wide.device)
    gate_launch(wide, out).run()
    return out


def norm_launch(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, branch: Tensor | None = None, scale: float = 1.0
) -> Launch:
    """RMSNorm of `x`, of `x` plus `scale` times `branch` where there is one, into `out`."""
    rows, width = x.shape
    assert width <= MAX_WIDTH
    assert x.stride(1) == 1
    assert branch is None or branch.stride(1) == 1
    block = power_of_two(width)
    arguments = {
        "x": x,
        "branch": x if branch is None else branch,
        "weight": weight,
        "out": out,
        "x_stride": x.stride(0),
        "branch_stride": 0 if branch is None else branch.stride(0),
        "branch_scale": scale,
        "eps": eps,
        "width": width,
        "block": block,
        "adds": branch is not None,
    }
    return Launch(rms_norm_kernel, (rows,), arguments, num_warps=min(16, max(1, block // 512)))


def gate_launch(wide: Tensor, out: Tensor) -> Launch:
    """SiLU gating of `wide` into `out`."""
    rows, width = out.shape
    assert wide.shape[1] == 2 * width
    assert wide.stride(1) == 1
    arguments = {
        "wide": wide,
        "out": out,
        "wide_stride": wide.stride(0),
        "width": width,
        "block": _GATE_BLOCK,
    }
    return Launch(silu_gate_kernel, (rows, -(-width // _GATE_BLOCK)), arguments)
