"""What the int8 product of CUDA does around its product of integers, in two launches in place of some fifteen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeeagle_edge.kernels.reference_int8 import HIGH, STEPS, integer_product
from treeeagle_edge.kernels.triton.launch import Launch, power_of_two
from treeeagle_edge.kernels.triton.operands import INT8_MOST

_SPLIT_BLOCK = 4096  # numbers of a row that are in registers at a time
_SCALE_BLOCK = 1024
_TINY = torch.finfo(torch.float32).tiny


@triton.jit(do_not_specialize=("rows",))
def split_kernel(
    x: tl.tensor,  # [M, width]
    codes: tl.tensor,  # [2 M, width] int8, out
    steps: tl.tensor,  # [M] float32, out
    rows: int,  # M
    x_stride: int,
    width: tl.constexpr,
    block: tl.constexpr,
    high: tl.constexpr,
    most: tl.constexpr,  # steps that the row's largest number is worth
    tiny: tl.constexpr,
) -> None:
    """Grid (M): a row is read twice, for its largest number and for its codes; the second time from a cache."""
    m = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, block)
    peaks = tl.zeros([block], tl.float32)
    broken = tl.zeros([block], tl.int32)
    for first in range(0, width, block):
        value = tl.load(x + m * x_stride + first + j, mask=first + j < width, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(value))
        broken |= (tl.abs(value) < float("inf")).to(tl.int32) ^ 1  # NaN, too, is not below infinity
    step = tl.maximum(tl.max(peaks, 0) / most, tiny)
    step = tl.where(tl.max(broken, 0) > 0, float("nan"), step)
    tl.store(steps + m, step)
    for first in range(0, width, block):
        real = first + j < width
        value = tl.load(x + m * x_stride + first + j, mask=real, other=0.0).to(tl.float32)
        whole = tl.floor(value / step + 0.5)
        upper = tl.floor(whole / high + 0.5)
        target = codes + first + j
        tl.store(target + m * width, upper.to(tl.int8), mask=real)
        tl.store(target + (m + rows) * width, (whole - upper * high).to(tl.int8), mask=real)


@triton.jit(do_not_specialize=("rows",))
def scale_kernel(
    sums: tl.tensor,  # [2 M, width] int32: of the high codes, then of the low ones
    steps: tl.tensor,  # [M] float32
    absmax: tl.tensor,  # [width] float32
    bias: tl.tensor,  # [width]
    out: tl.tensor,  # [M, width], out
    rows: int,  # M
    width: tl.constexpr,
    block: tl.constexpr,
    high: tl.constexpr,
    largest: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Grid (M, blocks of a row): both sums as one number, scaled, and rounded once."""
    m = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * block + tl.arange(0, block)
    real = j < width
    upper = tl.load(sums + m * width + j, mask=real, other=0).to(tl.float32)
    lower = tl.load(sums + (m + rows) * width + j, mask=real, other=0).to(tl.float32)
    scale = tl.load(absmax + j, mask=real, other=0.0) / largest
    y = (upper * high + lower) * tl.load(steps + m) * scale
    if adds:
        y += tl.load(bias + j, mask=real, other=0.0).to(tl.float32)
    tl.store(out + m * width + j, y.to(out.dtype.element_ty), mask=real)


def int8_product(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same contract as `reference_int8.int8_product`; the result is rounded once, after the bias."""
    split = torch.empty(2 * x.shape[0], x.shape[1], dtype=torch.int8, device=x.device)
    steps = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    split_launch(x, split, steps).run()
    out = torch.empty(x.shape[0], codes.shape[0], dtype=x.dtype, device=x.device)
    scale_launch(integer_product(split, codes), steps, absmax, out, bias).run()
    return out


def split_launch(x: Tensor, codes: Tensor, steps: Tensor) -> Launch:
    """The codes [2 M, width] and steps [M] of `x` [M, width]."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert codes.is_contiguous()
    arguments = {
        "x": x,
        "codes": codes,
        "steps": steps,
        "rows": rows,
        "x_stride": x.stride(0),
        "width": width,
        "block": power_of_two(width, most=_SPLIT_BLOCK),
        "high": float(HIGH),
        "most": float(STEPS),
        "tiny": _TINY,
    }
    return Launch(split_kernel, (rows,), arguments, num_warps=8)


def scale_launch(
    sums: Tensor, steps: Tensor, absmax: Tensor, out: Tensor, bias: Tensor | None = None
) -> Launch:
    """What `sums` [2 M, width] stand for, into `out` [M, width]."""
    rows, width = out.shape
    assert sums.is_contiguous()
    assert absmax.is_contiguous()
    assert bias is None or bias.is_contiguous()
    arguments = {
        "sums": sums,
        "steps": steps,
        "absmax": absmax,
        "bias": absmax if bias is None else bias,
        "out": out,
        "rows": rows,
        "width": width,
        "block": _SCALE_BLOCK,
        "high": float(HIGH),
        "largest": float(INT8_MOST),
        "adds": bias is not None,
    }
    return Launch(scale_kernel, (rows, triton.cdiv(width, _SCALE_BLOCK)), arguments)
