"""How the layers of a model are divided over several cards, by the memory that is free on each.

The first card is the home: it also holds embedding, lm_head, draft head and logits. The others hold layers with their
keys and values, and what a pass needs for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """A card that may hold layers. device: as PyTorch names it; free: bytes."""

    device: str
    free: int


@dataclass(frozen=True)
class CardShare:
    """What one card holds of a plan: the layers first, ..., stop - 1; `nbytes` in all, of its `free` bytes."""

    device: str
    first: int
    stop: int
    nbytes: int
    free: int
    home: bool  # embedding, lm_head and the draft head are here

    @property
    def layers(self) -> int:
        """How many layers it holds."""
        return self.stop - self.first

    @property
    def excess(self) -> int:
        """Bytes that are missing on it."""
        return max(0, self.nbytes - self.free)

    @property
    def contents(self) -> str:
        """In words, such as "layers 0-19, and all that is no layer"."""
        held = f"layers {self.first}-{self.stop - 1}" if self.layers else "no layer"
        return f"{held}, and all that is no layer" if self.home else held


def divide(rooms: Sequence[int], layer: int, count: int) -> list[int]:
    """Layers of each card, `count` in all, in proportion to `rooms`, the bytes that each has left for layers.

    No card gets more of `layer` bytes than it has room for, unless all together have too little.
    """
    rooms = [max(room, 0) for room in rooms]
    whole = sum(rooms)
    most = [room // layer for room in rooms]
    if sum(most) < count:
        most = [count] * len(rooms)
    wanted = [count * room / whole if whole else count / len(rooms) for room in rooms]
    given = [min(int(share), limit) for share, limit in zip(wanted, most, strict=True)]
    while sum(given) < count:
        open_cards = [card for card in range(len(rooms)) if given[card] < most[card]]
        given[max(open_cards, key=lambda card: wanted[card] - given[card])] += 1
    return given


def shares(cards: Sequence[Card], fixed: Sequence[int], layers: Sequence[int]) -> tuple[CardShare, ...]:
    """The plan of each of `cards`, the first of which is the home.

    fixed: bytes that each holds beside its layers; layers: bytes of each layer, keys and values included.
    """
    rooms = [card.free - held for card, held in zip(cards, fixed, strict=True)]
    made: list[CardShare] = []
    for card, held, count in zip(cards, fixed, divide(rooms, max(layers), len(layers)), strict=True):
        first = made[-1].stop if made else 0
        stop = first + count
        made.append(CardShare(card.device, first, stop, held + sum(layers[first:stop]), card.free, not made))
    return tuple(made)
