"""Trees grown in tensor operations are the host's: the same nodes in the same order, ties and end tokens included."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treeeagle_edge.device.tree import DeviceTree, grow, num_rows
from treeeagle_edge.drafting.drafter import Drafter
from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.model.head import HeadOutput
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows, TensorHead
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.tree import DraftTree

VOCAB = 24


class MadeUpHead(TensorHead):
    """Scores that depend on a row's path alone: column 0 of the hidden state is a number of that path."""

    def __init__(self, seed: int, *, steps: int, children: int, broken_at: int | None = None) -> None:
        """`steps`: how many different log-probabilities there are, so that few of them make ties. `broken_at`: the
        depth from which on scores are NaN.
        """
        self._seed = seed
        self._steps = steps
        self._children = children
        self._broken_at = broken_at

    def scored(self, path: int, token: int, depth: int) -> HeadOutput:
        return self._score([(path, token)], depth)

    def extend(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
    ) -> HeadOutput:
        """For a root alone, as the host's drafter calls it."""
        return self.scored(0, int(tokens[-1]), 0)

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """As the host's drafter calls it. A row sees as many rows as it is deep."""
        depth = int(view.visible.sum(dim=1)[0])
        return self._score(list(zip(hidden[:, 0].long().tolist(), tokens.tolist(), strict=True)), depth)

    def step_on_device(self, hidden: Tensor, tokens: Tensor, level: int, visible: Tensor) -> HeadOutput:
        assert visible.sum(dim=1).eq(level).all()
        return self._score(list(zip(hidden[:, 0].long().tolist(), tokens.tolist(), strict=True)), level)

    def _score(self, rows: list[tuple[int, int]], depth: int) -> HeadOutput:
        paths, log_probs, ids = [], [], []
        for above, token in rows:
            path = hash((self._seed, above, token)) % 2**20
            draw = random.Random(path)
            paths.append(path)
            found = sorted((-draw.randrange(1, self._steps) / 8 for _ in range(self._children)), reverse=True)
            log_probs.append(found)
            ids.append(draw.sample(range(VOCAB), self._children))
        scores = torch.tensor(log_probs)
        if self._broken_at is not None and depth >= self._broken_at:
            scores[0, -1] = float("nan")
        return HeadOutput(torch.tensor(paths).float()[:, None], scores, torch.tensor(ids))


def on_host(head: MadeUpHead, shape: TreeShape, stops: frozenset[int]) -> DraftTree | None:
    drafter = Drafter(head, range(6, 518))  # type: ignore[arg-type]
    root = PassRows([1], [4], [5], torch.arange(6), range(1, 5), [5], [-1])
    return drafter.draft(FeatureRows(torch.empty(1, 0), [0]), root, FixedGrowth(shape, stops))


def on_device(head: MadeUpHead, shape: TreeShape, stops: frozenset[int]) -> DeviceTree:
    ends = torch.zeros(VOCAB, dtype=torch.bool)
    ends[list(stops)] = True
    return grow(head.scored(0, 1, 0), torch.tensor([1]), shape, ends, head.step_on_device)


def as_tree(tree: DeviceTree) -> DraftTree:
    real = int(tree.real.sum())
    assert tree.real[:real].all()  # what is left over comes last
    columns = (tree.tokens, tree.parents, tree.depths, tree.log_probs)
    return DraftTree(*(tuple(column[:real].tolist()) for column in columns))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(1, 6),
    branching=st.integers(1, 5),
    nodes=st.integers(1, 40),
    steps=st.sampled_from([2, 3, 5, 4000]),
    children=st.integers(1, 5),
    stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=VOCAB),
)
def test_the_trees_of_the_host(
    seed: int, depth: int, branching: int, nodes: int, steps: int, children: int, stops: frozenset[int]
) -> None:
    """Expectations row 23: the same rule, whatever ties there are, and however many tokens nothing may follow."""
    shape = TreeShape(depth, branching, nodes)
    head = MadeUpHead(seed, steps=steps, children=min(branching, children))
    grown = on_device(head, shape, stops)
    assert len(grown.tokens) == num_rows(shape, min(branching, children))
    tree = as_tree(grown)
    assert tree == on_host(head, shape, stops)
    for row, path in enumerate(tree.ancestors):
        assert torch.nonzero(grown.visible[row]).flatten().tolist() == list(path)


def test_scores_that_are_not_finite_leave_the_root() -> None:
    shape = TreeShape(3, 3, 9)
    for level in (0, 1, 2):
        head = MadeUpHead(3, steps=4000, children=3, broken_at=level)
        grown = on_device(head, shape, frozenset())
        assert not grown.is_sound
        assert as_tree(grown) == DraftTree.root_only(1)
        assert on_host(head, shape, frozenset()) is None
    assert on_device(MadeUpHead(3, steps=4000, children=3, broken_at=3), shape, frozenset()).is_sound
