"""Drafts a tree with an EAGLE-3 head (arXiv 2503.01840): dynamic expansion as in EAGLE-2 (arXiv 2406.16858).

Levels are drafted one after another. Of each level's candidates some are expanded, each expansion scores a few
children, and of all candidates ever scored the best form the tree. Which, and how many, is `growth`'s to decide. No
child ever scores above its parent, so the best candidates always form a tree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.growth import Candidate, Growth
from treeeagle_edge.head import HeadOutput
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model_protocols import DraftHead
from treeeagle_edge.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Expansion:
    """A candidate the head has run on, so that its children can be scored."""

    candidate: Candidate | None  # None: the root
    path: tuple[int, ...]  # scratch rows from the root's child down to itself


class Drafter:
    """Grows one tree a round. `scratch` rows of the head's store hold its expansions and are never committed."""

    def __init__(self, head: DraftHead, scratch: Tensor) -> None:
        """`scratch` [R] int64: rows of the head's store, enough for all expansions of a round."""
        self.head = head
        self._scratch = scratch

    def draft(
        self, root: int, scored: HeadOutput, prefix: Tensor, root_position: int, growth: Growth
    ) -> DraftTree | None:
        """Draft below `root`, the token at `root_position` of the sequence, as far as `growth` wants.

        `scored` is the head's output for the root's row; `prefix` [T] int64 are the slots of all head rows up to and
        including the root's. Returns None where the head's scores are not finite: the round is then decoded plainly.
        """
        frontier = [Expansion(None, ())]
        candidates: list[Candidate] = []
        used = 0
        for depth in range(1, growth.depth + 1):
            level = _candidates(frontier, scored, depth, growth)
            if level is None:
                return None
            candidates = sorted([*candidates, *level], key=lambda c: -c.score)  # stable: parents stay first
            chosen = growth.expand(level, candidates)
            if not chosen or depth == growth.depth:
                break
            row_of = {expansion.candidate: row for row, expansion in enumerate(frontier)}
            parents = [row_of[candidate.parent] for candidate in chosen]
            frontier = [
                Expansion(candidate, (*frontier[parent].path, used + i))
                for i, (candidate, parent) in enumerate(zip(chosen, parents, strict=True))
            ]
            place = root_position + depth
            scored = self._expand(frontier, scored.hidden[parents], prefix, place, used, growth.branching)
            used += len(frontier)
        return _build_tree(root, growth.select(candidates))

    def _expand(
        self, frontier: list[Expansion], hidden: Tensor, prefix: Tensor, place: int, used: int, top: int
    ) -> HeadOutput:
        """One head pass over the chosen candidates of a level, all at `place` of the sequence."""
        device = self._scratch.device
        count = len(frontier)
        tokens = torch.tensor([e.candidate.token for e in frontier if e.candidate], device=device)
        visible = torch.zeros(count, used + count, dtype=torch.bool)
        for row, expansion in enumerate(frontier):
            visible[row, list(expansion.path)] = True
        rows = self._scratch[: used + count]
        view = AttentionView(prefix, rows, visible.to(device))
        # a row's rotary position is one less than its token's place: row t pairs feature t with token t + 1
        positions = torch.full((count,), place - 1, device=device)
        return self.head.step(hidden, tokens, positions, rows[used:], view, top)


def _candidates(
    frontier: list[Expansion], scored: HeadOutput, depth: int, growth: Growth
) -> list[Candidate] | None:
    """The children of all expanded nodes, or None where a score is not finite."""
    rows, tokens = scored.log_probs.tolist(), scored.ids.tolist()
    if not all(math.isfinite(value) for row in rows for value in row):
        return None
    level = []
    for expansion, row, row_tokens in zip(frontier, rows, tokens, strict=True):
        parent = expansion.candidate
        above = parent.log_prob if parent else 0.0
        for token, log_prob in zip(row_tokens, row, strict=True):
            level.append(Candidate(token, parent, depth, above + log_prob, growth.score(parent, log_prob)))
    return level


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
