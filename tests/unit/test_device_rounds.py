"""Rounds that stay on the device give the text of plain decoding and leave the cache that the host would.

Here the device is the CPU, and the operations are those that a card would run.
"""

from __future__ import annotations

import pytest
import torch
from device_engines import KINDS, make, with_oracle
from engine_answers import PROMPT, answer, assert_cache_equals_prefill, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, tiny_target

from treeeagle_edge.chat.answer import Speculation
from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape, shapes_within
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.rounds import TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_the_text_of_plain_decoding_and_of_the_host(kind: str, right: int) -> None:
    """Expectations rows 4 and 10: one seed, one text, with a tree or without, wherever rounds are led."""
    params = KINDS[kind]
    expected = answer(make(on_device=False), params, speculate=False)
    engine = make()
    with_oracle(engine, expected, right)
    assert answer(engine, params, speculate=False) == expected
    engine.reset()
    rounds = list(engine.generate(PROMPT, params))
    assert ids_of(rounds) == expected
    accepted = [item.accepted for item in rounds[1:]]
    assert max(accepted) >= right and {item.kind for item in rounds[1:-1]} == {"tree"}
    assert_cache_equals_prefill(engine)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 6),
    branching=st.integers(1, 4),
    nodes=st.integers(1, 24),
    stop_after=st.integers(0, 12),
    right=st.integers(0, 4),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_after_any_round_the_cache_equals_a_fresh_prefill(
    seed: int, depth: int, branching: int, nodes: int, stop_after: int, right: int, temperature: float
) -> None:
    """Expectations rows 20 and 22: slots are committed and head rows rewritten as the host would."""
    engine = make(shape=TreeShape(depth, branching, nodes))
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=seed)
    text = answer(engine, params, speculate=False)
    engine.reset()
    with_oracle(engine, text, right)
    rounds, got = engine.generate(PROMPT, params), []
    for item in rounds:
        got += item.ids
        if len(got) > stop_after * 2:
            break
    rounds.close()  # type: ignore[attr-defined]
    assert got == text[: len(got)]
    assert_cache_equals_prefill(engine)
    assert engine.usage().used_slots == sum(len(entry.slots) for entry in engine._pool.cached)


def test_ends_limits_and_the_end_of_the_context() -> None:
    """Expectations rows 13, 14 and 25."""
    plain = make(on_device=False)
    text = answer(plain, SamplingParams(max_tokens=20), speculate=False)
    engine = make()
    with_oracle(engine, text, 3)
    for limit in (1, 2, 3, 8):
        assert answer(engine, SamplingParams(max_tokens=limit)) == text[:limit]
    for stop in dict.fromkeys(text):
        end = text.index(stop) + 1
        rounds = list(engine.generate(PROMPT, SamplingParams(max_tokens=20, stop_ids=frozenset({stop}))))
        assert ids_of(rounds) == text[:end]
        assert rounds[-1].finish_reason == "stop"
    for context in (16, 17, 33):
        shape = TreeShape(depth=6, branching=4, nodes=20)
        small = make(context=context, shape=shape, slack=0)
        text = answer(small, SamplingParams(), speculate=False)
        assert len(PROMPT) + len(text) == context
        small.reset()
        with_oracle(small, text, 5)
        assert answer(small, SamplingParams()) == text


def test_turns_go_on_from_each_others_cache(engine: Engine) -> None:
    """Expectations row 21: what one answer leaves serves the next, led from either side."""
    engine.reset()
    params = SamplingParams(max_tokens=12)
    first = answer(engine, params)
    second = [*PROMPT, *first, 7, 7]
    rounds = list(engine.generate(second, params))
    assert rounds[0].cached_tokens >= len(PROMPT) + len(first) - 1
    assert ids_of(rounds) == answer(make(on_device=False), params, second, speculate=False)
    assert_cache_equals_prefill(engine)


