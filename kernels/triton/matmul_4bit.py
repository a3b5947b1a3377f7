"""Product of a few rows with a 4-bit weight as bitsandbytes stores it, for where bitsandbytes would unpack it whole.

NF4 (QLoRA, arXiv 2305.14314) and FP4 alike: the weight [out, in] in reading order, two values a byte, the first in the
high half; each names an entry of a table of 16, times the scale of its block of 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeeagle_edge.kernels.triton.launch import Launch, operand_dtype, power_of_two, processors
from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE, MAX_ROWS

_TILE_K = 128


@triton.jit(do_not_specialize=("rows",))
def matmul_4bit_kernel(
    x: tl.tensor,  # [M, in]
    packed: tl.tensor,  # [out, in / 2] uint8
    absmax: tl.tensor,  # [out, in / 64] float32
    code: tl.tensor,  # [16] float32
    bias: tl.tensor,  # [out]
    out: tl.tensor,  # [M, out], out
    rows: int,  # M
    x_stride: int,
    in_size: tl.constexpr,
    out_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    operand: tl.constexpr,
    adds: tl.constexpr,
) -> None:
    """Grid (tiles of output channels): each weight is read once, for all rows.

    Computed as W x^T, so that the channels, of which there are many, fill the tall side of the tensor cores' tiles.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.arange(0, block_m)
    channel = (n < out_size)[:, None]
    line = n.to(tl.int64)[:, None]
    sums = tl.zeros([block_n, block_m], tl.float32)
    for first in range(0, in_size, block_k):
        byte = first // 2 + tl.arange(0, block_k // 2)
        inside = channel & (byte < in_size // 2)[None, :]
        pairs = tl.load(packed + line * (in_size // 2) + byte[None, :], mask=inside, other=0)
        nibbles = tl.join(pairs >> 4, pairs & 15).reshape(block_n, block_k).to(tl.int32)

        block = first // 64 + tl.arange(0, block_k // 64)
        held = channel & (block < in_size // 64)[None, :]
        scales = tl.load(absmax + line * (in_size // 64) + block[None, :], mask=held, other=0.0)
        scales = scales[:, :, None].broadcast_to(block_n, block_k // 64, 64).reshape(block_n, block_k)
        # rounded here, as bitsandbytes rounds when it unpacks: the same weights, bit for bit
        weights = (tl.load(code + nibbles) * scales).to(x.dtype.element_ty).to(operand)

        k = first + tl.arange(0, block_k)
        real = (m < rows)[None, :] & (k < in_size)[:, None]
        columns = tl.load(x + m[None, :] * x_stride + k[:, None], mask=real, other=0.0).to(operand)
        sums = tl.dot(weights, columns, sums, input_precision="ieee")
    if adds:
        sums += tl.load(bias + n, mask=n < out_size, other=0.0).to(tl.float32)[:, None]
    target = out + m[None, :] * out_size + n[:, None]
    tl.store(target, sums.to(out.dtype.element_ty), mask=channel & (m < rows)[None, :])


def matmul_4bit(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y = x W^T + b in the dtype of x, for `x` [M, in] of 1 to 64 rows, fp16, bf16 or fp32.

    packed: uint8, out * in / 2 of them in any shape; absmax: [out * in / 64] float32, nested scales expanded; code:
    [16] float32; bias: [out]. `in` is a multiple of 64, so that no block of scales crosses two output channels.
    """
    out_size = packed.numel() * 2 // x.shape[1]
    out = torch.empty(x.shape[0], out_size, dtype=x.dtype, device=x.device)
    matmul_launch(x, packed, absmax, code, out, bias).run()
    return out


def matmul_launch(
    x: Tensor, packed: Tensor, absmax: Tensor, code: Tensor, out: Tensor, bias: Tensor | None = None
) -> Launch:
    """The product of `x` with the weight into `out`."""
    (rows, in_size), out_size = x.shape, out.shape[1]
    assert 1 <= rows <= MAX_ROWS
    assert in_size % BLOCK_SIZE == 0
    assert x.stride(1) == 1
    assert packed.numel() * 2 == out_size * in_size
    assert absmax.numel() * BLOCK_SIZE == out_size * in_size
    assert absmax.dtype == code.dtype == torch.float32
    assert packed.is_contiguous()
    assert absmax.is_contiguous()
    # narrow tiles where wide ones would leave multiprocessors without work
    block_n = 32 if out_size >= 32 * processors(x.device) else 16
    arguments = {
        "x": x,
        "packed": packed,
        "absmax": absmax,
        "code": code,
        "bias": code if bias is None else bias,
        "out": out,
        "rows": rows,
        "x_stride": x.stride(0),
        "in_size": in_size,
        "out_size": out_size,
        "block_m": power_of_two(rows, 16),
        "block_n": block_n,
        "block_k": _TILE_K,
        "operand": operand_dtype(x.dtype),
        "adds": bias is not None,
    }
    return Launch(matmul_4bit_kernel, (-(-out_size // block_n),), arguments)
