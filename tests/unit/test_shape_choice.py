"""The choice among captured shapes: by expected tokens a second, and plain decoding where drafts do not pay."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from device_engines import make
from engine_answers import PROMPT, answer, ids_of

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape, rounds_within, shapes_within
from treeeagle_edge.drafting.shape_choice import ShapeChoice, expected_gains
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

BOUNDS = tree_shape(5, 4, 0)


def test_the_list_stays_within_what_was_allowed() -> None:
    assert shapes_within(BOUNDS) == (
        TreeShape(2, 2, 4),
        TreeShape(3, 3, 8),
        TreeShape(4, 4, 16),
        TreeShape(5, 4, 24),
        TreeShape(5, 4, 32),
    )
    assert shapes_within(tree_shape(2, 1, 0))[-1] == TreeShape(2, 1, 32)
    assert all(shape.depth <= 2 and shape.branching == 1 for shape in shapes_within(tree_shape(2, 1, 0)))
    assert shapes_within(TreeShape(3, 2, 4, adaptive=True)) == (TreeShape(3, 2, 4),)


def test_rounds_are_of_a_tree_a_branch_both_or_neither() -> None:
    trees = shapes_within(BOUNDS)
    plain_and_trees = (PLAIN, *(RoundShape(tree) for tree in trees))
    branches = RoundShape(None, 15), RoundShape(TreeShape(3, 3, 8), 7)
    assert rounds_within(BOUNDS) == (*plain_and_trees, *branches)
    assert RoundShape(TreeShape(2, 3, 8), 7) in rounds_within(tree_shape(2, 4, 0))
    assert rounds_within(TreeShape(4, 3, 12, adaptive=True))[-1] == RoundShape(
        None, 12
    )  # no room beside a tree
    assert rounds_within(replace(BOUNDS, lookup=False)) == plain_and_trees
    fixed = TreeShape(3, 2, 4)
    assert rounds_within(fixed) == (PLAIN, RoundShape(fixed))
    assert rounds_within(None) == (PLAIN,)
    for nodes in range(1, 40):
        for shape in rounds_within(TreeShape(5, 4, nodes, adaptive=True)):
            assert shape.branch + (shape.tree.nodes if shape.tree else 0) <= nodes


def chain(length: int, log_prob: float = math.log(0.8)) -> DraftTree:
    """`length` nodes one below the other, then a sibling of the first."""
    rows = range(length)
    return DraftTree(
        (0, *(1 + row for row in rows), 99),
        (-1, *rows, 0),
        (0, *(1 + row for row in rows), 1),
        (0.0, *(log_prob * (1 + row) for row in rows), log_prob * (length + 1)),
    )


def test_a_shape_gains_what_it_has_of_the_tree() -> None:
    shapes = (
        TreeShape(1, 1, 9),
        TreeShape(1, 2, 9),
        TreeShape(3, 1, 2),
        TreeShape(3, 1, 9),
        TreeShape(4, 2, 9),
    )
    gains = expected_gains(chain(4), shapes, Acceptance())
    chance, sibling = 0.8, 0.8**5
    assert [gains[shape] for shape in shapes] == pytest.approx(
        [
            chance,
            chance + sibling,
            chance + chance**2,
            chance + chance**2 + chance**3,
            sum(chance**k for k in (1, 2, 3, 4)) + sibling,
        ]
    )


def test_children_of_a_node_that_a_shape_would_not_expand_are_left_out() -> None:
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 2), (0, 1, 1, 2), (0.0, -0.1, -0.2, -0.3))
    gains = expected_gains(tree, (TreeShape(2, 1, 9), TreeShape(2, 2, 9)), Acceptance())
    assert gains[TreeShape(2, 1, 9)] == pytest.approx(math.exp(-0.1))
    assert gains[TreeShape(2, 2, 9)] > math.exp(-0.1) + math.exp(-0.2)


def a_round(tree: DraftTree, walked: int) -> Round:
    return Round(
        (1,) * walked, "tree", len(tree) - 1, walked, tree, tuple(range(walked + 1)), 1, 0.0, 0.01, 0.0
    )


def drive(
    choice: ShapeChoice, seconds: dict[RoundShape, float], right: float, rounds: int
) -> list[TreeShape | None]:
    """Rounds in which each level is right with the chance `right`; returns the trees that were chosen."""
    draw, chosen = random.Random(3), []
    for _ in range(rounds):
        shape = choice.choose()
        chosen.append(shape.tree)
        assert not shape.branch
        if shape.tree is None:
            choice.learn(shape, a_round(DraftTree.root_only(0), 0))
        else:
            tree = chain(shape.tree.depth, math.log(right))
            walked = next((k for k in range(shape.tree.depth) if draw.random() > right), shape.tree.depth)
            choice.learn(shape, a_round(tree, walked))
        choice.time(shape, seconds[shape])
    return chosen


def costs(row: float, level: float) -> dict[RoundShape, float]:
    """Seconds of a round: 10 ms, and so much more for each row, and for each level of a tree."""
    found = {}
    for shape in rounds_within(BOUNDS):
        depth, nodes = (shape.tree.depth, shape.tree.nodes) if shape.tree else (0, 0)
        found[shape] = 0.01 + row * (nodes + shape.branch) + level * depth
    return found


def timed(seconds: dict[RoundShape, float]) -> ShapeChoice:
    choice = ShapeChoice(BOUNDS)
    for shape, each in seconds.items():
        choice.time(shape, each)
    return choice


def test_what_was_never_timed_comes_first() -> None:
    choice = ShapeChoice(BOUNDS)
    seen = []
    for _ in choice.rounds:
        seen.append(choice.choose())
        choice.time(seen[-1], 0.01)
    assert seen == [*reversed(choice.rounds)]


def test_right_drafts_make_deep_trees_and_wrong_ones_none() -> None:
    """Expectations row 19: the choice follows acceptance and cost, and comes back when drafts are right again."""
    seconds = costs(row=0.00005, level=0.0005)
    choice = timed(seconds)
    right = drive(choice, seconds, 0.95, 300)[100:]
    assert sum(shape is not None and shape.depth >= 4 for shape in right) > 0.8 * len(right)
    wrong = drive(choice, seconds, 0.02, 900)[300:]
    assert sum(shape is None for shape in wrong) > 0.85 * len(wrong)
    again = drive(choice, seconds, 0.95, 900)[600:]
    assert sum(shape is not None and shape.depth >= 4 for shape in again) > 0.8 * len(again)


SURE, DOUBTFUL = Match(16, list(range(15))), Match(2, list(range(15)))


def test_a_sure_match_needs_no_head_and_a_doubtful_one_stands_beside_its_tree() -> None:
    seconds = costs(row=0.00005, level=0.0001)
    choice = timed(seconds)
    drive(choice, seconds, 0.6, 200)
    choice._waits = 10  # no probe is due
    assert choice.choose().branch == 0
    assert choice.choose(SURE) == RoundShape(None, 15)
    doubtful = choice.choose(DOUBTFUL)
    assert doubtful.branch == 7 and doubtful.tree is not None
    dear = timed({**seconds, **{shape: 1.0 for shape in seconds if shape.branch}})
    assert dear.choose(SURE).branch == 0


def test_what_is_looked_up_is_learnt_from_every_round_with_a_match() -> None:
    """Whether the round had the branch or not; and such rounds put off no probe."""
    seconds = costs(row=0.001, level=0.0)
    alone, tree = RoundShape(None, 15), DraftTree.root_only(9)
    wrong = replace(a_round(tree, 0), walked=(0,), next_token=99)
    for shape in (PLAIN, alone):
        choice = timed(seconds)
        choice._waits = 1000
        assert choice.choose(SURE).branch
        for _ in range(40):
            choice.learn(shape, wrong, SURE)
        assert not choice.choose(SURE).branch
        right = replace(wrong, next_token=0)
        for _ in range(80):
            choice.learn(shape, right, SURE)
        assert choice.choose(SURE).branch
        assert choice._waits == (1000 if shape.branch else 880)


def test_probes_wait_while_a_branch_pays() -> None:
    seconds = costs(row=0.0002, level=0.001)
    choice = timed(seconds)
    assert choice._waits <= 0
    assert choice.choose(SURE).branch
    largest = RoundShape(shapes_within(BOUNDS)[-1])
    assert choice.choose() == largest
    hopeless = Match(2, [1])
    for _ in range(40):
        choice._lookups.observe(hopeless, None, [2])
    assert choice.choose(hopeless) == largest


def test_a_branch_says_nothing_about_the_head() -> None:
    tree = chain(3)
    rows = len(tree)
    branched = DraftTree(
        (*tree.tokens, 50, 51),
        (*tree.parents, 1, rows),
        (*tree.depths, 2, 3),
        (*tree.log_probs, -0.1, -0.1),
        2,
    )
    shapes = (TreeShape(3, 2, 9), TreeShape(5, 4, 32))
    assert expected_gains(branched, shapes, Acceptance()) == expected_gains(tree, shapes, Acceptance())


def test_dear_levels_make_shallow_trees() -> None:
    seconds = costs(row=0.0, level=0.004)
    chosen = drive(timed(seconds), seconds, 0.5, 400)[100:]
    depths = [shape.depth if shape is not None else 0 for shape in chosen]
    assert sum(depth <= 2 for depth in depths) > 0.8 * len(depths)


def test_probes_grow_rare_while_plain_decoding_stays_the_fastest() -> None:
    seconds = costs(row=0.001, level=0.01)
    chosen = drive(timed(seconds), seconds, 0.3, 1200)
    probes = [at for at, (before, now) in enumerate(pairwise(chosen)) if before is None and now is not None]
    waits = [b - a for a, b in pairwise(probes)]
    assert waits == sorted(waits) and waits[-1] > 3 * waits[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_chosen_shapes_give_the_text_of_plain_decoding(temperature: float) -> None:
    engine = make(shape=tree_shape(4, 3, 0), context=256)
    params = SamplingParams(max_tokens=150, temperature=temperature, seed=5)
    plain = answer(engine, params, speculate=False)
    engine.reset()
    rounds = list(engine.generate(PROMPT, params))
    assert ids_of(rounds) == plain
    assert engine._device is not None
    choice = engine._device.choice(engine.tree)  # type: ignore[arg-type]
    assert choice is not None
    assert isinstance(choice, ShapeChoice)
    assert set(choice._seconds) == set(choice.rounds)  # timed before the first answer
    assert {item.kind for item in rounds[1:]} <= {"tree", "plain"}
    heads = {item.tree.head_rows - 1 for item in rounds[1:] if item.tree is not None}
    assert heads <= {0, 4, 8, 16, 24, 30}  # of 32 there are only 3 + 3 * 9
