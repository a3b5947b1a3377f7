"""Storage of the slot pool: keys and values. Which slot belongs to whom is `kv_pool`'s business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVStore:
    """Keys and values of the target, one row a slot, allocated once.

    keys, values: [layers, slots, kv_heads, head_dim], dtype of the attention (fp32, bf16 or fp16), RoPE
    applied.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        """Reserve the whole store; slots never grow afterwards."""
        shape = (layers, slots, kv_heads, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        )

    def zero_non_finite(self, slots: Tensor) -> None:
        """Zero what is not finite in the rows at `slots` [M] int64, in every layer."""
        for rows in (self.keys, self.values):
            rows[:, slots] = rows[:, slots].nan_to_num(0.0, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values together."""
        return self.keys.nbytes + self.values.nbytes
