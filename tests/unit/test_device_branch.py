"""Branches of what the text repeats, in rows of a fixed number: where the host would hang them, what they may see."""

from __future__ import annotations

import random

import pytest
import torch
from device_trees import device_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from treeeagle_edge.device.branch import with_branch
from treeeagle_edge.device.tree import DeviceTree
from treeeagle_edge.device.walk import DeviceSampler
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

CPU = torch.device("cpu")
VOCAB = 30
HEADS = DraftTree((9, 1, 2, 7), (-1, 0, 1, 0), (0, 1, 2, 1), (0.0, -0.2, -0.9, -2.0))


def branched(tree: DraftTree, tokens: list[int], rows: int, spare: int = 0) -> DeviceTree:
    """`tree` on the device, with `spare` rows that hold no node, and a branch of `rows` rows for `tokens`."""
    stale = [VOCAB + 5] * (rows - len(tokens))  # what an earlier order left behind: no token at all
    return with_branch(device_tree(tree, spare), torch.tensor([*tokens, *stale]), torch.tensor([len(tokens)]))


def as_tree(tree: DeviceTree) -> DraftTree:
    """The rows that hold nodes, numbered anew."""
    rows = torch.nonzero(tree.real).flatten().tolist()
    of = {row: at for at, row in enumerate(rows)} | {-1: -1}
    return DraftTree(
        tuple(tree.tokens[rows].tolist()),
        tuple(of[parent] for parent in tree.parents[rows].tolist()),
        tuple(tree.depths[rows].tolist()),
        tuple(tree.log_probs[rows].tolist()),
    )


def on_host(tree: DraftTree, tokens: list[int]) -> DraftTree:
    """The definition: below the tokens that the tree has as well, one row for each of the others."""
    shared, row = 0, 0
    while shared < len(tokens) and tokens[shared] in tree.children[row]:
        row = tree.children[row][tokens[shared]]
        shared += 1
    more, rows = len(tokens) - shared, len(tree)
    parents = (row, *range(rows, rows + more))[:more]
    return DraftTree(
        (*tree.tokens, *tokens[shared:]),
        (*tree.parents, *parents),
        (*tree.depths, *(tree.depths[row] + 1 + step for step in range(more))),
        (*tree.log_probs, *[tree.log_probs[row]] * more),
    )


def random_tree(draw: random.Random, nodes: int, tokens: int) -> DraftTree:
    """Siblings differ, as those of a head do."""
    tree = DraftTree.root_only(draw.randrange(tokens))
    for _ in range(nodes):
        parent, token = draw.randrange(len(tree)), draw.randrange(tokens)
        if token not in tree.children[parent]:
            tree = DraftTree(
                (*tree.tokens, token),
                (*tree.parents, parent),
                (*tree.depths, tree.depths[parent] + 1),
                (*tree.log_probs, tree.log_probs[parent] - draw.random()),
            )
    return tree


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(0, 12),
    spare=st.integers(0, 3),
    rows=st.integers(1, 8),
    data=st.data(),
)
def test_the_branch_hangs_where_the_host_would_hang_it(
    seed: int, nodes: int, spare: int, rows: int, data: st.DataObject
) -> None:
    """With few different tokens, trees and branches often begin alike."""
    tree = random_tree(random.Random(seed), nodes, 3)
    tokens = data.draw(st.lists(st.integers(0, 2), max_size=rows))
    grown = branched(tree, tokens, rows, spare)
    assert len(grown.tokens) == len(tree) + spare + rows
    assert grown.tokens.max() < VOCAB and grown.depths.max() <= max(rows, *tree.depths)
    assert grown.levels == max(rows, *tree.depths)
    found = as_tree(grown)
    expected = on_host(tree, tokens)
    assert found.tokens == expected.tokens and found.parents == expected.parents
    assert found.depths == expected.depths and found.log_probs == pytest.approx(expected.log_probs)
    places = torch.nonzero(grown.real).flatten()
    for row, path in zip(places.tolist(), found.ancestors, strict=True):
        assert torch.nonzero(grown.visible[row]).flatten().tolist() == places[list(path)].tolist()


def test_rows_without_a_token_are_seen_by_no_other() -> None:
    grown = branched(HEADS, [1, 2, 3], 5, spare=2)
    hidden = ~grown.real
    assert hidden.tolist() == [False] * 4 + [True] * 2 + [False] + [True] * 4
    assert not grown.visible[grown.real][:, hidden].any()


def test_below_scores_that_are_not_finite_only_the_branch_is_left() -> None:
    tree = device_tree(HEADS)
    broken = DeviceTree(
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.log_probs,
        torch.tensor([True, False, False, False]),
        tree.visible,
        torch.tensor([False]),
        tree.levels,
    )
    grown = with_branch(broken, torch.tensor([1, 2]), torch.tensor([2]))
    assert as_tree(grown) == DraftTree((9, 1, 2), (-1, 0, 1), (0, 1, 2), (0.0, 0.0, 0.0))
    assert not grown.is_sound


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"repetition_penalty": 1.4}], ids=str)
def test_walks_go_down_the_branch_as_on_the_host(options: dict[str, float]) -> None:
    params = SamplingParams(seed=3, **options)  # type: ignore[arg-type]
    device, host = DeviceSampler(VOCAB, CPU), Sampler(params, [5], VOCAB, CPU)
    device.load(params, [5])
    tokens, walked = [1, 2, 3, 4, 5], 0
    expected_tree = on_host(HEADS, tokens)
    for seed in range(40):
        grown = branched(HEADS, tokens, 7, spare=1)
        logits = torch.randn(len(grown.tokens), VOCAB, generator=torch.Generator().manual_seed(seed))
        kept = torch.nonzero(grown.real).flatten()
        for row, parent in zip(kept.tolist()[1:], expected_tree.parents[1:], strict=True):
            logits[kept[parent], grown.tokens[row]] += 6.0
        expected = host.walk(expected_tree, logits[kept], 10 * seed)
        ours = device.walk(grown, logits, torch.tensor([10 * seed]))
        rows = [row for row in ours.rows.tolist() if row >= 0]
        assert rows == kept[list(expected.rows)].tolist()
        assert int(ours.next_token) == expected.next_token
        walked += sum(row >= len(HEADS) for row in expected.rows)
    assert walked > 30
