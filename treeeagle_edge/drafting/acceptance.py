"""What the walks so far say about the head: how far its probabilities can be trusted, and how often a walk goes on."""

from __future__ import annotations

import math
from array import array

from treeeagle_edge.drafting.online_line import OnlineLine
from treeeagle_edge.tree import DraftTree

_LEAST = 1e-4  # a chance is that far from 0 and from 1
_LEAST_ODDS = math.log(_LEAST)
_DOUBT = (0.2, 0.0, 0.02)  # variances at the start: shift and slope may be off by some 0.5 and 0.15
_KEEP = 0.995  # half of what a node taught is forgotten in some 140 later ones
_LEAST_SLOPE = 0.1  # a node of more probability never has less of a chance
_DECAY = 0.998  # weight that a walk keeps with each later one, in how often walks go on


class Acceptance:
    """Calibration of draft probabilities, learnt online from accepted and rejected nodes.

    The log odds of a node to be walked are a straight line over those that the head gives it (Platt scaling, 1999), at
    first the same, and learnt by one step of Newton's method for each node. Only nodes whose parent was walked count:
    about the others the target said nothing.
    """

    least = _LEAST

    def __init__(self) -> None:
        self._line = OnlineLine(0.0, 1.0, doubt=_DOUBT, keep=_KEEP, least=(-math.inf, _LEAST_SLOPE))
        self._reached: dict[int, float] = {}  # depth -> walks that could have gone on to it
        self._went_on: dict[int, float] = {}

    @property
    def calibration(self) -> array[float]:
        """[2] float64: shift and slope of the log odds. Their values change, their place does not."""
        return self._line.terms

    def chance(self, log_prob: float) -> float:
        """Probability that a node is walked once its parent is, given the head's log-probability for it."""
        return self._chance_at(_log_odds(log_prob))

    def chances(self, tree: DraftTree) -> list[float]:
        """[N] of each row of a tree that the head drafted, that it is walked; the root always is."""
        found = [1.0]
        for row in range(1, len(tree)):
            parent = tree.parents[row]
            found.append(found[parent] * self.chance(tree.log_probs[row] - tree.log_probs[parent]))
        return found

    def continues(self, depth: int) -> float:
        """Probability that a walk at depth - 1, with children below it, goes on to `depth`."""
        return (self._went_on.get(depth, 0.0) + 6.0) / (self._reached.get(depth, 0.0) + 10.0)

    def observe(self, tree: DraftTree, walked: tuple[int, ...]) -> None:
        """Learn from one walk; `walked` are rows of `tree`, the root first. What was looked up says nothing of the
        head.
        """
        walked = tuple(row for row in walked if row < tree.head_rows)
        path = set(walked)
        parents = tree.parents[: tree.head_rows]
        for row, parent in enumerate(parents):
            if parent in path:
                odds = _log_odds(tree.log_probs[row] - tree.log_probs[parent])
                chance = self._chance_at(odds)
                self._line.learn(odds, (row in path) - chance, chance * (1.0 - chance))
        for depth, row in enumerate(walked, start=1):
            if row in parents:
                self._reached[depth] = self._reached.get(depth, 0.0) * _DECAY + 1.0
                self._went_on[depth] = self._went_on.get(depth, 0.0) * _DECAY + (depth < len(walked))

    def _chance_at(self, odds: float) -> float:
        return 1.0 / (1.0 + math.exp(-max(self._line.at(odds), _LEAST_ODDS)))


def _log_odds(log_prob: float) -> float:
    log_prob = min(log_prob, -_LEAST)
    return log_prob - math.log(-math.expm1(log_prob))
