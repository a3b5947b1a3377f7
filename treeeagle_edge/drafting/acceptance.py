"""What the walks so far say about the head: how far its probabilities can be trusted, and how often a walk goes on."""

from __future__ import annotations

import math
from array import array

from treeeagle_edge.tree import DraftTree

_BINS = 14  # of half a nat each: from certain down to one in a thousand
_BIN_WIDTH = 0.5  # nats
_PRIOR = 12.0  # how many observations the head's own probability counts for
_DECAY = 0.998  # an observation loses half its weight in some 350 later ones of its bin
_LEAST = 1e-4  # no chance is below this


class Acceptance:
    """Calibration of draft probabilities, learnt online from accepted and rejected nodes.

    Only nodes whose parent was walked count: about the others the target said nothing. Reliability binning (DeGroot and
    Fienberg, 1983) with the head's own probability as the prior.
    """

    def __init__(self) -> None:
        self._seen = array("d", [0.0] * _BINS)
        self._walked = array("d", [0.0] * _BINS)
        self._reached: dict[int, float] = {}  # depth -> walks that could have gone on to it
        self._went_on: dict[int, float] = {}

    @property
    def calibration(self) -> tuple[array[float], array[float], float, float, float]:
        """What `chance` is computed from: nodes walked and seen by bin, a bin's width in nats, the prior, the least."""
        return self._walked, self._seen, _BIN_WIDTH, _PRIOR, _LEAST

    def chance(self, log_prob: float) -> float:
        """Probability that a node is walked once its parent is, given the head's log-probability for it."""
        at = _bin(log_prob)
        found = (self._walked[at] + _PRIOR * math.exp(log_prob)) / (self._seen[at] + _PRIOR)
        return found if _LEAST < found < 1.0 else 1.0 if found >= 1.0 else _LEAST

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
        parents = set(tree.parents[: tree.head_rows])
        for row, parent in enumerate(tree.parents[: tree.head_rows]):
            if parent in path:
                at = _bin(tree.log_probs[row] - tree.log_probs[parent])
                self._seen[at] = self._seen[at] * _DECAY + 1.0
                self._walked[at] = self._walked[at] * _DECAY + (row in path)
        for depth, row in enumerate(walked, start=1):
            if row in parents:
                self._reached[depth] = self._reached.get(depth, 0.0) * _DECAY + 1.0
                self._went_on[depth] = self._went_on.get(depth, 0.0) * _DECAY + (depth < len(walked))


def _bin(log_prob: float) -> int:
    at = int(-log_prob / _BIN_WIDTH)
    return at if at < _BINS else _BINS - 1
