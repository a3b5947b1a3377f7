"""What a case of the GPU check is, and random inputs for kernels and passes.

Inputs are drawn on the CPU, so they are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.kernels.triton import reference as plain
from treeeagle_edge.kernels.triton.operands import KVScales, Pool


@dataclass(frozen=True)
class Case:
    """One kernel in one shape. Both calls compute new results from the same inputs, as tensors to be compared."""

    name: str
    dtype: torch.dtype  # decides how close the results must be
    ours: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def normal(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def random_tree(rows: int) -> Tensor:
    """[rows, rows] bool: each row sees itself and its ancestors in a random tree."""
    generator = torch.Generator().manual_seed(rows)
    visible = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        visible[row] |= visible[int(torch.randint(0, row, (1,), generator=generator))]
    return visible


def scattered_slots(rows: int, device: torch.device) -> Tensor:
    """[rows] int64: different slots of 2 * rows, in no order."""
    return torch.randperm(2 * rows, generator=torch.Generator().manual_seed(7))[:rows].to(device)


def empty_pool(slots: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Pool:
    """Zeros; int8 with scales where `dtype` is int8."""
    keys, values = (torch.zeros(slots, kv_heads, dim, dtype=dtype, device=device) for _ in range(2))
    if dtype != torch.int8:
        return Pool(keys, values)
    k, v = (torch.zeros(slots, kv_heads, device=device) for _ in range(2))
    return Pool(keys, values, KVScales(k, v))


def floats_of(pool: Pool) -> tuple[Tensor, Tensor]:
    """The keys and values of the pool, dequantised where they are int8."""
    return (pool.keys, pool.values) if pool.scales is None else plain.dequantize(pool)
