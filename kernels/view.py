"""Who may attend to what: the one description that every attention backend takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class OwnSlots:
    """For each query row, the slots that it reads, in reading order: a form that needs no mask."""

    slots: Tensor  # [M, L] int64, L a multiple of the block asked for; a row's tail repeats its first slot
    readable: Tensor  # [M, L] bool, False in the tail


@dataclass(frozen=True)
class BatchView:
    """What rows of separate sequences read, each sequence in slots of its own that follow one another.

    Row m reads slots first[m], ..., first[m] + lengths[m] - 1: what generating many dialogues at once needs.
    """

    first: Tensor  # [M] int64
    lengths: Tensor  # [M] int64, at least 1

    @cached_property
    def slots(self) -> Tensor:
        """[M, L] int64, L the longest; a shorter row's tail repeats its first slot."""
        steps = torch.arange(int(self.lengths.max()), device=self.first.device)
        return self.first[:, None] + torch.where(steps < self.lengths[:, None], steps, 0)

    @cached_property
    def readable(self) -> Tensor:
        """[M, L] bool, False in the tails."""
        return torch.arange(self.slots.shape[1], device=self.first.device) < self.lengths[:, None]


@dataclass(frozen=True)
class AttentionView:
    """Slots that the query rows of one pass read, in reading order.

    A row reads every slot of `prefix`, then those of `rows` that `visible` grants it (its ancestors and itself).
    A causal prefill chunk is the special case of a lower-triangular `visible`.

    With `length`, `prefix` is a buffer of which only the leading `length` slots are read. A CUDA graph needs shapes
    and addresses that stay, so the length is a number on the device, and it changes from pass to pass. Only
    `own_slots` reads it on the host.
    """

    prefix: Tensor  # [T] int64, slots read by every query row
    rows: Tensor  # [R] int64, slots written in this pass (or, while drafting, earlier in this round)
    visible: Tensor  # [M, R] bool, query row m may read rows[r]
    length: Tensor | None = None  # [1] int64, at most T

    @cached_property
    def slots(self) -> Tensor:
        """[T + R] int64: prefix, then rows."""
        return torch.cat((self.prefix, self.rows))

    @cached_property
    def hidden(self) -> Tensor:
        """[M, T + R] bool: True where a query row may not read a slot."""
        rows, capacity = self.visible.shape[0], self.prefix.shape[0]
        if self.beyond is None:
            shared = torch.zeros(rows, capacity, dtype=torch.bool, device=self.prefix.device)
        else:
            shared = self.beyond.expand(rows, capacity)
        return torch.cat((shared, ~self.visible), dim=1)

    @cached_property
    def beyond(self) -> Tensor | None:
        """[T] bool: True where `prefix` is not read, being past `length`; None where all of it is."""
        if self.length is None:
            return None
        return torch.arange(self.prefix.shape[0], device=self.prefix.device) >= self.length

    @cached_property
    def is_open(self) -> bool:
        """Whether every query row may read every slot, so that no mask is needed (plain decoding)."""
        if self.length is not None:
            return False
        if self.visible.numel() == 1:
            return True  # a row always reads itself: no need to ask the device
        return self.visible.device.type == "cpu" and bool(self.visible.all())

    @cached_property
    def contiguous_range(self) -> tuple[int, int] | None:
        """(first, stop) where `slots` are first, first + 1, ..., stop - 1, else None.

        Also None on other devices than the CPU, where finding out would mean to wait for the device.
        """
        slots = self.slots
        if slots.device.type != "cpu" or slots.numel() == 0 or self.length is not None:
            return None
        first, count = int(slots[0]), slots.numel()
        if int(slots[-1]) - first != count - 1:
            return None
        return (first, first + count) if torch.equal(slots, torch.arange(first, first + count)) else None

    def read(self, pool: Tensor) -> Tensor:
        """[T + R, ...] the rows of `pool` [slots, ...] at `slots`: a view of the pool where they are contiguous."""
        if self.contiguous_range is not None:
            first, stop = self.contiguous_range
            return pool[first:stop]
        return pool.index_select(0, self.slots)

    def own_slots(self, block: int) -> OwnSlots:
        """What each row reads, padded to a multiple of `block`; computed once a view. This waits for the device."""
        cached = self._own_slots.get(block)
        if cached is None:
            cached = self._own_slots[block] = self._gather_own_slots(block)
        return cached

    @cached_property
    def _own_slots(self) -> dict[int, OwnSlots]:
        return {}

    def _gather_own_slots(self, block: int) -> OwnSlots:
        prefix = self.prefix if self.length is None else self.prefix[: int(self.length)]
        rows, prefix_length = self.visible.shape[0], prefix.shape[0]
        counts = self.visible.sum(dim=1)
        # a stable sort brings the granted rows to the front and keeps their order
        order = self.visible.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        length = prefix_length + int(counts.max())
        padded = -(-length // block) * block
        own = torch.cat((prefix.expand(rows, -1), self.rows[order]), dim=1)[:, :length]
        own = torch.cat((own, own[:, :1].expand(rows, padded - length)), dim=1)
        readable = torch.arange(padded, device=own.device) < (prefix_length + counts)[:, None]
        return OwnSlots(torch.where(readable, own, own[:, :1]), readable)
