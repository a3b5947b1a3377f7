"""What the kernels are handed beside plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

BLOCK_SIZE = 64  # 4-bit weights that share a scale
MIN_ROWS, MAX_ROWS = 2, 64  # of a 4-bit product: one row is bitsandbytes' own, more than 64 is a prompt
INT8_MOST = 127  # the code of the largest number that shares a scale


@dataclass(frozen=True)
class KVScales:
    """Scales of int8 keys and values: a stored number times its scale is what it stands for."""

    keys: Tensor  # [slots, kv_heads] float32
    values: Tensor  # [slots, kv_heads] float32


@dataclass(frozen=True)
class Pool:
    """Keys and values of one layer."""

    keys: Tensor  # [slots, kv_heads, head_dim] fp16, bf16 or fp32; int8 with scales
    values: Tensor
    scales: KVScales | None = None


@dataclass(frozen=True)
class Rotation:
    """RoPE at the positions of a pass: the tables of `rope.RotaryTable`, and which lines of them the rows take."""

    cos: Tensor  # [positions, head_dim / 2] float32
    sin: Tensor
    positions: Tensor  # [M] int64

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rows, two [M, 1, head_dim] float32 tensors, made once for all layers of a pass.

        The first half of the sines carries the minus sign of rotate-half.
        """
        cos, sin = self.cos[self.positions], self.sin[self.positions]
        return torch.cat((cos, cos), dim=-1).unsqueeze(1), torch.cat((-sin, sin), dim=-1).unsqueeze(1)


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of every query and key head before the rotation, as Qwen3 has it."""

    weight: Tensor  # [heads + kv_heads, head_dim]
    eps: float
