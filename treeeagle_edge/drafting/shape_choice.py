"""Chooses each round's tree from a short list of shapes, for rounds on the device: each shape is captured work.

The shape with the most expected tokens by expected seconds is taken. A round with the largest tree also shows what
every smaller one would have held, so one round in a few dozen drafts it.
"""

from __future__ import annotations

import math
from collections import Counter

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.tree import DraftTree

_LIST = (  # depth, branching, nodes; the bounds of the person, or of the profile, come after them
    (2, 2, 4),
    (3, 3, 8),
    (4, 4, 16),
    (5, 4, 24),
)
_LEARN = 0.1  # weight of the newest round
_PROBE = 4  # rounds in a row with the largest tree
_SHORT_WAIT, _LONG_WAIT = 32, 512  # rounds between probes; doubles while plain decoding stays the fastest


def shapes_within(bounds: TreeShape) -> tuple[TreeShape, ...]:
    """The list as far as `bounds` allow, smallest first, `bounds` themselves the last."""
    largest = TreeShape(bounds.depth, bounds.branching, bounds.nodes)
    smaller = [
        TreeShape(min(depth, bounds.depth), min(branching, bounds.branching), nodes)
        for depth, branching, nodes in _LIST
        if nodes < bounds.nodes
    ]
    return (*dict.fromkeys(smaller), largest)


class ShapeChoice:
    """What one loaded model has taught about its shapes. It lasts from answer to answer."""

    def __init__(self, bounds: TreeShape) -> None:
        self.shapes = shapes_within(bounds)
        self._largest = self.shapes[-1]
        self._acceptance = Acceptance()
        self._seconds: dict[TreeShape | None, float] = {}  # of a round; None is plain decoding
        # expected tokens beyond one, in rounds that drafted the largest tree
        self._gains = dict.fromkeys(self.shapes, 0.0)
        self._gain: float | None = None  # the same for the largest tree, by the newest rounds of any
        self._rounds = 0  # until the next probe begins; negative while it lasts
        self._wait = _SHORT_WAIT

    def choose(self) -> TreeShape | None:
        """The shape of the next round; None decodes plainly. Shapes that were never timed come first."""
        untimed = [shape for shape in (*reversed(self.shapes), None) if shape not in self._seconds]
        if untimed:
            return untimed[0]
        return self._largest if self._rounds <= 0 else self._best()

    def time(self, shape: TreeShape | None, seconds: float) -> None:
        """Note how long a round of `shape` took, from drafting to its last token."""
        known = self._seconds.get(shape)
        if known is None or self._gain is None:  # before the first answer the fastest counts
            self._seconds[shape] = seconds if known is None else min(seconds, known)
        else:
            self._seconds[shape] += _LEARN * (seconds - known)

    def learn(self, shape: TreeShape | None, round_: Round) -> None:
        """Learn from a round of `shape` what the head's drafts are worth."""
        self._rounds -= 1
        if shape is not None and round_.tree is not None:
            self._acceptance.observe(round_.tree, round_.walked)
            self._expect(shape, round_.tree)
        if self._rounds <= -_PROBE:
            self._wait = min(2 * self._wait, _LONG_WAIT) if self._best() is None else _SHORT_WAIT
            self._rounds = self._wait

    def _expect(self, shape: TreeShape, tree: DraftTree) -> None:
        seen = expected_gains(tree, self.shapes, self._acceptance)
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

    def _best(self) -> TreeShape | None:
        def rate(shape: TreeShape | None) -> float:
            gain = 0.0 if shape is None else (self._gain or 0.0) * self._share(shape)
            return (1.0 + gain) / self._seconds[shape] if shape in self._seconds else 0.0

        return max((None, *self.shapes), key=rate)


def expected_gains(
    tree: DraftTree, shapes: tuple[TreeShape, ...], acceptance: Acceptance
) -> dict[TreeShape, float]:
    """Tokens that each shape's part of `tree` is expected to settle beyond the one that plain decoding does.

    Rows come best first, so a shape's part is what its own limits leave of them.
    """
    return {shape: _gain(tree, shape, acceptance) for shape in shapes}


def _gain(tree: DraftTree, shape: TreeShape, acceptance: Acceptance) -> float:
    chances = {0: 1.0}  # of the rows that are in the part
    expanded = {0}  # rows that children are drafted for
    of_level: Counter[int] = Counter()
    of_parent: Counter[int] = Counter()
    gain = 0.0
    for row in range(1, len(tree)):
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
