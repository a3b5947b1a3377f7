"""One answer in the making: its tokens, their slots, and how far the head's rows are true."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.model.pass_rows import FeatureRows
from treeeagle_edge.model.small_tensors import Int64Writer


class LiveSequence:
    """Tokens whose keys and values are in the pool, in reading order.

    Slots that are not settled yet (a tree's, or a throwaway) are borrowed until `commit`. `close` gives everything
    back, whatever happened before, so an interrupt loses no slot.

    A head row is made from the feature of the token before it. So there is one waiting feature for each of the tokens
    head_tokens, head_tokens + 1, ..., len(self), the last of which is the root, not committed yet: first those in
    `pending`, then those in `lent`.
    """

    def __init__(
        self,
        pool: KVPool,
        prompt: Sequence[int],
        *,
        with_head: bool,
        reuse: bool,
        capacity: int,
        device: torch.device,
        table: Tensor | None = None,
    ) -> None:
        """Share the longest cached prefix of `prompt`; `capacity` bounds the slot table, in tokens.

        `table` [capacity] int64 is used in place of a new one: rounds on the device read it where it is.
        """
        self._pool = pool
        self.with_head = with_head
        match = pool.match(prompt, with_head=with_head) if reuse else None
        self.slots: list[int] = match.slots if match else []
        self.head_tokens = match.head_tokens if match else 0  # leading tokens whose head rows are true
        self.cached_tokens = len(self.slots)
        self.tokens: list[int] = list(prompt[: self.cached_tokens])
        self.borrowed: list[int] = []
        self.announced: list[int] = []  # borrowed slots that stand in the table, behind the committed ones
        # [rows, taps * Ht] each: features whose head rows are not written yet
        self.pending: list[Tensor] = []
        # the newest such features, still where the target's pass left them: its next pass overwrites them
        self.lent: FeatureRows | None = None
        self.slot_table = torch.zeros(capacity, dtype=torch.int64, device=device) if table is None else table
        self._table_writer = Int64Writer(self.slot_table)
        self.slot_table[: len(self.slots)] = torch.tensor(self.slots, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pending_rows(self) -> int:
        """Features whose head rows are not written yet."""
        return sum(len(features) for features in self.pending) + (len(self.lent) if self.lent else 0)

    def keep_lent(self) -> None:
        """Copy the lent features, before the next pass overwrites them."""
        if self.lent is not None:
            self.pending.append(self.lent.tensor())
            self.lent = None

    def table(self, start: int, stop: int) -> Tensor:
        """[stop - start] int64 slots of the tokens start .. stop - 1, the announced root included."""
        return self.slot_table[start:stop]

    def slots_from(self, first: int, count: int) -> list[int]:
        """Slots of `count` tokens from the `first` on, the announced root included."""
        return [*self.slots[first : first + count], *self.announced][:count]

    def borrow(self, count: int) -> list[int]:
        """Take slots that are given back unless committed."""
        taken = self._pool.take(count)
        self.borrowed.extend(taken)
        return taken

    def announce(self, slots: Sequence[int]) -> None:
        """Write borrowed slots behind the committed ones into the table, so that a head pass can read them."""
        self._table_writer.write(len(self.tokens), slots)
        self.announced = list(slots)

    def commit(
        self, tokens: Sequence[int], slots: Sequence[int], features: FeatureRows | None = None
    ) -> None:
        """Append tokens with the borrowed slots that hold their KV, and give the other borrowed ones back.

        No KV moves. `features` of a verify pass are for the head rows of the tokens after them; they stay where they
        are until `keep_lent`.
        """
        root_row_written = not self.pending
        self.announce(slots)
        self.settle(tokens, slots)
        if features is not None and self.with_head:
            self.head_tokens += root_row_written
            self.lent = features

    def settle(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Commit without touching table and features, for a round on the device, which has seen to both itself."""
        self.tokens.extend(tokens)
        self.slots.extend(slots)
        self.announced = []
        kept = set(slots)
        rest, self.borrowed = [slot for slot in self.borrowed if slot not in kept], []
        self._pool.release(rest)

    def close(self) -> None:
        """Give borrowed slots back and leave the committed ones to the pool as a cached prefix."""
        borrowed, self.borrowed = self.borrowed, []
        self._pool.release(borrowed)
        slots, self.slots = self.slots, []
        self._pool.store(self.tokens, slots, self.head_tokens)
