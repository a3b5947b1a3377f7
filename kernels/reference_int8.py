"""The int8 product of CUDA in plain PyTorch: int8 weights with a scale an output channel (LLM.int8, arXiv 2208.07339),
and two int8 codes for each activation.

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

from treeeagle_edge.kernels.triton.operands import INT8_MOST

HIGH = 128  # what one step of the high code is worth in steps of the low one
STEPS = INT8_MOST * HIGH


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, in] of any floating dtype -> (codes [2M, in] int8, step [M, 1] float32): the high codes of all rows, then
    the low ones. A number is (128 * high + low) * step.

    The step of a row that holds inf or NaN is not finite either, and no other row knows of it.
    """
    rows = x.shape[0]
    step = x.abs().amax(dim=1, keepdim=True).float().div_(STEPS)
    step.clamp_(min=torch.finfo(torch.float32).tiny)
    low = (x / step).round_()  # fp32 whatever x is; |low| <= 127 * 128
    high = (low / HIGH).round_()
    low.sub_(high, alpha=HIGH)  # |low| <= 64
    codes = torch.empty(2 * rows, x.shape[1], dtype=torch.int8, device=x.device)
    codes[:rows] = high
    codes[rows:] = low
    return codes, step


def int8_product(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, in] times the weight codes * absmax / 127 ([out, in] int8, [out] float32), plus bias [out], -> [M, out] in
    the dtype of x.

    bitsandbytes must be imported: it registers the product of integers, for CUDA and for the CPU.
    """
    rows, (split, step) = x.shape[0], split_rows(x)
    sums = integer_product(split, codes)
    y = sums[:rows] * float(HIGH)  # float32: 128 times the sum may pass the range of int32
    y.add_(sums[rows:])
    y = y.mul_(step).mul_(absmax / INT8_MOST).to(x.dtype)
    return y if bias is None else y.add_(bias)


def integer_product(x: Tensor, codes: Tensor) -> Tensor:
    """[M, in] int8 times [out, in] int8 -> [M, out] int32, exactly."""
    sums: Tensor = torch.ops.bitsandbytes.int8_linear_matmul.default(x, codes)
    return sums
