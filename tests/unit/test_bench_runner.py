"""Interleaving, timing, parity and sizing, on an engine whose every figure can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from bench_fakes import FakeClock, FakeEngine, FakeTokenizer, FakeWatch

from treeeagle_edge.bench.arms import Bench, size_quick
from treeeagle_edge.bench.prompts import BenchPrompt
from treeeagle_edge.bench.samples import Limits, Pace, first_difference
from treeeagle_edge.errors import InputError
from treeeagle_edge.sampling_params import SamplingParams

ONE = (BenchPrompt("chat", "one", ("hello",)),)
TWO = (BenchPrompt("chat", "one", ("hello",)), BenchPrompt("code", "two", ("sort",)))


def bench(
    prompts: Sequence[BenchPrompt] = ONE, *, params: SamplingParams | None = None, **engine: object
) -> Bench:
    clock = FakeClock()
    fake = FakeEngine(clock, **engine)
    return Bench(fake, FakeTokenizer(), prompts, params or SamplingParams(), watch=FakeWatch(), clock=clock)


def test_arms_are_interleaved_and_the_order_turns_round():
    run = bench(TWO)
    run.run(Limits(4, 2))
    assert run.engine.calls == [*("plain", "tree", "tree", "plain"), *("tree", "plain", "plain", "tree")]
    assert run.engine.closed == 8


def test_a_sample_counts_rounds_tokens_and_engine_time():
    # 9 tokens: one from the prefill, then rounds of 3, 1, 3, 1 by the tree
    result = bench().run(Limits(9, 1))
    plain, tree = result.samples
    assert (plain.arm, tree.arm) == ("plain", "tree")
    assert plain.ids == tree.ids == tuple(ord(letter) for letter in "abcdefgha")
    assert plain.prompt_tokens == len("<u>hello<a>")
    assert plain.ttft_s == pytest.approx(0.011)
    assert (plain.rounds, plain.accepted, plain.drafted, plain.offered) == (8, 0, 0, ())
    assert plain.decode_s == pytest.approx(0.080)
    assert (tree.rounds, tree.accepted, tree.drafted) == (4, 4, 8)
    assert (tree.offered, tree.reached) == ((4, 4), (2, 2))
    assert tree.decode_s == pytest.approx(0.060)
    assert tree.decoded == 8
    assert tree.finish_reason == "length"
    assert result.divergences == ()


def test_a_difference_is_found_with_its_margin_after_the_common_tokens():
    run = bench(slip=3)
    (found,) = run.run(Limits(9, 1)).divergences
    assert (found.token, found.plain_id, found.tree_id, found.margin) == (3, ord("d"), ord("?"), 0.0125)
    assert run.engine.margins == [(tuple(map(ord, "<u>hello<a>abc")), ord("d"), ord("?"))]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(repetition_penalty=1.1)])
def test_no_margin_is_claimed_where_more_than_the_logits_decides(params: SamplingParams):
    run = bench(slip=3, params=params)
    (found,) = run.run(Limits(9, 1)).divergences
    assert found.margin is None
    assert run.engine.margins == []


def test_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
    assert first_difference((), (5,)) == 0


def test_an_answer_that_ended_early_is_a_difference_without_a_margin():
    run = bench()
    run.engine.text = "ab\0"
    run.stops = ("b",)  # the tree arm overshoots within a round, and is cut at the same token
    result = run.run(Limits(9, 1))
    assert [sample.ids for sample in result.samples] == [(ord("a"), ord("b"))] * 2
    assert [sample.finish_reason for sample in result.samples] == ["stop", "stop"]
    assert result.divergences == ()


def test_later_turns_follow_the_plain_answers_in_both_arms():
    run = bench((BenchPrompt("chat", "two turns", ("hi", "go on")),), slip=1)
    run.run(Limits(3, 1))
    assert run.engine.calls == ["plain", "tree", "tree", "plain"]
    assert run.engine.prompts == ["<u>hi<a>"] * 2 + ["<u>hi<a>abc<u>go on<a>"] * 2


def test_raw_sends_the_text_as_it_is_and_a_system_prompt_goes_first():
    run = bench((BenchPrompt("chat", "one", ("hi", "more")),))
    run.system = "be brief"
    assert run.prompt(run.prompts[0]).text == "<s>be brief<u>hi<a>"
    run.raw = True
    assert run.prompt(run.prompts[0]).text == "hi"
    assert run.prompt(run.prompts[0], 2, ["abc"]).text == "hiabcmore"


def test_without_a_head_only_the_plain_arm_runs():
    run = bench(speculates=False)
    result = run.run(Limits(4, 2))
    assert result.arms == ("plain",)
    assert run.engine.calls == ["plain", "plain"]
    assert bench().arms == ("plain", "tree")
    off = bench()
    off.speculate = False
    assert off.arms == ("plain",)


def test_a_prompt_that_leaves_no_room_is_named():
    run = bench(context=12)
    with pytest.raises(InputError, match=r"the prompt one has 11 tokens.* context of 12") as caught:
        run.run(Limits(4, 1))
    assert "--context" in str(caught.value.hint)


def test_warm_up_times_the_second_run_of_each_arm():
    run = bench()
    pace = run.warm_up()
    assert run.engine.calls == ["plain", "plain", "tree", "tree"]
    assert pace.prefill_s == pytest.approx(0.002)  # 1 ms a token in each arm
    assert pace.decode_s == pytest.approx(0.010 + 7 * 0.015 / 15)  # 15 tokens in 7 rounds


def test_an_interrupt_keeps_complete_repetitions():
    run = bench(TWO, interrupt_at_call=6)  # in the second repetition
    result = run.run(Limits(4, 3))
    assert result.interrupted
    assert result.repetitions == 1
    assert {sample.repetition for sample in result.samples} == {0}
    assert len(result.samples) == 4


def test_an_interrupt_in_the_first_repetition_keeps_the_pairs_so_far():
    result = bench(TWO, interrupt_at_call=3).run(Limits(4, 3))
    assert (result.interrupted, result.repetitions) == (True, 0)
    assert [sample.prompt for sample in result.samples] == ["one", "one"]


def test_an_interrupt_before_any_pair_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        bench(interrupt_at_call=1).run(Limits(4, 1))


def test_no_repetition_begins_that_would_not_end_in_time():
    # a repetition: 2 x 11 ms of prefill, 80 ms plain, 60 ms tree = 162 ms
    assert bench().run(Limits(9, 5, seconds=0.33)).repetitions == 2
    assert bench().run(Limits(9, 5, seconds=0.32)).repetitions == 1
    assert bench().run(Limits(9, 5, seconds=0.01)).repetitions == 1
    assert bench().run(Limits(9, 5)).repetitions == 5


@pytest.mark.parametrize(
    ("decode_s", "expected"),
    [
        (0.025, Limits(64, 3, 45.0)),  # 2 x (1 + 5 x 64 x 0.025) = 18 s
        (0.075, Limits(48, 3, 45.0)),  # 64 tokens would take 50 s, 48 take 38 s
        (0.250, Limits(16, 3, 45.0)),  # 16 tokens take 42 s
        (2.000, Limits(16, 1, 45.0)),  # nothing fits: one repetition of short answers
    ],
)
def test_quick_sizes_the_answers_by_the_pace(decode_s: float, expected: Limits):
    assert size_quick(Pace(0.002, decode_s), prompt_tokens=500, prompts=5, seconds=45.0) == expected
