"""The chat over the demo model and its head: what a session promises holds for the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from treeeagle_edge.chat.answer import Answer
from treeeagle_edge.chat.session import Session
from treeeagle_edge.runtime import Runtime, load_runtime
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings


@pytest.fixture(scope="module")
def runtime(demo_gguf: Path) -> Iterator[Runtime]:
    before = torch.get_num_threads()
    yield load_runtime(
        RunSettings(model=str(demo_gguf), head="smollm2-135m-eagle3", bits=32, context=512, threads=1)
    )
    torch.set_num_threads(before)


def ask(session: Session, text: str, speculate: bool = True, **params) -> Answer:
    *pieces, answer = session.ask(text, SamplingParams(seed=1, **params), speculate=speculate)
    assert isinstance(answer, Answer)
    assert "".join(pieces) == answer.text
    return answer


def test_the_next_turn_reads_only_what_is_new(runtime: Runtime):
    """Expectations rows 14 and 35: after an answer, whole or interrupted, the next prompt begins with what the cache
    holds; at most one old token runs again. Text, ids and counters agree.
    """
    session = Session(runtime.engine, runtime.tokenizer)
    first = ask(session, "Name a colour.", max_tokens=12)
    assert first.text == runtime.tokenizer.decode(first.token_ids)
    second = ask(session, "Name another.", max_tokens=4)
    assert second.finish_reason == "length"
    assert second.cached_tokens >= first.prompt_tokens + first.completion_tokens - 2
    third = ask(session, "And one more?", max_tokens=4)
    assert third.cached_tokens >= second.prompt_tokens + second.completion_tokens - 2


def test_a_stop_string_cuts_both_arms_alike(runtime: Runtime):
    """Expectations rows 12 and 13: with the tree and without, the same stop string gives the same text and ids."""
    plain = ask(
        Session(runtime.engine, runtime.tokenizer), "Count from one to ten.", speculate=False, max_tokens=16
    )
    stop = plain.text[5:9]
    answers = [
        ask(
            Session(runtime.engine, runtime.tokenizer, stops=[stop]),
            "Count from one to ten.",
            speculate,
            max_tokens=16,
        )
        for speculate in (True, False)
    ]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop"]
    assert answers[0].text == answers[1].text == plain.text[: plain.text.index(stop)]
    assert answers[0].token_ids == answers[1].token_ids


def test_a_profile_without_a_head_is_no_head_that_is_missing(demo_gguf: Path, tmp_path: Path):
    profile = tmp_path / "plain.yaml"
    profile.write_text(
        f"{{name: plain, device: cpu, memory_gb: 1, model: {demo_gguf}, head: none, bits: 32, context: 64, "
        "tree: {depth: 2, branching: 2, nodes: 2}, reserve_gb: 0.1}"
    )
    plain = load_runtime(RunSettings(profile=str(profile), threads=1))
    assert (plain.head_name, plain.notes) == (None, ())
