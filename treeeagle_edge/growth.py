"""How far a draft tree grows: to a fixed shape, or as long as growing raises the expected tokens per second."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from treeeagle_edge.acceptance import Acceptance
from treeeagle_edge.costs import CostModel
from treeeagle_edge.rounds import TreeShape

_SCORE = attrgetter("score")


@dataclass(eq=False, slots=True)
class Candidate:
    """A drafted token below a parent candidate (None: below the root)."""

    token: int
    parent: Candidate | None
    depth: int  # 1 for children of the root
    log_prob: float  # the head's log-probability of the path from the root
    score: float  # what candidates are ranked by; never above the parent's


class Growth(Protocol):
    """Decides about one tree. Candidates come sorted by score, best first, parents before children."""

    @property
    def depth(self) -> int:
        """Levels that may be drafted."""
        ...

    @property
    def branching(self) -> int:
        """Nodes expanded a level, and children scored for each."""
        ...

    def score(self, parent: Candidate | None, log_prob: float) -> float:
        """Rank of a child whose log-probability given its parent is `log_prob`."""
        ...

    def expand(self, level: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates of the newest `level` that the head should run on next; none ends the draft."""
        ...

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that form the tree: a prefix of the sorted list."""
        ...


class FixedGrowth:
    """EAGLE-2's rule: expand the best `branching` a level, keep the best `nodes` of all."""

    def __init__(self, shape: TreeShape, stop_ids: Collection[int] = ()) -> None:
        """End tokens are leaves: nothing is drafted behind them."""
        self.depth = shape.depth
        self.branching = shape.branching
        self._nodes = shape.nodes
        self._stop_ids = stop_ids

    def score(self, parent: Candidate | None, log_prob: float) -> float:
        """The log-probability of the path."""
        return (parent.score if parent else 0.0) + log_prob

    def expand(self, level: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those whose children could still be among the best: a child scores at most what its parent does, so
        leaving out what is below the cut changes no tree and saves head passes.
        """
        cut = candidates[self._nodes - 1].score if len(candidates) >= self._nodes else -math.inf
        return [c for c in _open(level, self._stop_ids)[: self.branching] if c.score > cut]

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best `nodes`."""
        return list(candidates[: self._nodes])


class AdaptiveGrowth:
    """Maximises (expected tokens of the round) / (its expected seconds).

    Each candidate has a chance of being walked, the product of calibrated probabilities along its path. The expected
    tokens of a tree are one plus the sum of its nodes' chances (as in Sequoia, arXiv 2402.12374); costs are measured.
    """

    def __init__(
        self, bounds: TreeShape, costs: CostModel, acceptance: Acceptance, stop_ids: Collection[int] = ()
    ) -> None:
        """`bounds` are the most that may be drafted."""
        self.depth = bounds.depth
        self.branching = bounds.branching
        self._nodes = bounds.nodes
        self._costs = costs
        self._verify = costs.verify_by_rows(bounds.nodes + 2)
        self._acceptance = acceptance
        self._stop_ids = stop_ids
        self.levels = 0  # levels the head has scored so far

    def score(self, parent: Candidate | None, log_prob: float) -> float:
        """The calibrated chance that the walk gets here."""
        return (parent.score if parent else 1.0) * self._acceptance.chance(log_prob)

    def expand(self, level: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
        """The open candidates whose children are worth their rows, if the whole level is worth its head pass."""
        self.levels += 1
        count, tokens, seconds = self._best(candidates)
        open_ = _open(level, self._stop_ids)
        if count == self._nodes and not open_:
            return []
        rate = tokens / seconds
        share = self._acceptance.continues(self.levels + 1)
        row = self._verify[count + 2] - self._verify[count + 1]
        chosen = [c for c in open_[: self.branching] if c.score * share > rate * row]
        gain = share * sum(c.score for c in chosen)
        rows = min(count + len(chosen), self._nodes)
        deeper = seconds + self._costs.step() + self._verify[rows + 1] - self._verify[count + 1]
        return chosen if (tokens + gain) / deeper > rate else []

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The prefix with the best rate; may be empty where no node pays for its row."""
        return list(candidates[: self._best(candidates)[0]])

    def _best(self, candidates: Sequence[Candidate]) -> tuple[int, float, float]:
        """(nodes, expected tokens, expected seconds) of the best prefix."""
        spent = self._costs.draft(self.levels)
        nodes, best_tokens, best_seconds = 0, 1.0, spent + self._verify[1]
        tokens = 1.0
        for count, candidate in enumerate(candidates[: self._nodes], start=1):
            tokens += candidate.score
            seconds = spent + self._verify[count + 1]
            if tokens * best_seconds > best_tokens * seconds:
                nodes, best_tokens, best_seconds = count, tokens, seconds
        return nodes, best_tokens, best_seconds


def _open(level: Sequence[Candidate], stop_ids: Collection[int]) -> list[Candidate]:
    """Candidates something may follow, best first."""
    return sorted((c for c in level if c.token not in stop_ids), key=_SCORE, reverse=True)
