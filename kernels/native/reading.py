"""What the rows of a pass read: slots in reading order, and the store that they are slots of.

Arrays are C-contiguous. Keys and values are bf16; numpy has no such type, so they travel as uint16 or as the
address of a torch.bfloat16 tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeeagle_edge.kernels.native.library import NativeError, address
from treeeagle_edge.kernels.native.structs import KV, Pass


@dataclass(frozen=True)
class View:
    """What rows read: `prefix` [T], then the part of `tree` [R] that `parents` or `visible` grants.

    With neither, the rows are a causal chunk: each reads those before it, and itself.
    """

    prefix: NDArray[np.int64]
    tree: NDArray[np.int64]
    visible: NDArray[np.bool_ | np.uint8] | None = None  # [M, R]: row m reads tree[r]
    # [R], indices into `tree`, -1 for none: the last M of `tree` are the rows, and read their ancestors
    parents: NDArray[np.int32] | None = None

    def pass_of(
        self,
        rows: int,
        ids: NDArray[np.int64] | None = None,
        positions: NDArray[np.int64] | None = None,
        slots: NDArray[np.int64] | None = None,
    ) -> Pass:
        """The C structure; it borrows the arrays, which must outlive the call."""
        visible = self.visible
        if visible is not None:
            if visible.shape != (rows, len(self.tree)):
                raise NativeError(f"`visible` is {visible.shape}, not {(rows, len(self.tree))}")
            visible = visible.view(np.uint8)
        if self.parents is not None and len(self.parents) != len(self.tree):
            raise NativeError(f"`parents` has {len(self.parents)} entries for {len(self.tree)} slots")
        _check_lengths(rows, ids, positions, slots)
        return Pass(
            rows, address(ids, np.int64), address(positions, np.int64), address(slots, np.int64),
            address(self.prefix, np.int64), len(self.prefix), address(self.tree, np.int64), len(self.tree),
            address(visible, np.uint8), address(self.parents, np.int32), None, None, 0,
        )  # fmt: skip


@dataclass(frozen=True)
class Lists:
    """What rows of separate sequences read: row m the first `counts[m]` slots of `slots[m]`."""

    slots: NDArray[np.int32]  # [M, longest]
    counts: NDArray[np.int32]  # [M]

    def pass_of(
        self,
        rows: int,
        ids: NDArray[np.int64] | None = None,
        positions: NDArray[np.int64] | None = None,
        slots: NDArray[np.int64] | None = None,
    ) -> Pass:
        """The C structure; it borrows the arrays, which must outlive the call."""
        if self.slots.ndim != 2 or len(self.slots) != rows or self.counts.shape != (rows,):
            raise NativeError(f"lists are {self.slots.shape} and {self.counts.shape} for {rows} rows")
        _check_lengths(rows, ids, positions, slots)
        return Pass(
            rows, address(ids, np.int64), address(positions, np.int64), address(slots, np.int64),
            None, 0, None, 0, None, None,
            address(self.slots, np.int32), address(self.counts, np.int32), self.slots.shape[1],
        )  # fmt: skip


def _check_lengths(rows: int, *arrays: NDArray[Any] | None) -> None:
    for name, given in zip(("ids", "positions", "slots"), arrays, strict=True):
        if given is not None and len(given) != rows:
            raise NativeError(f"{name} has {len(given)} entries for {rows} rows")


class Store:
    """Addresses of keys and values, bf16 [layers, slots, kv_heads, head_dim]; `keep` holds what owns them."""

    def __init__(self, keys: int, values: int, slots: int, kv_heads: int, keep: Sequence[Any] = ()) -> None:
        self.struct = KV(keys, values, slots)
        self.kv_heads = kv_heads
        self._keep = tuple(keep)

    @classmethod
    def allocate(cls, layers: int, slots: int, kv_heads: int, head_dim: int) -> Store:
        """A zeroed store of its own (uint16 arrays)."""
        keys, values = (np.zeros((layers, slots, kv_heads, head_dim), np.uint16) for _ in range(2))
        return cls(keys.ctypes.data, values.ctypes.data, slots, kv_heads, keep=(keys, values))
