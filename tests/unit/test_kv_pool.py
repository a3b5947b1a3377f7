"""The slot pool: whatever happens, no slot is lost and none has an owner too many."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treeeagle_edge.errors import InputError
from treeeagle_edge.kv.pool import KVPool, common_prefix_length

SLOTS = 24


class PoolMachine(RuleBasedStateMachine):
    """Sequences that grow, fork from the cache, roll back and end, in any order, on a pool too small for all
    of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(SLOTS)
        self.live: list[tuple[list[int], list[int]]] = []  # (tokens, slots)

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=10), with_head=st.booleans())
    def open(self, tokens: list[int], with_head: bool) -> None:
        match = self.pool.match(tokens, with_head=with_head)
        assert len(match.slots) <= len(tokens)
        assert match.head_tokens <= len(match.slots)
        slots = list(match.slots)
        try:
            slots += self.pool.take(len(tokens) - len(slots))
        except InputError:
            self.pool.release(slots)
            return
        self.live.append((tokens, slots))

    @rule(pick=st.integers(0, 5), nodes=st.integers(1, 6), accepted=st.integers(0, 6))
    def tree_round(self, pick: int, nodes: int, accepted: int) -> None:
        if not self.live:
            return
        tokens, slots = self.live[pick % len(self.live)]
        try:
            borrowed = self.pool.take(nodes)
        except InputError:
            return
        kept = borrowed[:accepted]
        self.pool.release(borrowed[len(kept) :])
        tokens.extend([1] * len(kept))
        slots.extend(kept)

    @rule(pick=st.integers(0, 5), keep=st.booleans(), head_share=st.floats(0, 1))
    def end(self, pick: int, keep: bool, head_share: float) -> None:
        if not self.live:
            return
        tokens, slots = self.live.pop(pick % len(self.live))
        if keep:
            self.pool.store(tokens, slots, int(head_share * len(tokens)))
        else:
            self.pool.release(slots)

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def every_slot_has_exactly_its_owners(self) -> None:
        holders = [slots for _, slots in self.live] + [list(entry.slots) for entry in self.pool.cached]
        for slot in range(SLOTS):
            assert self.pool.owners(slot) == sum(held.count(slot) for held in holders)
        assert self.pool.free_slots == sum(self.pool.owners(slot) == 0 for slot in range(SLOTS))
        assert self.pool.usage().used_slots == SLOTS - self.pool.free_slots

    @invariant()
    def no_sequence_holds_a_slot_twice(self) -> None:
        for _, slots in self.live:
            assert len(set(slots)) == len(slots)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_longest_cached_prefix_is_shared() -> None:
    pool = KVPool(16)
    first = pool.take(4)
    pool.store([1, 2, 3, 4], first, 4)
    second = pool.take(3)
    pool.store([1, 9, 9], second, 3)
    match = pool.match([1, 2, 3, 7], with_head=True)
    assert match.slots == first[:3]
    assert [pool.owners(slot) for slot in first] == [2, 2, 2, 1]


def test_only_true_head_rows_are_reused_for_drafting() -> None:
    """A prefix of plain decoding has no head rows: drafting may not read it, plain decoding may."""
    pool = KVPool(8)
    pool.store([5, 6, 7], pool.take(3), 1)
    assert len(pool.match([5, 6, 7], with_head=True).slots) == 1
    assert len(pool.match([5, 6, 7], with_head=False).slots) == 3


def test_least_recently_used_prefix_gives_way_first() -> None:
    pool = KVPool(6)
    pool.store([1, 1], pool.take(2), 2)
    pool.store([2, 2], pool.take(2), 2)
    pool.release(pool.match([1, 1], with_head=True).slots)  # used again: now the most recent
    pool.take(4)
    assert [entry.tokens for entry in pool.cached] == [(1, 1)]


def test_a_longer_sequence_replaces_the_prefix_it_contains() -> None:
    pool = KVPool(8)
    slots = pool.take(2)
    pool.store([1, 2], slots, 2)
    match = pool.match([1, 2, 3], with_head=True)
    pool.store([1, 2, 3], [*match.slots, *pool.take(1)], 3)
    assert [entry.tokens for entry in pool.cached] == [(1, 2, 3)]
    assert pool.usage().used_slots == 3


def test_live_sequences_are_never_evicted() -> None:
    pool = KVPool(4)
    pool.take(3)
    with pytest.raises(InputError, match="pool of 4 slots is full"):
        pool.take(2)
    assert pool.free_slots == 1


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 4], [1, 2, 3], 2), ([9], [1], 0)],
)
def test_common_prefix_length(left: list[int], right: list[int], length: int) -> None:
    assert common_prefix_length(left, right) == length