def test_plain_rounds_keep_features_until_their_head_rows_are_written() -> None:
    """More plain rounds than features are kept, then trees again: head rows are true all the way."""
    engine = make(shape=tree_shape(4, 3, 0), context=256)
    params = SamplingParams(max_tokens=200)
    assert engine._device is not None
    assert engine.tree is not None
    choice = engine._device.choice(engine.tree)
    plain_until = iter([PLAIN] * 150 + [RoundShape(shapes_within(engine.tree)[-1])] * 100)
    choice.choose = lambda match: next(plain_until)  # type: ignore[method-assign]
    rounds = list(engine.generate(PROMPT, params))
    kinds = [item.kind for item in rounds[1:-1]]
    assert kinds == ["plain"] * 150 + ["tree"] * (len(kinds) - 150) and len(kinds) > 170
    assert ids_of(rounds) == answer(engine, params, speculate=False, reuse_prefix=False)
    assert_cache_equals_prefill(engine)


def test_without_a_head_every_round_is_a_plain_one() -> None:
    target = tiny_target(context=64)
    engine = Engine(target, None, context=64, slots=66, tree=None, on_device=True)
    params = KINDS["everything"]
    rounds = list(engine.generate(PROMPT, params))
    assert {item.kind for item in rounds[1:]} == {"plain"}
    assert ids_of(rounds) == answer(make(on_device=False), params, speculate=False)


def test_stats_add_up(engine: Engine) -> None:
    """The whole time of a round stands under one name, so that the gain stays an upper bound until it is measured."""
    engine.reset()
    rounds = list(engine.generate(PROMPT, SamplingParams(max_tokens=60)))
    stats = Speculation.of(rounds, enabled=True)
    assert stats.settled >= len(ids_of(rounds)) - 1 and stats.drafted == 8 * stats.tree_rounds
    assert stats.draft_s == stats.sample_s == 0.0 < stats.verify_s
    assert stats.gain == pytest.approx((stats.settled - stats.plain_rounds) / stats.tree_rounds)
    assert stats.levels_per_tree > 1


def test_a_second_answer_beside_the_first_is_led_by_the_host(engine: Engine) -> None:
    engine.reset()
    params = SamplingParams(max_tokens=20)
    expected = answer(engine, params)
    engine.reset()
    outer = engine.generate(PROMPT, params)
    got = [*next(outer).ids, *next(outer).ids]
    assert answer(engine, params) == expected
    for item in outer:
        got += item.ids
    assert got == expected
    assert not engine._device.is_lent  # type: ignore[union-attr]


def test_a_refused_answer_leaves_the_device_free(engine: Engine) -> None:
    with pytest.raises(InputError, match="not in the vocabulary"):
        answer(engine, SamplingParams(banned_ids=frozenset({VOCAB})))
    rounds = engine.generate(PROMPT, SamplingParams(max_tokens=9))
    next(rounds), next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert engine._device is not None
    assert not engine._device.is_lent
    assert {item.draft_s for item in engine.generate(PROMPT, SamplingParams(max_tokens=9))} == {0.0}


def test_bad_draft_scores_cost_one_plain_step_and_are_counted() -> None:
    """Expectations row 5."""
    engine = make()
    params = SamplingParams(max_tokens=24)
    expected = answer(engine, params, speculate=False)
    engine.reset()
    rounds = engine.generate(PROMPT, params)
    items = [next(rounds), next(rounds), next(rounds)]
    assert engine._device is not None
    assert engine._device.round._features is not None
    engine._device.round._features.fill_(float("nan"))
    items += rounds
    assert ids_of(items) == expected
    assert [item.draft_failures for item in items] == [0, 0, 0, 1, *[0] * (len(items) - 4)]
    assert items[3].kind == "plain" and items[4].kind == "tree"
    assert torch.isfinite(engine.head.store.keys[:, : engine._pool.num_slots]).all()  # type: ignore[union-attr]


def test_logits_that_are_not_finite_are_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.reset()
    rounds = engine.generate(PROMPT, SamplingParams(max_tokens=9))
    next(rounds), next(rounds)
    monkeypatch.setattr(
        engine.target, "logits", lambda hidden: torch.full((len(hidden), VOCAB), float("nan"))
    )
    with pytest.raises(CannotRunError, match="non-finite logits"):
        next(rounds)
    assert engine.usage().used_slots == len(engine._pool.cached[-1].slots)


def test_exact_mode_and_the_cpu_leave_the_lead_to_the_host() -> None:
    assert make(on_device=False)._device is None
    target = tiny_target(context=64)
    assert Engine(target, None, context=64, slots=66, tree=None)._device is None
