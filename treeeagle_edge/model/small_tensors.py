"""Small tensors made from Python lists, and rows taken out of large ones: what every round does between its passes.

A pass fills the CPU's caches with weights. Right after it, each operation of PyTorch costs tens of microseconds; NumPy
does the same in a third of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def int64_tensor(values: Sequence[Any], device: torch.device) -> Tensor:
    """Nested sequences of ints as int64 on `device`."""
    return torch.from_numpy(np.array(values, np.int64)).to(device)


def take_rows(table: Tensor, rows: Sequence[int]) -> Tensor:
    """[R, ...] a copy of `rows` of `table`."""
    if table.device.type != "cpu" or table.dtype is torch.bfloat16:  # NumPy has no bf16
        return table[list(rows)]
    return torch.from_numpy(table.numpy().take(rows, axis=0))


class Int64Writer:
    """Writes into `table` [T] int64 time and again."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._array = table.numpy() if table.device.type == "cpu" else None

    def write(self, start: int, values: Sequence[int]) -> None:
        """`values` from `start` on."""
        stop = start + len(values)
        if self._array is not None:
            self._array[start:stop] = values
        else:
            self._table[start:stop] = int64_tensor(values, self._table.device)
