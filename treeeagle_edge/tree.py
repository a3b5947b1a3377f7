"""The draft tree: what the head proposes in one round, in the form that the target verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class DraftTree:
    """A tree of drafted tokens below the root (the last sampled token), parents before children.

    Row 0 is the root. Every other row is a node whose parent has a smaller index.
    """

    tokens: tuple[int, ...]  # [N] token ids, tokens[0] is the root
    parents: tuple[int, ...]  # [N] index of the parent row, -1 for the root
    depths: tuple[int, ...]  # [N] 0 for the root
    log_probs: tuple[float, ...]  # [N] cumulative draft log-probability of the path, 0.0 for the root
    looked_up: int = 0  # so many of the last rows were looked up in the text, not drafted by the head

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_nodes(self) -> int:
        """Drafted nodes: the root is not counted."""
        return len(self.tokens) - 1

    @property
    def head_rows(self) -> int:
        """Rows of the root and of what the head drafted: those that were looked up come after them."""
        return len(self.tokens) - self.looked_up

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """Plain decoding: a tree without drafted nodes."""
        return cls((token,), (-1,), (0,), (0.0,))

    def part(self, rows: Sequence[int]) -> DraftTree:
        """The tree of the root and of `rows`, ascending, each after its parent's."""
        if len(rows) == self.num_nodes:
            return self
        kept = (0, *rows)
        place = {row: at for at, row in enumerate(kept)} | {-1: -1}
        return DraftTree(
            tuple(self.tokens[row] for row in kept),
            tuple(place[self.parents[row]] for row in kept),
            tuple(self.depths[row] for row in kept),
            tuple(self.log_probs[row] for row in kept),
            looked_up=sum(row >= self.head_rows for row in rows),
        )

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """[N] rows from the root down to the row itself, the row included."""
        table: list[tuple[int, ...]] = []
        for row, parent in enumerate(self.parents):
            table.append((row,) if parent < 0 else (*table[parent], row))
        return tuple(table)

    def child(self, row: int, token: int) -> int | None:
        """The child of `row` that carries `token`. A walk asks for few, so this is faster than making `children`."""
        for at in range(row + 1, len(self.tokens)):
            if self.parents[at] == row and self.tokens[at] == token:
                return at
        return None

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """[N] for each row, token id -> row of the child that carries it."""
        table: tuple[dict[int, int], ...] = tuple({} for _ in self.tokens)
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                table[parent][self.tokens[row]] = row
        return table
