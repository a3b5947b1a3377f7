"""Storage of the slot pool: keys and values. Which slot belongs to whom is `kv.pool`'s business."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVStore:
    """Keys and values of the target, one row for each slot, allocated once.

    keys, values: [layers, slots, kv_heads, head_dim], dtype of the attention (fp32, bf16 or fp16), RoPE applied.
    rest: stores of the layers after these, where layers are split over several devices.
    """

    keys: Tensor
    values: Tensor
    rest: tuple[KVStore, ...] = field(default=(), kw_only=True)

    @classmethod
    def allocate(
        cls, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        """Reserve the whole store; slots never grow afterwards."""
        shape = (layers, slots, kv_heads, head_dim)
        return cls(
            torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        )

    @classmethod
    def allocate_over(
        cls, places: Sequence[torch.device], slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVStore:
        """Reserve a store whose layers lie on `places`, one device a layer."""
        parts = [
            cls.allocate(len(list(group)), slots, kv_heads, head_dim, dtype, device)
            for device, group in groupby(places)
        ]
        return cls(parts[0].keys, parts[0].values, rest=tuple(parts[1:]))

    def layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [slots, kv_heads, head_dim] of each layer in turn."""
        yield from zip(self.keys.unbind(0), self.values.unbind(0), strict=True)
        for part in self.rest:
            yield from part.layers()

    def zero_non_finite(self, slots: Tensor) -> None:
        """Zero what is not finite in the rows at `slots` [M] int64, in every layer."""
        for rows in (self.keys, self.values):
            rows[:, slots] = rows[:, slots].nan_to_num(0.0, 0.0, 0.0)
        for part in self.rest:
            part.zero_non_finite(slots.to(part.keys.device))

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values together."""
        return self.keys.nbytes + self.values.nbytes + sum(part.nbytes for part in self.rest)
