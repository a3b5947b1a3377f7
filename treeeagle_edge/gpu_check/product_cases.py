"""Inputs for the products with quantised weights in Triton, with what plain PyTorch gives for them."""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.gpu_check.inputs import Case, name_of, normal
from treeeagle_edge.kernels import reference_int8
from treeeagle_edge.kernels.triton import reference as plain
from treeeagle_edge.kernels.triton.operands import BLOCK_SIZE
from treeeagle_edge.model.linear import bitsandbytes_module


def product_case(device: torch.device, dtype: torch.dtype, rows: int, out_size: int, in_size: int) -> Case:
    """Rows times a 4-bit weight of random bytes: any byte is a valid pair of 4-bit numbers."""
    generator = torch.Generator().manual_seed(6)
    count = out_size * in_size
    packed = torch.randint(0, 256, (count // 2,), dtype=torch.uint8, generator=generator).to(device)
    absmax = torch.rand(count // BLOCK_SIZE, generator=generator).to(device) + 0.1
    code = torch.linspace(-1, 1, 16, device=device)
    x, bias = normal((rows, in_size), 1, device, dtype), normal((out_size,), 2, device, dtype)

    def ours() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton.matmul_4bit import matmul_4bit

        return (matmul_4bit(x, packed, absmax, code, bias),)

    def expected() -> tuple[Tensor, ...]:
        return (plain.matmul_4bit(x, packed, absmax, code, bias),)

    return Case(f"4-bit product {name_of(dtype)}, {rows} x {in_size} -> {out_size}", dtype, ours, expected)


def int8_case(device: torch.device, dtype: torch.dtype, rows: int, out_size: int, in_size: int) -> Case:
    """Rows, one with numbers beyond fp16, times an int8 weight."""
    x, bias = normal((rows, in_size), 1, device, dtype), normal((out_size,), 2, device, dtype)
    x[0, 3] = 1e5
    codes = torch.randint(-127, 128, (out_size, in_size), dtype=torch.int8, device=device)
    absmax = torch.rand(out_size, device=device) + 0.1

    def ours() -> tuple[Tensor, ...]:
        from treeeagle_edge.kernels.triton.int8_rows import int8_product

        bitsandbytes_module()  # registers the product of integers
        return (int8_product(x, codes, absmax, bias),)

    def expected() -> tuple[Tensor, ...]:
        return (reference_int8.int8_product(x, codes, absmax, bias),)

    return Case(f"int8 product {name_of(dtype)}, {rows} x {in_size} -> {out_size}", dtype, ours, expected)
