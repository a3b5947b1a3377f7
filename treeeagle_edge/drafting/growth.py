"""How far a draft tree grows: to a fixed shape, or as long as growing raises the expected tokens per second."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.costs import CostModel
from treeeagle_edge.drafting.growth_rule import GrowthRule, Worth
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
    """Decides how one tree grows. Candidates are sorted by score, best first, parents before children."""

    levels: int  # levels the head has scored so far

    @property
    def depth(self) -> int:
        """Levels that may be drafted."""
        ...

    @property
    def branching(self) -> int:
        """Nodes expanded a level, and children scored for each."""
        ...

    @property
    def rule(self) -> GrowthRule:
        """The same decisions in plain numbers, for a head that grows the tree itself."""
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
        self.rule = GrowthRule(shape.depth, shape.branching, shape.nodes, array("q", stop_ids))
        self.levels = 0

    def score(self, parent: Candidate | None, log_prob: float) -> float:
        """The log-probability of the path."""
        return (parent.score if parent else 0.0) + log_prob

    def expand(self, level: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best candidates of the level whose children could still be among the best of all.

        A child never scores above its parent. So candidates below the cut are left out: that changes no tree, and saves
        head passes.
        """
        self.levels += 1
        cut = candidates[self._nodes - 1].score if len(candidates) >= self._nodes else -math.inf
        return [c for c in _open(level, self._stop_ids)[: self.branching] if c.score > cut]

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The best `nodes`."""
        return list(candidates[: self._nodes])


class AdaptiveGrowth:
    """Grows while a tree's expected tokens are worth more than its seconds, at the going `rate` of tokens a second.

    The chance that a candidate is walked is the product of calibrated probabilities along its path. The expected tokens
    of a tree are one plus the sum of its nodes' chances (as in Sequoia, arXiv 2402.12374). Costs are measured.

    Weighing by the going rate maximises tokens a second over many rounds (Dinkelbach, 1967): a round that promises
    less than most ends early, and one that promises more goes on. The best ratio within each round alone would do the
    opposite.
    """

    def __init__(
        self,
        bounds: TreeShape,
        costs: CostModel,
        acceptance: Acceptance,
        rate: float,
        stop_ids: Collection[int] = (),
    ) -> None:
        """`bounds` are the most that may be drafted; `rate` in tokens a second."""
        self.depth = bounds.depth
        self.branching = bounds.branching
        self._nodes = bounds.nodes
        self._costs = costs
        self._acceptance = acceptance
        self._stop_ids = stop_ids
        self._draft, self._continues = (array("d", [0.0] * (bounds.depth + 1)) for _ in range(2))
        self._verify = array("d", [0.0] * (bounds.nodes + 3))
        worth = Worth(self._verify, self._draft, self._continues, acceptance.calibration, acceptance.least)
        self.rule = GrowthRule(bounds.depth, bounds.branching, bounds.nodes, array("q", stop_ids), worth)
        self.levels = 0
        self.weigh(rate)

    def begin(self) -> None:
        """Begin the next tree."""
        self.levels = 0

    def weigh(self, rate: float) -> None:
        """Take over what costs and chances are now. Arrays keep their place, which native code knows."""
        acceptance, costs = self._acceptance, self._costs
        # costs in tokens: seconds times rate
        self._draft[:] = array("d", [rate * seconds for seconds in costs.draft_by_levels(self.depth)])
        self._verify[:] = array(
            "d", [rate * seconds for seconds in costs.verify_by_rows(self._nodes + 2)[: self._nodes + 3]]
        )
        self._continues[:] = array("d", [acceptance.continues(depth) for depth in range(self.depth + 1)])

    def score(self, parent: Candidate | None, log_prob: float) -> float:
        """The calibrated chance that the walk gets here."""
        return (parent.score if parent else 1.0) * self._acceptance.chance(log_prob)

    def expand(self, level: Sequence[Candidate], candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates worth expanding; none where going deeper does not pay.

        A candidate is worth it if its surest child could earn its own row, or the place of the weakest node so far.
        To see whether going deeper pays, all further levels are considered, since two or three levels may be worth
        their head passes where one is not. Each is assumed to add a node, or to put one in the place of the weakest,
        and to be reached by the chance that a walk goes on.
        """
        self.levels += 1
        count, tokens, value = self._best(candidates)
        row = self._verify[count + 2] - self._verify[count + 1]
        least = min(row, candidates[count - 1].score) if count else row
        chosen = [c for c in _open(level, self._stop_ids)[: self.branching] if c.score > least]
        reach = _total(chosen)
        more = count
        for depth in range(self.levels + 1, self.depth + 1):
            reach *= self._continues[depth]
            tokens += reach
            more = min(more + 1, self._nodes)
            weakest = max(0, 2 * count - more)  # places below it are taken
            replaced = _total(candidates[weakest:count])
            cost = min(self._verify[more + 1], self._verify[count + 1] + replaced)
            if tokens - self._draft[depth] - cost > value:
                return chosen
        return []

    def select(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The prefix of greatest value, which is empty where no node pays for its row."""
        return list(candidates[: self._best(candidates)[0]])

    def _best(self, candidates: Sequence[Candidate]) -> tuple[int, float, float]:
        """(nodes, expected tokens, value in tokens) of the best prefix."""
        best = 0, 1.0, 1.0 - self._verify[1]
        tokens = 1.0
        for count, candidate in enumerate(candidates[: self._nodes], start=1):
            tokens += candidate.score
            if tokens - self._verify[count + 1] > best[2]:
                best = count, tokens, tokens - self._verify[count + 1]
        return best[0], best[1], best[2] - self._draft[self.levels]


def _total(candidates: Iterable[Candidate]) -> float:
    """Scores added one by one, as native code adds them: from Python 3.12 on, `sum` rounds differently."""
    total = 0.0
    for candidate in candidates:
        total += candidate.score
    return total


def _open(level: Sequence[Candidate], stop_ids: Collection[int]) -> list[Candidate]:
    """The candidates that something may follow (no end tokens), best first."""
    return sorted((c for c in level if c.token not in stop_ids), key=_SCORE, reverse=True)
