"""Drafts a tree with an EAGLE-3 head (arXiv 2503.01840): dynamic expansion as in EAGLE-2 (arXiv 2406.16858).

Levels are drafted one after another. Some candidates of each level are expanded, and each expansion scores a few
children. Of all candidates ever scored, the best form the tree; since no child scores above its parent, they always
hang together. `growth` decides how many are expanded and kept.

`Drafter` does this with any head, one call a level. It is the definition: heads that grow a tree in a single call
have to grow the same one.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Protocol

from torch import Tensor

from treeeagle_edge.drafting.growth import Candidate, Growth
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.model.protocols import DraftHead, TreeHead
from treeeagle_edge.tree import DraftTree

_SCORE = attrgetter("score")


class TreeDrafter(Protocol):
    """Grows one tree a round."""

    def draft(self, features: FeatureRows, rows: PassRows, growth: Growth) -> DraftTree | None:
        """Run the head on `rows` with their true `features`, then draft below the last row, which is the root.

        The rows form a chain, and their slots follow the prefix in the table. Returns None where the head's scores
        are not finite: the round is then decoded plainly.
        """
        ...


def drafter_for(head: DraftHead, scratch: range) -> TreeDrafter:
    """What grows trees with `head`. `scratch`: rows of its store, enough for all expansions of a round."""
    return OneCallDrafter(head, scratch) if isinstance(head, TreeHead) else Drafter(head, scratch)


class OneCallDrafter:
    """Leaves the whole tree to the head."""

    def __init__(self, head: TreeHead, scratch: range) -> None:
        """See `drafter_for`."""
        self._head = head
        self._scratch = scratch

    def draft(self, features: FeatureRows, rows: PassRows, growth: Growth) -> DraftTree | None:
        """See `TreeDrafter.draft`."""
        tree, growth.levels = self._head.draft_tree(features, rows, self._scratch, growth.rule)
        return tree


class Drafter:
    """Leads the head from level to level. Its expansions lie in `scratch` rows and are never committed."""

    def __init__(self, head: DraftHead, scratch: range) -> None:
        """See `drafter_for`."""
        self._head = head
        self._scratch = scratch

    def draft(self, features: FeatureRows, rows: PassRows, growth: Growth) -> DraftTree | None:
        """See `TreeDrafter.draft`."""
        scored = self._head.extend_rows(features.tensor(), rows, growth.branching)
        prefix = range(rows.prefix.start, rows.prefix.stop + len(rows.ids))
        return self._below(rows.ids[-1], scored, rows.table, prefix, growth)

    def _below(
        self, root: int, scored: HeadOutput, table: Tensor, prefix: range, growth: Growth
    ) -> DraftTree | None:
        """Draft below the root.

        scored: the head's output for the root's row. table: int64 slots. prefix: its entries that hold all head rows,
        the root's the last.
        """
        level: list[Candidate | None] = [None]  # what the head ran on last; None is the root
        rows: dict[Candidate | None, int] = {None: -1}  # scratch rows; the root's is in the prefix
        parents: list[int] = []  # of all scratch rows of this round
        candidates: list[Candidate] = []
        for depth in range(1, growth.depth + 1):
            children = _children(level, scored, depth, growth)
            if children is None:
                return None
            # a stable sort: parents stay before their children
            candidates = sorted([*candidates, *children], key=_SCORE, reverse=True)
            chosen = growth.expand(children, candidates)
            if not chosen or depth == growth.depth:
                break
            first = len(parents) - len(level) if depth > 1 else -1  # scratch row of the level's first
            above = [rows[candidate.parent] for candidate in chosen]
            rows.update(zip(chosen, range(len(parents), len(parents) + len(chosen)), strict=True))
            parents += above
            # a row's rotary position is one less than its token's place: row t pairs feature t with token t + 1
            place = prefix.stop - 1 + depth
            tree = self._scratch[: len(parents)]
            ids = [candidate.token for candidate in chosen]
            asking = PassRows(ids, [place - 1] * len(ids), tree[-len(ids) :], table, prefix, tree, parents)
            scored = self._head.step_rows(
                scored.hidden, [row - first for row in above], asking, growth.branching
            )
            level = [*chosen]
        return _build_tree(root, growth.select(candidates))


def _children(
    level: list[Candidate | None], scored: HeadOutput, depth: int, growth: Growth
) -> list[Candidate] | None:
    """The children of all expanded nodes, or None where a score is not finite."""
    found = []
    for parent, log_probs, tokens in zip(level, scored.log_probs.tolist(), scored.ids.tolist(), strict=True):
        if not math.isfinite(sum(log_probs)):
            return None
        above = parent.log_prob if parent else 0.0
        for token, log_prob in zip(tokens, log_probs, strict=True):
            found.append(Candidate(token, parent, depth, above + log_prob, growth.score(parent, log_prob)))
    return found


def _build_tree(root: int, chosen: list[Candidate]) -> DraftTree:
    rows: dict[Candidate | None, int] = {None: 0}
    for candidate in chosen:
        rows[candidate] = len(rows)
    return DraftTree(
        tokens=(root, *(c.token for c in chosen)),
        parents=(-1, *(rows[c.parent] for c in chosen)),
        depths=(0, *(c.depth for c in chosen)),
        log_probs=(0.0, *(c.log_prob for c in chosen)),
    )
