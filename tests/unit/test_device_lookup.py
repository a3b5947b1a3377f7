"""What the text repeats, in rounds on the device: plain decoding's text, and the cache that a prefill would leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from device_engines import KINDS, make, with_oracle
from engine_answers import PROMPT, answer, assert_cache_equals_prefill, ids_of
from fake_capture import FakeCapture
from hypothesis import given, settings
from hypothesis import strategies as st
from no_waiting import NoWaiting
from tiny_models import VOCAB

from treeeagle_edge.chat.answer import Speculation
from treeeagle_edge.drafting.lookup import Lookup
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape, rounds_within
from treeeagle_edge.drafting.shape_choice import OneShape, ShapeChoice
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = frozenset(range(3, VOCAB))  # a text of the other three tokens repeats itself
TREE = TreeShape(depth=4, branching=3, nodes=8)
BESIDE, ALONE = RoundShape(TREE, 7), RoundShape(None, 15)
BOUNDS = tree_shape(4, 3, 0)


def few(params: SamplingParams) -> SamplingParams:
    return replace(params, banned_ids=FEW)


def rounds_of(
    engine: Engine, params: SamplingParams, shape: RoundShape, prompt: Sequence[int] = PROMPT
) -> list[Round]:
    return list(engine.generate(prompt, params, choice=OneShape(shape)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [BESIDE, ALONE], ids=["beside", "alone"])
@pytest.mark.parametrize("right", [0, 2])
def test_the_text_of_plain_decoding(kind: str, shape: RoundShape, right: int) -> None:
    """Expectations rows 4, 10 and 20: greedy and sampled, whatever the head says beside the branch."""
    params = replace(few(KINDS[kind]), max_tokens=110)
    expected = answer(make(on_device=False), params, speculate=False)
    engine = make(shape=BOUNDS)
    with_oracle(engine, expected, right)
    rounds = rounds_of(engine, params, shape)
    assert ids_of(rounds) == expected
    assert sum(item.looked_up_accepted for item in rounds) > 0
    assert_cache_equals_prefill(engine)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    branch=st.integers(1, 12),
    tree=st.one_of(
        st.none(),
        st.builds(TreeShape, depth=st.integers(1, 5), branching=st.integers(1, 4), nodes=st.integers(1, 12)),
    ),
    stop_after=st.integers(0, 12),
    right=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_after_any_round_the_cache_equals_a_fresh_prefill(
    seed: int, branch: int, tree: TreeShape | None, stop_after: int, right: int, temperature: float
) -> None:
    """Expectations rows 20 and 22."""
    engine = make(shape=replace(BOUNDS, nodes=24))
    params = few(SamplingParams(max_tokens=24, temperature=temperature, seed=seed))
    text = answer(engine, params, speculate=False)
    engine.reset()
    with_oracle(engine, text, right)
    rounds, got = engine.generate(PROMPT, params, choice=OneShape(RoundShape(tree, branch))), []
    for item in rounds:
        got += item.ids
        if len(got) > stop_after * 2:
            break
    rounds.close()
    assert got == text[: len(got)]
    assert_cache_equals_prefill(engine)
    assert engine.usage().used_slots == sum(len(entry.slots) for entry in engine._pool.cached)


def test_the_branch_is_what_the_text_suggests_and_is_counted() -> None:
    """Round by round: the tokens of the lookup, in the text up to the root, below what the head drafted as well."""
    params = few(SamplingParams(max_tokens=60))
    for shape in (BESIDE, ALONE):
        engine = make(shape=BOUNDS)
        rounds, text = rounds_of(engine, params, shape), list(PROMPT)
        seen = 0
        for item in rounds:
            match = Lookup(text).match(min(shape.branch, 60 - (len(text) - len(PROMPT)) - 1))
            tree = item.tree
            if tree is not None and match is not None:
                path = 0
                for token in match.tokens:
                    path = tree.children[path][token]
                assert tree.looked_up <= len(match.tokens)
                seen += tree.looked_up
            elif tree is not None:
                assert tree.looked_up == 0
            text += item.ids
        stats = Speculation.of(rounds, enabled=True)
        assert stats.looked_up == seen > stats.looked_up_accepted > 0
        assert stats.drafted >= stats.looked_up


@pytest.mark.parametrize("shape", [BESIDE, ALONE], ids=["beside", "alone"])
def test_nothing_waits_and_an_empty_branch_takes_the_same_operations(shape: RoundShape) -> None:
    engine = make(shape=BOUNDS)
    params = few(SamplingParams(max_tokens=60, temperature=0.7, seed=3))
    assert engine._device is not None
    whole_run, operations = engine._device.round.run, []

    def guarded(shape: RoundShape, extend_rows: int) -> None:
        with NoWaiting() as guard:
            whole_run(shape, extend_rows)
        operations.append(guard.operations)

    engine._device.round.run = guarded  # type: ignore[method-assign]
    rounds = rounds_of(engine, params, shape)[1:]
    filled = {item.tree.looked_up > 0 for item in rounds if item.tree is not None}
    assert filled == {True, False}
    assert len(set(operations[:-1])) == 1  # the last round may be a plain one


def test_ends_limits_and_the_end_of_the_context() -> None:
    """Expectations rows 13, 14 and 25: no branch goes past an end, and none needs a slot more than a tree."""
    text = answer(make(on_device=False), few(SamplingParams(max_tokens=30)), speculate=False)
    engine = make(shape=BOUNDS)
    for shape in (BESIDE, ALONE):
        for limit in (1, 2, 3, 8, 17):
            rounds = rounds_of(engine, few(SamplingParams(max_tokens=limit)), shape)
            assert ids_of(rounds) == text[:limit]
            left = limit
            for item in rounds:
                if item.tree is not None and item.tree.looked_up:
                    assert item.tree.depths[-1] < left
                left -= len(item.ids)
        for stop in dict.fromkeys(text):
            params = few(SamplingParams(max_tokens=30, stop_ids=frozenset({stop})))
            rounds = rounds_of(engine, params, shape)
            assert ids_of(rounds) == text[: text.index(stop) + 1]
            for tree in (item.tree for item in rounds if item.tree is not None):
                assert all(tree.tokens[parent] != stop for parent in tree.parents[tree.head_rows :])
    for context in (16, 17, 33, 64):
        small = make(context=context, shape=replace(BOUNDS, nodes=15), slack=0)
        whole = answer(small, few(SamplingParams()), speculate=False)
        assert len(PROMPT) + len(whole) == context
        for shape in (RoundShape(TREE, 7), ALONE):
            small.reset()
            assert ids_of(rounds_of(small, few(SamplingParams()), shape)) == whole


def test_a_branch_behind_rows_without_nodes_keeps_its_own_slots() -> None:
    """Expectations row 22: the head drafts ends that nothing follows, so that its tree has fewer nodes than rows."""
    engine = make(shape=BOUNDS)
    params = replace(few(SamplingParams(max_tokens=100)), stop_ids=FEW)  # banned: the text has none of them
    expected = answer(make(on_device=False), params, speculate=False)
    rounds = rounds_of(engine, params, BESIDE)
    assert ids_of(rounds) == expected and len(expected) == 100
    trees = [item.tree for item in rounds if item.looked_up_accepted]
    assert any(tree is not None and tree.head_rows < 1 + TREE.nodes for tree in trees)
    assert_cache_equals_prefill(engine)


def test_where_the_heads_scores_are_not_finite_the_branch_still_serves() -> None:
    """Expectations row 5."""
    engine = make(shape=BOUNDS)
    params = few(SamplingParams(max_tokens=60))
    expected = answer(engine, params, speculate=False)
    engine.reset()
    rounds = engine.generate(PROMPT, params, choice=OneShape(BESIDE))
    items = [next(rounds), next(rounds)]
    while Lookup([*PROMPT, *ids_of(items)]).match(7) is None:
        items.append(next(rounds))
    before = len(items)
    assert engine._device is not None
    assert engine._device.round._features is not None
    engine._device.round._features.fill_(float("nan"))
    items += rounds
    assert ids_of(items) == expected
    failures = [item.draft_failures for item in items]
    assert failures == [0] * before + [1] + [0] * (len(items) - before - 1)
    broken = items[before].tree
    assert broken is not None
    assert broken.head_rows == 1 and broken.looked_up == 7
    assert torch.isfinite(engine.head.store.keys[:, : engine._pool.num_slots]).all()  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chosen_rounds_look_up_only_where_the_text_repeats(temperature: float) -> None:
    """With free choice among all shapes, over two turns, and as captured work."""
    capture = FakeCapture()
    engine = make(shape=BOUNDS, context=512, graphs=capture)
    shapes = rounds_within(BOUNDS)
    assert capture.captured == len(shapes)  # before the first answer
    choice = engine._device.choice(BOUNDS)  # type: ignore[union-attr]
    assert isinstance(choice, ShapeChoice)
    # as if rows cost hardly anything, and the head a good deal
    choice._seconds = {shape: 0.01 + (0.01 if shape.tree else 0.0) + 1e-5 * shape.branch for shape in shapes}
    choice.time = lambda shape, seconds: None  # type: ignore[method-assign]
    params = few(SamplingParams(max_tokens=120, temperature=temperature, seed=5))
    prompt = list(PROMPT)
    for _ in range(2):
        plain = answer(make(on_device=False, context=512), params, prompt, speculate=False)
        rounds = list(engine.generate(prompt, params))
        assert ids_of(rounds) == plain
        stats = Speculation.of(rounds, enabled=True)
        assert stats.looked_up > stats.looked_up_accepted > 0
        assert_cache_equals_prefill(engine)
        prompt += [*plain, 7]
    kept = len(engine._device.runs._replays)  # type: ignore[union-attr]
    assert len(shapes) < capture.captured == kept <= 2 * len(shapes)


@pytest.mark.parametrize("lookup", [True, False])
def test_without_lookup_or_where_nothing_repeats_rounds_have_no_branch(lookup: bool) -> None:
    engine = make(shape=replace(BOUNDS, lookup=lookup))
    assert engine._device is not None
    run, shapes = engine._device.round.run, []

    def noted(shape: RoundShape, extend_rows: int) -> None:
        shapes.append(shape)
        run(shape, extend_rows)

    engine._device.round.run = noted  # type: ignore[method-assign]
    rounds, text = list(engine.generate(PROMPT, SamplingParams(max_tokens=60))), list(PROMPT)
    repeats: dict[bool, list[int]] = {True: [], False: []}
    for item, shape in zip(rounds, (PLAIN, *shapes), strict=True):
        repeats[Lookup(text).match(1) is not None].append(shape.branch)
        text += item.ids
    assert repeats[False] and not any(repeats[False])
    assert any(repeats[True]) == lookup


def test_a_fixed_tree_has_no_branch() -> None:
    engine = make(shape=TREE)
    params = few(SamplingParams(max_tokens=60))
    rounds = list(engine.generate(PROMPT, params))
    assert {item.drafted for item in rounds[1:-1]} == {8}
    assert not any(item.tree.looked_up for item in rounds if item.tree is not None)


def test_head_rows_that_branches_left_out_are_written_before_the_next_tree() -> None:
    """Expectations row 22: branches without a head settle more tokens than a round's first pass has rows for."""
    engine = make(shape=BOUNDS, context=256)
    params = few(SamplingParams(max_tokens=160))
    expected = answer(engine, params, speculate=False)
    engine.reset()
    shapes = [ALONE, ALONE, PLAIN, BESIDE, RoundShape(TREE)]

    class InTurn(OneShape):
        def choose(self, match: object = None) -> RoundShape:
            shapes.append(shapes.pop(0))
            return shapes[-1]

    rounds = engine.generate(PROMPT, params, choice=InTurn(ALONE))
    got = [token for item in rounds for token in item.ids]
    assert got == expected
    assert_cache_equals_prefill(engine)
