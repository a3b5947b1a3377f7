"""Chooses each round's shape from a short list, for rounds on the device: each shape is captured work.

The shape with the most expected tokens by expected seconds is taken. A round with the largest tree also shows what
every smaller one would have held, so one round in a few dozen drafts it. What a branch of looked-up tokens would have
held shows in every round in which there was something to look up, whether it had the branch or not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.drafting.lookup_acceptance import LookupAcceptance
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape, rounds_within, shapes_within
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.tree import DraftTree

_LEARN = 0.1  # weight of the newest round
_PROBE = 4  # rounds in a row with the largest tree
_SHORT_WAIT, _LONG_WAIT = 32, 512  # rounds between probes; doubles while plain decoding stays the fastest


class Choice(Protocol):
    """What says which shape the next round has, and is told what became of it."""

    @property
    def most_looked_up(self) -> int:
        """The most rows of a branch that a round may have; 0 where nothing need be looked up."""
        ...

    def choose(self, match: Match | None = None) -> RoundShape:
        """The shape of the next round. match: what the text suggests."""
        ...

    def time(self, shape: RoundShape, seconds: float) -> None:
        """Note how long a round of `shape` took, from drafting to its last token."""
        ...

    def learn(self, shape: RoundShape, round_: Round, match: Match | None = None) -> None:
        """Learn from a round of `shape` what drafts, and what the text suggested, are worth."""
        ...


class OneShape:
    """Rounds that are all alike: with a fixed tree, plain, or of one shape while it is tried."""

    def __init__(self, shape: RoundShape) -> None:
        self._shape = shape

    @property
    def most_looked_up(self) -> int:
        """See `Choice.most_looked_up`."""
        return self._shape.branch

    def choose(self, match: Match | None = None) -> RoundShape:
        """See `Choice.choose`."""
        return self._shape

    def time(self, shape: RoundShape, seconds: float) -> None:
        """Nothing is to be learnt."""

    def learn(self, shape: RoundShape, round_: Round, match: Match | None = None) -> None:
        """Nothing is to be learnt."""


class ShapeChoice:
    """What one loaded model has taught about its shapes. It lasts from answer to answer."""

    def __init__(self, bounds: TreeShape) -> None:
        self.rounds = rounds_within(bounds)
        self._trees = shapes_within(bounds)
        self._largest = self._trees[-1]
        self._acceptance = Acceptance()
        self._lookups = LookupAcceptance()
        self._seconds: dict[RoundShape, float] = {}  # of a round
        # expected tokens beyond one, in rounds that drafted the largest tree
        self._gains = dict.fromkeys(self._trees, 0.0)
        self._gain: float | None = None  # the same for the largest tree, by the newest rounds of any
        self._waits = 0  # rounds until the next probe begins; negative while it lasts
        self._wait = _SHORT_WAIT

    @property
    def most_looked_up(self) -> int:
        """See `Choice.most_looked_up`."""
        return max(shape.branch for shape in self.rounds)

    def choose(self, match: Match | None = None) -> RoundShape:
        """See `Choice.choose`. Shapes that were never timed come first. A probe waits while a branch pays."""
        untimed = [shape for shape in reversed(self.rounds) if shape not in self._seconds]
        if untimed:
            return untimed[0]
        best = self._best(match)
        return RoundShape(self._largest) if self._waits <= 0 and not best.branch else best

    def time(self, shape: RoundShape, seconds: float) -> None:
        """See `Choice.time`."""
        known = self._seconds.get(shape)
        if known is None or self._gain is None:  # before the first answer the fastest counts
            self._seconds[shape] = seconds if known is None else min(seconds, known)
        else:
            self._seconds[shape] += _LEARN * (seconds - known)

    def learn(self, shape: RoundShape, round_: Round, match: Match | None = None) -> None:
        """See `Choice.learn`."""
        tree = round_.tree
        if tree is not None and match is not None:
            settled = [*(tree.tokens[row] for row in round_.walked[1:]), round_.next_token]
            self._lookups.observe(match, None, settled)
        if tree is not None and shape.tree is not None:
            self._acceptance.observe(tree, round_.walked)
            self._expect(shape.tree, tree)
        if shape.branch:
            return
        self._waits -= 1
        if self._waits <= -_PROBE:
            self._wait = min(2 * self._wait, _LONG_WAIT) if self._best(None) == PLAIN else _SHORT_WAIT
            self._waits = self._wait

    def _expect(self, shape: TreeShape, tree: DraftTree) -> None:
        seen = expected_gains(tree, self._trees, self._acceptance)
        if shape == self._largest:
            for each, gain in seen.items():
                self._gains[each] += _LEARN * (gain - self._gains[each])
        share = self._share(shape)
        if share > 0.0:
            gain = seen[shape] / share
            self._gain = gain if self._gain is None else self._gain + _LEARN * (gain - self._gain)

    def _share(self, shape: TreeShape) -> float:
        """The gain of `shape` as a share of the largest tree's."""
        whole = self._gains[self._largest]
        return self._gains[shape] / whole if whole > 0.0 else 0.0

    def _best(self, match: Match | None) -> RoundShape:
        reaches = self._reaches(match) if match is not None else []

        def rate(shape: RoundShape) -> float:
            gain = sum(reaches[: shape.branch])
            if shape.tree is not None:
                # of use where the branch is wrong from its first token on
                missed = 1.0 - reaches[0] if shape.branch else 1.0
                gain += missed * (self._gain or 0.0) * self._share(shape.tree)
            return (1.0 + gain) / self._seconds[shape] if shape in self._seconds else 0.0

        return max((shape for shape in self.rounds if reaches or not shape.branch), key=rate)

    def _reaches(self, match: Match) -> list[float]:
        """Chances that a walk comes to the match's first token, to its second, and so on."""
        found, reach = [], 1.0
        for place in range(len(match.tokens)):
            reach *= self._lookups.chance(match, place)
            found.append(reach)
        return found


def expected_gains(
    tree: DraftTree, shapes: Sequence[TreeShape], acceptance: Acceptance
) -> dict[TreeShape, float]:
    """Tokens that each shape's part of what the head drafted is expected to settle beyond the one of plain decoding.

    Rows come best first, so a shape's part is what its own limits leave of them.
    """
    return {shape: _gain(tree, shape, acceptance) for shape in shapes}


def _gain(tree: DraftTree, shape: TreeShape, acceptance: Acceptance) -> float:
    chances = {0: 1.0}  # of the rows that are in the part
    expanded = {0}  # rows that children are drafted for
    of_level: Counter[int] = Counter()
    of_parent: Counter[int] = Counter()
    gain = 0.0
    for row in range(1, tree.head_rows):
        parent, depth = tree.parents[row], tree.depths[row]
        if parent not in expanded or depth > shape.depth or of_parent[parent] == shape.branching:
            continue
        if len(chances) > shape.nodes:
            break
        step = tree.log_probs[row] - tree.log_probs[parent]
        chances[row] = chances[parent] * acceptance.chance(step)
        gain += chances[row]
        of_parent[parent] += 1
        of_level[depth] += 1
        if of_level[depth] <= shape.branching:
            expanded.add(row)
    assert math.isfinite(gain)
    return gain
