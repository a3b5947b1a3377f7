"""The shapes of rounds on the device: each is captured work, so they are few, and a round takes one of them.

A branch of what the text repeats has shapes of its own. A round in which nothing repeats, or a branch would not pay, is
then the one it would be without any: as rows of every tree, filled or not, a branch would be paid for in all rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.rounds import TreeShape

_LIST = (  # depth, branching, nodes; the bounds of the person, or of the profile, come after them
    (2, 2, 4),
    (3, 3, 8),
    (4, 4, 16),
    (5, 4, 24),
)
# Rows of a branch alone, and beside a tree of so many nodes. With the root both are 16 rows, and so many a product on
# tensor cores takes at a time: our 4-bit one in tiles of 16 or more, bitsandbytes' of 32 or more. One tree is enough,
# since where a branch is worth its rows it gives most of the tokens.
_ALONE, _BESIDE, _SMALL = 15, 7, 8


@dataclass(frozen=True)
class RoundShape:
    """What a round on the device drafts. Without either it decodes plainly."""

    tree: TreeShape | None = None  # of the head
    branch: int = 0  # rows for what the text repeats

    @property
    def levels(self) -> int:
        """The deepest that a node can be."""
        return max(self.tree.depth if self.tree is not None else 0, self.branch)


PLAIN = RoundShape()


def shapes_within(bounds: TreeShape) -> tuple[TreeShape, ...]:
    """The list of trees as far as `bounds` allow, smallest first, `bounds` themselves the last."""
    largest = TreeShape(bounds.depth, bounds.branching, bounds.nodes)
    smaller = [
        TreeShape(min(depth, bounds.depth), min(branching, bounds.branching), nodes)
        for depth, branching, nodes in _LIST
        if nodes < bounds.nodes
    ]
    return (*dict.fromkeys(smaller), largest)


def rounds_within(tree: TreeShape | None) -> tuple[RoundShape, ...]:
    """All that rounds may be where `tree` is the person's or the profile's, None without a head. No shape has more
    nodes than `tree` has.
    """
    if tree is None:
        return (PLAIN,)
    if not tree.adaptive:
        return (PLAIN, RoundShape(tree))
    trees = shapes_within(tree)
    found = [PLAIN, *(RoundShape(each) for each in trees)]
    if tree.lookup:
        found.append(RoundShape(None, min(_ALONE, tree.nodes)))
        room = tree.nodes >= _SMALL + _BESIDE
        found += [RoundShape(each, _BESIDE) for each in trees if room and each.nodes == _SMALL]
    return tuple(found)
