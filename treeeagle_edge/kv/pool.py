"""Who owns which slot of the KV memory. Slots have reference counts; cached prefixes give way when room is needed.

Plain Python on purpose: this is the policy, which knows slot numbers and token ids. The tensors are in `kv.store`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treeeagle_edge.errors import InputError


@dataclass(frozen=True)
class PoolUsage:
    """A snapshot for the stats line: slots in all, and slots that somebody owns."""

    slots: int
    used_slots: int


@dataclass(frozen=True)
class CachedPrefix:
    """A finished sequence whose KV is still there.

    head_tokens counts the leading tokens whose head rows are true; plain decoding writes none.
    """

    tokens: tuple[int, ...]
    slots: tuple[int, ...]  # same length, in reading order
    head_tokens: int


@dataclass(frozen=True)
class PrefixMatch:
    """Slots of a cached prefix, already shared with the caller, and how many of them carry true head rows."""

    slots: list[int]
    head_tokens: int


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading positions at which both sequences hold the same token."""
    length = min(len(left), len(right))
    if tuple(left[:length]) == tuple(right[:length]):
        return length
    return next(i for i in range(length) if left[i] != right[i])


class KVPool:
    """Reference-counted slots 0 .. num_slots - 1 and the cached prefixes that hold some of them.

    Every slot is either free or has a count of at least one; a slot returns to the free list when its last
    owner releases it. Cached prefixes are dropped least recently used first, only when a caller needs the
    room.
    """

    def __init__(self, num_slots: int) -> None:
        """Create a pool of `num_slots` free slots."""
        self.num_slots = num_slots
        self._counts = [0] * num_slots
        self._free = list(range(num_slots))  # a heap: low slots first keeps a sequence's rows close together
        self._cache: list[CachedPrefix] = []  # least recently used first

    @property
    def free_slots(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    @property
    def cached(self) -> tuple[CachedPrefix, ...]:
        """Cached prefixes, least recently used first."""
        return tuple(self._cache)

    def usage(self) -> PoolUsage:
        """How full the pool is."""
        return PoolUsage(self.num_slots, self.num_slots - len(self._free))

    def owners(self, slot: int) -> int:
        """Reference count of a slot."""
        return self._counts[slot]

    def take(self, count: int) -> list[int]:
        """Own `count` free slots, dropping cached prefixes while there are too few.

        Raises InputError when live sequences alone fill the pool; nothing is taken then.
        """
        while len(self._free) < count and self._cache:
            self.release(self._cache.pop(0).slots)
        if len(self._free) < count:
            raise InputError(
                f"the KV pool of {self.num_slots:,} slots is full",
                "shorten the conversation with /clear or start with a larger --context",
            )
        taken = [heapq.heappop(self._free) for _ in range(count)]
        for slot in taken:
            self._counts[slot] = 1
        return taken

    def share(self, slots: Iterable[int]) -> None:
        """Add one owner to each of `slots`, which must be owned already."""
        for slot in slots:
            assert self._counts[slot] > 0, f"slot {slot} is free and cannot be shared"
            self._counts[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Drop one owner of each of `slots`; those without owners become free."""
        for slot in slots:
            assert self._counts[slot] > 0, f"slot {slot} is released twice"
            self._counts[slot] -= 1
            if self._counts[slot] == 0:
                heapq.heappush(self._free, slot)

    def match(self, tokens: Sequence[int], *, with_head: bool) -> PrefixMatch:
        """Share the slots of the longest cached prefix of `tokens` with the caller, who must release them.

        With `with_head`, only tokens whose head rows are true count: drafting reads those rows.
        """
        best: CachedPrefix | None = None
        best_length = 0
        for entry in self._cache:
            limit = entry.head_tokens if with_head else len(entry.tokens)
            length = min(common_prefix_length(entry.tokens, tokens), limit)
            if length >= best_length:  # the later entry was used more recently
                best, best_length = entry, length
        if best is None or best_length == 0:
            return PrefixMatch([], 0)
        self._cache.remove(best)
        self._cache.append(best)
        slots = list(best.slots[:best_length])
        self.share(slots)
        return PrefixMatch(slots, min(best_length, best.head_tokens))

    def store(self, tokens: Sequence[int], slots: Sequence[int], head_tokens: int) -> None:
        """Hand a finished sequence's slots over to the cache; entries it contains are dropped."""
        assert len(tokens) == len(slots), "a sequence needs one slot a token"
        if not tokens:
            return
        entry = CachedPrefix(tuple(tokens), tuple(slots), min(head_tokens, len(tokens)))
        for other in list(self._cache):
            covered = len(other.tokens) <= len(tokens) and other.head_tokens <= entry.head_tokens
            if covered and other.tokens == entry.tokens[: len(other.tokens)]:
                self._cache.remove(other)
                self.release(other.slots)
        self._cache.append(entry)

    def clear_cache(self) -> None:
        """Forget every cached prefix."""
        while self._cache:
            self.release(self._cache.pop().slots)
