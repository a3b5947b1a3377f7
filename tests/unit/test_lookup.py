"""Continuations looked up in the text: found where they stand, sized by what they earn, never a change of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_engine, tiny_head, tiny_target

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostModel, CostTable, load_table, save_table
from treeeagle_edge.drafting.lookup import Lookup, Match
from treeeagle_edge.drafting.lookup_acceptance import LookupAcceptance, Opinion, opinion
from treeeagle_edge.drafting.lookup_branch import Drafted, with_match
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

FLAT = CostTable(rows=(1, 32), verify=(0.010, 0.011), extend=0.0005, step=0.0005)  # rows are nearly free
SLOPED = CostTable(rows=(1, 32), verify=(0.010, 0.072), extend=0.0005, step=0.0005)  # 2 ms a row
STEEP = CostTable(rows=(1, 32), verify=(0.010, 0.320), extend=0.0005, step=0.0005)  # a row costs a whole pass
ROOT = DraftTree.root_only(9)


def brute_match(text: Sequence[int], most: int) -> tuple[int, list[int]] | None:
    """The definition: the newest earlier end of the last four tokens, else of the last two."""
    for run in (4, 2):
        for end in range(len(text) - 1, run - 1, -1):
            if len(text) > run and text[end - run : end] == text[-run:]:
                length = run
                while length < min(end, 16) and text[end - length - 1] == text[-length - 1]:
                    length += 1
                following = list(text[end:])
                while len(following) < most:
                    following += following
                return length, following[:most]
    return None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 60), st.integers(1, 9))
def test_a_match_is_the_newest_place_that_reads_like_the_end(text: list[int], cut: int, most: int) -> None:
    grown, whole = Lookup(text[:cut]), Lookup(text)
    grown.extend(text[cut:])
    expected = brute_match(text, most)
    for found in (grown.match(most), whole.match(most)):
        assert (found and (found.length, found.tokens)) == expected


def test_a_text_that_runs_in_circles_goes_on_in_circles() -> None:
    found = Lookup([5, 1, 2, 1, 2, 1, 2]).match(7)
    assert found == Match(4, [1, 2, 1, 2, 1, 2, 1])


def test_nothing_is_suggested_without_agreement_or_room() -> None:
    assert Lookup([1]).match(4) is None
    assert Lookup([1, 2, 3, 4]).match(4) is None
    assert Lookup([1, 2, 3, 1, 2]).match(0) is None


HEADS = DraftTree((9, 1, 2, 7), (-1, 0, 1, 0), (0, 1, 2, 1), (0.0, -0.2, -0.9, -2.0))
CHANCES = [1.0, 0.8, 0.4, 0.1]  # of its rows to be walked


def test_the_heads_opinion_is_odds_along_the_shared_path_and_what_it_leaves_behind_it() -> None:
    def odds(chance: float) -> float:
        return math.log(chance / (1 - chance))

    both = opinion(HEADS, Match(4, [1, 2, 3]), CHANCES)
    assert (both.rows, both.odds) == ([1, 2], pytest.approx([odds(0.8), odds(0.5), 0.0]))
    one = opinion(HEADS, Match(4, [1, 3]), CHANCES)
    assert (one.rows, one.odds) == ([1], pytest.approx([odds(0.8), math.log(0.5)]))
    none = opinion(HEADS, Match(4, [5]), CHANCES)
    assert (none.rows, none.odds) == ([], pytest.approx([math.log(0.1)]))
    assert opinion(ROOT, Match(4, [5]), [1.0]) == Opinion([], [0.0])
    for chances in ([1.0, 1.0, 1.0, 1.0], [1.0, 1e-9, 1e-18, 1e-9]):  # they may be as sure as that
        assert all(map(math.isfinite, opinion(HEADS, Match(4, [1, 2]), chances).odds))


def lines(acceptance: LookupAcceptance) -> list[tuple[float, ...]]:
    """The chance that each line gives, for every number of tokens that agree."""
    heads = Opinion([1], [0.0, 0.0])
    return [
        tuple(acceptance.chance(Match(agreed - place, [1] * 3), place, opinion) for agreed in range(4, 17))
        for place, opinion in ((0, None), (0, heads), (1, heads), (2, heads))
    ]


def test_chances_rise_with_what_agrees_and_with_what_the_head_thinks() -> None:
    for chances in lines(LookupAcceptance()):
        assert list(chances) == sorted(set(chances))
    acceptance, match = LookupAcceptance(), Match(4, [1, 2])
    by_odds = [acceptance.chance(match, 0, Opinion([1], [odds, 0.0])) for odds in (-1e9, -4.0, 0.0, 4.0, 1e9)]
    assert by_odds == sorted(set(by_odds))
    assert 0.0 < by_odds[0] < 1e-6 < 1 - 1e-6 < by_odds[-1] <= 1.0


def test_chances_are_learnt_up_to_the_first_wrong_token() -> None:
    acceptance, heads = LookupAcceptance(), Opinion([1], [0.5, -0.5])
    before = lines(acceptance)
    match = Match(3, [1, 2, 3, 4, 5])
    early = [acceptance.chance(match, place, heads) for place in range(3)]
    for _ in range(50):
        acceptance.observe(match, heads, [1, 2, 9, 4, 5])
    late = [acceptance.chance(match, place, heads) for place in range(3)]
    assert late[0] > early[0] + 0.05
    assert late[1] > early[1] + 0.3
    assert late[2] < early[2] - 0.4
    # the mean of right, right, wrong after 3, 4 and 5 tokens
    assert 0.5 < acceptance.chance(match, 1) < 0.8
    after = lines(acceptance)
    acceptance.observe(match, heads, [])
    assert lines(acceptance) == after != before


def test_without_a_draft_only_the_line_of_all_learns() -> None:
    acceptance, fresh = LookupAcceptance(), lines(LookupAcceptance())
    acceptance.observe(Match(3, [1]), None, [2])
    moved = lines(acceptance)
    assert all(now < before for now, before in zip(moved[0], fresh[0], strict=True))
    assert moved[1:] == fresh[1:]


def looked_up(tree: DraftTree, match: Match, table: CostTable = FLAT, **changed: object) -> DraftTree:
    settings: dict[str, object] = {"nodes": 32, "stop_ids": ()}
    return with_match(
        Drafted(tree, Acceptance().chances(tree) if tree.num_nodes else None, 0.0, 100.0),
        match,
        acceptance=LookupAcceptance(),
        costs=CostModel(table),
        **{**settings, **changed},  # type: ignore[arg-type]
    )


def test_a_match_becomes_one_more_branch_below_what_it_shares_with_the_heads_tree() -> None:
    match = Match(4, [1, 2, 3, 4])
    tree = looked_up(HEADS, match)
    assert (tree.looked_up, tree.head_rows) == (2, len(HEADS))
    assert tree.tokens == (*HEADS.tokens, 3, 4)
    assert tree.parents == (*HEADS.parents, 2, 4)
    assert tree.depths == (*HEADS.depths, 3, 4)
    for row, parent in enumerate(tree.parents[1:], start=1):
        assert parent < row
        assert tree.log_probs[row] <= tree.log_probs[parent]
    # what the head did not draft is not counted as its own
    assert opinion(tree, match, [1.0, 0.8, 0.4, 0.1, 0.3, 0.2]).rows == [1, 2]
    assert looked_up(HEADS, Match(12, [1, 2])) is HEADS


def test_a_sure_match_takes_the_place_of_what_the_head_drafted_beside_it() -> None:
    beside = looked_up(HEADS, Match(16, [1, 2, 3]), SLOPED)
    assert (beside.tokens, beside.parents) == ((9, 1, 2, 3), (-1, 0, 1, 2))
    assert (beside.depths, beside.looked_up) == ((0, 1, 2, 3), 1)
    assert beside.log_probs[:3] == HEADS.log_probs[:3]
    instead = looked_up(HEADS, Match(16, [5, 6, 7]), SLOPED)
    assert instead.head_rows < len(HEADS)
    assert instead.looked_up == 3
    assert looked_up(HEADS, Match(2, [5, 6, 7]), SLOPED) is HEADS  # here the head is trusted more


def test_rows_are_added_while_they_pay() -> None:
    sure, doubtful = Match(16, list(range(30))), Match(2, list(range(30)))
    assert looked_up(ROOT, sure).looked_up == 30
    assert looked_up(ROOT, sure, SLOPED).looked_up > looked_up(ROOT, doubtful, SLOPED).looked_up > 0
    assert looked_up(ROOT, doubtful, STEEP).looked_up == 0
    assert looked_up(HEADS, Match(2, [5, 6])).looked_up == 0  # the head thinks otherwise
    assert looked_up(ROOT, sure, nodes=5).looked_up == 5
    assert looked_up(HEADS, sure, nodes=3).num_nodes == 3
    stopped = looked_up(ROOT, Match(16, [1, 2, 3, 4]), stop_ids=(2,))
    assert stopped.tokens == (9, 1, 2)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.floats(-3.0, 0.0)), max_size=8),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(2, 16),
    st.integers(8, 16),
    st.sampled_from([FLAT, SLOPED, STEEP]),
)
def test_what_comes_out_is_a_tree_of_the_heads_rows_and_the_match(
    rows: list[tuple[int, int, float]], tokens: list[int], length: int, nodes: int, table: CostTable
) -> None:
    tree = ROOT
    for token, place, log_prob in rows:
        parent = place % len(tree)
        if tree.child(parent, token) is None:
            tree = DraftTree(
                (*tree.tokens, token),
                (*tree.parents, parent),
                (*tree.depths, tree.depths[parent] + 1),
                (*tree.log_probs, tree.log_probs[parent] + log_prob),
            )
    found = looked_up(tree, Match(length, tokens), table, nodes=nodes, stop_ids=(4,))
    assert found.num_nodes <= nodes
    paths = {tuple(tree.tokens[row] for row in path[1:]) for path in tree.ancestors}
    for row in range(1, len(found)):
        parent = found.parents[row]
        assert 0 <= parent < row
        assert found.depths[row] == found.depths[parent] + 1
        assert found.child(parent, found.tokens[row]) == row  # no twins
        path = tuple(found.tokens[above] for above in found.ancestors[row][1:])
        assert (path in paths) == (row < found.head_rows)
        if row >= found.head_rows:
            assert path == tuple(tokens[: len(path)])
            assert 4 not in path[:-1]


def test_what_was_looked_up_teaches_nothing_about_the_head() -> None:
    tree = looked_up(HEADS, Match(4, [1, 2, 3, 4]))
    assert tree.head_rows == len(HEADS)
    for walked in ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 4, 5)):
        mixed, alone = Acceptance(), Acceptance()
        mixed.observe(tree, walked)
        alone.observe(HEADS, tuple(row for row in walked if row < len(HEADS)))
        assert mixed.calibration == alone.calibration
        assert [mixed.continues(depth) for depth in range(6)] == [
            alone.continues(depth) for depth in range(6)
        ]


def test_a_sure_match_saves_the_draft() -> None:
    controller, bounds = Controller(replace(FLAT, extend=0.0001, step=0.0001)), tree_shape(5, 4, 0)
    dear = Controller(replace(FLAT, extend=0.005))
    match = Match(16, [1, 2, 3])
    assert controller.growth(bounds, (), match) is not None  # a draft costs hardly anything
    assert dear.growth(bounds, (), match) is None
    assert dear.growth(bounds, (), Match(2, [1, 2, 3])) is not None
    assert dear.growth(bounds, (), None) is not None
    tree = dear.with_match(ROOT, match, bounds, (), None)
    missed = Round((8,), "tree", 3, 0, tree, (0,), 8, 0.0, 0.01, 0.0)
    for _ in range(30):
        dear.observe(missed, None, match)
    assert dear.growth(bounds, (), match) is not None  # it was wrong too often


REPEATED = [3, 1, 4, 1, 5, 9, 2, 6] * 4


def engine(costs: CostTable, *, lookup: bool = True) -> Engine:
    shape = replace(tree_shape(5, 3, 0), lookup=lookup)
    target = tiny_target(context=256)
    slots = 256 + shape.nodes + 1
    return Engine(target, tiny_head(target, slots=slots), context=256, slots=slots, tree=shape, costs=costs)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("draft_s", [0.0005, 0.5])  # as a rule with a draft; as a rule without
def test_the_text_is_the_one_of_plain_decoding(temperature: float, draft_s: float) -> None:
    """And head rows afterwards are those of a fresh prefill, whether the head drafted beside the match or not."""
    speculating = engine(replace(FLAT, extend=draft_s, step=draft_s))
    few = frozenset(range(5, speculating.target.config.vocab_size))  # a text of five tokens repeats itself
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=5, banned_ids=few)
    plain = [i for item in speculating.generate(REPEATED, params, speculate=False) for i in item.ids]
    speculating.reset()
    rounds = list(speculating.generate(REPEATED, params))
    assert [i for item in rounds for i in item.ids] == plain
    trees = [item.tree for item in rounds if item.tree is not None]
    assert any(tree.looked_up and tree.head_rows > 1 for tree in trees) or draft_s > 0.1
    assert any(tree.looked_up and tree.head_rows == 1 for tree in trees) or draft_s < 0.1
    assert any(item.looked_up_accepted for item in rounds)
    entry = speculating._pool.cached[-1]
    assert entry.head_tokens == len(entry.tokens)
    fresh = tiny_engine(context=256)
    sequence = fresh._open(list(entry.tokens), with_head=True, reuse=False)
    fresh._passes.prefill(sequence, list(entry.tokens))
    assert speculating.head is not None
    assert fresh.head is not None
    ours, theirs = (
        e.head.store.keys[:, s[1:]] for e, s in ((speculating, list(entry.slots)), (fresh, sequence.slots))
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_lookup_can_be_left_out() -> None:
    rounds = engine(FLAT, lookup=False).generate(REPEATED, SamplingParams(max_tokens=60))
    assert not any(item.tree.looked_up for item in rounds if item.tree is not None)


def test_no_more_is_looked_up_than_an_answer_may_have_left() -> None:
    rounds = list(engine(FLAT).generate(REPEATED, SamplingParams(max_tokens=9)))
    left = 9
    for item in rounds:
        if item.tree is not None:
            assert max(item.tree.depths) < left
        left -= len(item.ids)
    assert left == 0


def headless(*, invariant: bool, tree: TreeShape) -> Engine:
    target = tiny_target(context=256)
    target.batch_invariant = invariant
    return Engine(target, None, context=256, slots=256 + tree.nodes + 1, tree=tree, costs=FLAT)


def test_without_a_head_the_text_alone_suggests_and_stays_that_of_plain_decoding() -> None:
    engine = headless(invariant=True, tree=tree_shape(5, 3, 0))
    assert engine.speculates
    assert not engine.has_head
    few = frozenset(range(5, engine.target.config.vocab_size))
    params = SamplingParams(max_tokens=120, banned_ids=few)
    plain = [i for item in engine.generate(REPEATED, params, speculate=False) for i in item.ids]
    rounds = list(engine.generate(REPEATED, params))
    assert [i for item in rounds for i in item.ids] == plain
    assert any(item.looked_up_accepted for item in rounds)
    assert all(
        item.tree.head_rows == 1 and not item.draft_failures for item in rounds if item.tree is not None
    )
    fixed = engine.generate(REPEATED, params, tree=TreeShape(3, 3, 8))  # only a head could draft that
    assert all(item.drafted == 0 for item in fixed)


@pytest.mark.parametrize(
    ("invariant", "tree"),
    [
        (False, tree_shape(5, 3, 0)),
        (True, TreeShape(5, 3, 8)),
        (True, replace(tree_shape(5, 3, 0), lookup=False)),
    ],
)
def test_without_a_head_other_trees_decode_plainly(invariant: bool, tree: TreeShape) -> None:
    engine = headless(invariant=invariant, tree=tree)
    assert not engine.speculates
    assert {item.kind for item in engine.generate(REPEATED, SamplingParams(max_tokens=9))} == {
        "prefill",
        "plain",
    }


def test_costs_are_measured_without_a_head_too(tmp_path: Path) -> None:
    target = tiny_target(context=256)
    target.batch_invariant = True
    table = Engine(target, None, context=256, slots=300, tree=tree_shape(5, 3, 0)).costs
    assert table is not None
    assert min(table.verify) > 0 == table.extend == table.step
    save_table(tmp_path / "table.json", replace(table, steady=True))
    assert load_table(tmp_path / "table.json") == replace(table, steady=True)
