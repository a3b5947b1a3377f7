"""No operation of a round waits for the host, so that a CUDA graph can hold it; where none can be had, eager serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_engines import KINDS, SHAPE, make, with_oracle
from engine_answers import PROMPT, answer, ids_of
from fake_capture import FakeCapture
from no_waiting import NoWaiting, on_meta
from replayed_capture import ReplayedCapture
from tiny_models import VOCAB

from treeeagle_edge.drafting.round_shapes import PLAIN, RoundShape
from treeeagle_edge.drafting.shape_choice import OneShape
from treeeagle_edge.rounds import tree_shape
from treeeagle_edge.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_round_waits_for_the_host(kind: str) -> None:
    """Every operation of every round passes a guard, and the text is right all the same."""
    engine = make()
    params = KINDS[kind]
    expected = answer(engine, params, speculate=False)
    engine.reset()
    with_oracle(engine, expected, 2)
    assert engine._device is not None
    whole_run, operations = engine._device.round.run, []

    def guarded(shape: RoundShape, extend_rows: int) -> None:
        with NoWaiting() as guard:
            whole_run(shape, extend_rows)
        operations.append(guard.operations)

    engine._device.round.run = guarded  # type: ignore[method-assign]
    assert answer(engine, params) == expected
    # fixed shapes, fixed operations; the last round may be a plain one
    assert len(operations) > 8 and len(set(operations[:-1])) == 1 and operations[0] > 500


def test_the_guard_sees_what_waits() -> None:
    with NoWaiting():
        row = torch.arange(4)
        for waits in (
            lambda: int(row[1]),
            lambda: bool((row > 1).any()),
            lambda: row[row > 1],
            lambda: torch.nonzero(row),
            lambda: torch.tensor([1, 2]),
        ):
            with pytest.raises(AssertionError, match="host"):
                waits()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_never_looks_at_a_value(kind: str) -> None:
    """On tensors without memory, where there is no value to look at: with a tree, and plain."""
    engine = make()
    answer(engine, KINDS[kind])  # what is made at the first use is there
    assert engine._device is not None
    round_ = on_meta(engine._device.round)
    for shape in (RoundShape(SHAPE), PLAIN, RoundShape(SHAPE, 7), RoundShape(None, 15)):
        round_.run(shape, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        round_.read(PLAIN)  # which does look


@pytest.mark.parametrize("kind", KINDS)
def test_captured_rounds_give_the_same_text(kind: str) -> None:
    """Warming up runs the work on the same buffers: what it changed, history included, is put back."""
    capture = FakeCapture()
    engine = make(graphs=capture)
    assert capture.captured == 2  # before the first answer: the tree, and plain decoding
    params = KINDS[kind]
    expected = answer(make(on_device=False), params, speculate=False)
    for _ in range(2):
        engine.reset()
        assert answer(engine, params) == expected
        assert answer(engine, params, speculate=False) == expected
    assert capture.captured == 2 if kind == "greedy" else 4
    assert engine.notes == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_needs_nothing_that_the_host_chose_later(kind: str) -> None:
    """Lengths, slots, counts of what was looked up and the ends of walks change from round to round: all of them are
    read from buffers. And nothing is read that an earlier round left in the memory of a graph.
    """
    params = replace(KINDS[kind], max_tokens=110, banned_ids=frozenset(range(3, VOCAB)))  # it repeats itself
    expected = answer(make(on_device=False), params, speculate=False)
    capture = ReplayedCapture()
    engine = make(shape=tree_shape(4, 3, 0), graphs=capture)
    with_oracle(engine, expected, 2)
    assert engine._device is not None
    engine._device.runs._replays.clear()  # captured before the head was helped
    before = capture.captured
    for shape in (RoundShape(SHAPE), RoundShape(SHAPE, 7), RoundShape(None, 15)):
        engine.reset()
        rounds = list(engine.generate(PROMPT, params, choice=OneShape(shape)))
        assert ids_of(rounds) == expected
        assert sum(item.accepted for item in rounds) > 20
        assert any(item.looked_up_accepted for item in rounds) == (shape.branch > 0)
    assert capture.captured <= before + 4 and capture.replayed > 60 and engine.notes == ()


def test_the_stand_in_keeps_numbers_of_the_host_and_nothing_else() -> None:
    step, total = [1], torch.zeros(1)
    replay = ReplayedCapture()(lambda: total.add_(torch.ones(1) * step[0]))
    step[0] = 10
    replay()
    assert total.item() == 4  # twice to warm up, once while captured
    left = [torch.zeros(1)]

    def reads_what_the_last_run_left() -> None:
        total.copy_(left[0])
        left[0] = torch.ones(1)

    replay = ReplayedCapture()(reads_what_the_last_run_left)
    replay(), replay()
    assert total.item() == 1  # a graph does not know that the name stands for its own tensor now
    with pytest.raises(AssertionError, match="gives the host a number"):
        ReplayedCapture()(lambda: total.item())


def test_where_capture_fails_rounds_run_one_by_one_and_say_so() -> None:
    capture = FakeCapture(fails=True)
    engine = make(graphs=capture)
    assert engine.notes == (
        "rounds run without CUDA graphs, which is slower, because capturing one failed: "
        "operation not permitted when stream is capturing",
    )
    for params in KINDS.values():
        engine.reset()
        assert answer(engine, params) == answer(make(on_device=False), params, speculate=False)


def test_cuda_itself_refuses_on_a_cpu() -> None:
    engine = make(graphs=True)
    assert engine.notes == (
        "rounds run without CUDA graphs, which is slower, because capturing one failed: "
        "CUDA graphs need a CUDA device",
    )
    assert len(answer(engine, SamplingParams(max_tokens=5))) == 5
