"""What the cases of the GPU check are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. Both calls give fresh results from the same inputs, as tensors to be compared."""

    name: str
    dtype: torch.dtype  # sets how near the results must be
    ours: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]


def normal(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
