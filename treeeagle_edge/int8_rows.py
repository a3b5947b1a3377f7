"""The int8 product of CUDA: int8 weights with a scale an output channel (LLM.int8, arXiv 2208.07339), and two int8
codes for each activation.

Only the product of integers is bitsandbytes'. Around it that library (0.50) works in fp16: `MatMul8bitLt.forward` casts
activations to it, `int8_vectorwise_quant` takes nothing else, and `int8_mm_dequant` writes it before it converts to the
dtype asked for. Qwen2 leaves the range of fp16, 65,504, on the way in and on the way out. Here scales are fp32 and the
result is rounded once, to the dtype of the activations.

LLM.int8 multiplies columns with outliers apart, and finds them by looking at all rows of a pass, so that a row would
depend on its neighbours. Instead, a number is (128 * high + low) * step. With steps of a 16,256th of the row's largest
number, the rounding of that number's own weight costs more than that of all the small numbers. Both codes go through
one call, which reads the weight once. Sums of integers are exact, so a row has the same bits alone and among others.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127  # an int8 code; the scale of a row of weights is that of its largest one
_HIGH = 128  # what one step of the high code is worth in steps of the low one
_STEPS = LARGEST * _HIGH
# of a weight while it is quantised, in fp32: that fits the room which the plan keeps for sums
_ROWS_AT_A_TIME = 512


def quantise_rows(weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[out, in] of any floating dtype -> (codes [out, in] int8, absmax [out] float32) on `device`.

    A weight is codes * absmax / 127. Goes by pieces, so that little more than the result is held.
    """
    rows = weight.shape[0]
    codes = torch.empty(weight.shape, dtype=torch.int8, device=device)
    absmax = torch.empty(rows, dtype=torch.float32, device=device)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        piece = slice(start, start + _ROWS_AT_A_TIME)
        wide = weight[piece].to(device).float()
        absmax[piece] = wide.abs().amax(dim=1)
        scales = (absmax[piece] / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        codes[piece] = torch.round(wide / scales[:, None]).to(torch.int8)
    return codes, absmax


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, in] of any floating dtype -> (codes [2M, in] int8, step [M, 1] float32): the high codes of all rows, then
    the low ones. A number is (128 * high + low) * step.

    The step of a row that holds inf or NaN is not finite either, and no other row knows of it.
    """
    rows = x.shape[0]
    step = x.abs().amax(dim=1, keepdim=True).float().div_(_STEPS)
    step.clamp_(min=torch.finfo(torch.float32).tiny)
    low = (x / step).round_()  # fp32 whatever x is; |low| <= 127 * 128
    high = (low / _HIGH).round_()
    low.sub_(high, alpha=_HIGH)  # |low| <= 64
    codes = torch.empty(2 * rows, x.shape[1], dtype=torch.int8, device=x.device)
    codes[:rows] = high
    codes[rows:] = low
    return codes, step


def int8_product(x: Tensor, codes: Tensor, absmax: Tensor) -> Tensor:
    """x [M, in] times the weight codes * absmax / 127 ([out, in] int8, [out] float32) -> [M, out] in the dtype of x.

    bitsandbytes must be imported: it registers the product of integers, for CUDA and for the CPU.
    """
    rows, (split, step) = x.shape[0], split_rows(x)
    sums = torch.ops.bitsandbytes.int8_linear_matmul.default(split, codes)  # [2M, out] int32
    y = sums[:rows] * float(_HIGH)  # float32: 128 times the sum may pass the range of int32
    y.add_(sums[rows:])
    return y.mul_(step).mul_(absmax / LARGEST).to(x.dtype)
