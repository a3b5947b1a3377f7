"""The engine over tiny random models: the text of plain decoding, whatever is drafted, cut or interrupted."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import psutil
import pytest
import torch
from engine_answers import PROMPT, answer, assert_cache_equals_prefill, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB, OracleDrafter, tiny_engine

from treeeagle_edge.engine.host_rounds import HostRounds
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import CannotRunError, InputError, UsageError
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def with_oracle(engine: Engine, prompt: list[int], text: list[int], seed: int) -> None:
    """Let the engine draft trees that hold parts of `text`, the answer of plain decoding to `prompt`."""
    whole = prompt + text
    drafter = OracleDrafter(engine.head, lambda at: whole[at] if at < len(whole) else 0, seed)  # type: ignore[arg-type]
    engine._passes._drafter = drafter  # type: ignore[assignment]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=7),
        SamplingParams(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
        SamplingParams(
            max_tokens=40, temperature=1.2, top_k=12, min_p=0.02, seed=1, banned_ids=frozenset({4, 5})
        ),
    ],
    ids=["greedy", "sampling", "penalties", "everything"],
)
def test_a_random_head_gives_the_text_of_plain_decoding(engine: Engine, params: SamplingParams) -> None:
    """Expectations rows 4 and 10: the text is right whatever the head proposes, penalties included."""
    assert answer(engine, params) == answer(engine, params, speculate=False)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 7),
    nodes=st.integers(1, 24),
    stop_after=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_after_any_commit_the_cache_equals_a_fresh_prefill(
    seed: int, depth: int, nodes: int, stop_after: int, temperature: float
) -> None:
    """Expectations rows 20 and 22: accepted paths are compacted, and head rows rewritten from true features."""
    shape = TreeShape(depth=depth, branching=3, nodes=nodes)
    engine = tiny_engine(shape=shape)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=seed)
    text = answer(engine, params, speculate=False)
    engine.reset()
    with_oracle(engine, PROMPT, text, seed)
    rounds = engine.generate(PROMPT, params)
    got = []
    for item in rounds:
        got += item.ids
        if len(got) > stop_after * 2:
            break
    rounds.close()  # type: ignore[attr-defined]
    assert got == text[: len(got)]
    assert_cache_equals_prefill(engine)
    assert engine.usage().used_slots == sum(len(entry.slots) for entry in engine._pool.cached)


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.integers(0, 30),  # how much of the text so far the next prompt keeps
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6),  # what it adds
            st.integers(1, 6),  # rounds before an interrupt
            st.booleans(),  # speculation
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 100),
)
def test_conversations_with_forks_and_interrupts_lose_nothing(
    turns: list[tuple[int, list[int], int, bool]], seed: int
) -> None:
    """Property over turns that continue, edit or branch: no slot is lost, and reuse never changes the text."""
    engine = tiny_engine(slack=8)
    history: list[int] = []
    for keep, added, stop_after, speculate in turns:
        prompt = [*history[:keep], *added]
        params = SamplingParams(max_tokens=16, seed=seed)
        expected = answer(tiny_engine(), params, prompt, speculate=False)
        got: list[int] = []
        for count, item in enumerate(engine.generate(prompt, params, speculate=speculate), start=1):
            got += item.ids
            if count == stop_after:
                break
        assert got == expected[: len(got)]
        history = prompt + got
        held = {slot for entry in engine._pool.cached for slot in entry.slots}
        assert engine.usage().used_slots == len(held)
    assert_cache_equals_prefill(engine)


def test_a_second_turn_reuses_all_but_runs_the_last_token_again(engine: Engine) -> None:
    """Expectations rows 21 and 35: of p matching tokens all slots are reused and one token is run again."""
    engine.reset()
    text = answer(engine, SamplingParams(max_tokens=10))
    cached = engine._pool.cached[-1]
    first = next(iter(engine.generate([*PROMPT, *text, 7, 7], SamplingParams(max_tokens=4))))
    assert first.cached_tokens == len(cached.tokens)
    assert cached.head_tokens == len(cached.tokens)
    assert len(PROMPT) + len(text) - len(cached.tokens) <= 1


def test_a_prompt_that_is_cached_whole_still_answers(engine: Engine) -> None:
    engine.reset()
    params = SamplingParams(max_tokens=6)
    text = answer(engine, params)
    assert answer(engine, params) == text
    rounds = list(engine.generate(PROMPT, params))
    assert rounds[0].cached_tokens == len(PROMPT)
    assert ids_of(rounds) == text


def test_an_error_inside_a_pass_keeps_the_committed_part(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    params = SamplingParams(max_tokens=20)
    expected = answer(engine, params, reuse_prefix=False)
    engine.reset()
    rounds = engine.generate(PROMPT, params)
    next(rounds), next(rounds), next(rounds)

    def fail(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._passes, "verify", fail)
        with pytest.raises(KeyboardInterrupt):
            next(rounds)
    assert engine.usage().used_slots == len(engine._pool.cached[-1].slots)
    assert_cache_equals_prefill(engine)
    assert answer(engine, params) == expected


def test_a_card_whose_memory_runs_out_is_a_sentence_and_the_next_answer_is_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program took the room: this is no end of the conversation."""
    engine.reset()
    params = SamplingParams(max_tokens=20)
    expected = answer(engine, params)
    engine.reset()
    rounds = engine.generate(PROMPT, params)
    next(rounds)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with monkeypatch.context() as patched:
        patched.setattr(engine.target, "forward", full)
        with pytest.raises(CannotRunError, match="the memory of cpu ran out while answering") as caught:
            next(rounds)
    assert "--context" in str(caught.value.hint)
    assert answer(engine, params) == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13])
def test_max_tokens_is_never_exceeded(engine: Engine, limit: int) -> None:
    """Expectations row 13: the answer ends at max_tokens exactly, however many tokens a round brings."""
    text = answer(engine, SamplingParams(max_tokens=20), speculate=False)
    fresh = tiny_engine()
    with_oracle(fresh, PROMPT, text, seed=limit)
    rounds = list(fresh.generate(PROMPT, SamplingParams(max_tokens=limit)))
    assert ids_of(rounds) == text[:limit]
    assert rounds[-1].finish_reason == "length"
    assert all(item.finish_reason is None for item in rounds[:-1])


def test_the_earliest_end_wins(engine: Engine) -> None:
    """Expectations rows 13 and 14: cut at the first end token inside an accepted block; text, KV and counters agree."""
    text = answer(engine, SamplingParams(max_tokens=20), speculate=False)
    for stop in dict.fromkeys(text):
        end = text.index(stop) + 1
        for seed in range(4):
            fresh = tiny_engine()
            with_oracle(fresh, PROMPT, text, seed)
            rounds = list(fresh.generate(PROMPT, SamplingParams(max_tokens=end, stop_ids=frozenset({stop}))))
            assert ids_of(rounds) == text[:end]
            assert rounds[-1].finish_reason == "stop"
            cached = list(fresh._pool.cached[-1].tokens)
            assert cached == (PROMPT + text)[: len(cached)]
            assert len(PROMPT) + end - 1 <= len(cached) <= len(PROMPT) + end


def test_a_drafted_end_token_is_a_leaf() -> None:
    """Expectations row 15: the head may propose the end, nothing is drafted behind it, and the target decides."""
    engine = tiny_engine(shape=TreeShape(depth=5, branching=6, nodes=30))
    stops = frozenset(range(0, VOCAB, 3))
    drafted = 0
    for item in engine.generate(PROMPT, SamplingParams(max_tokens=30, banned_ids=stops, stop_ids=stops)):
        assert item.finish_reason != "stop"  # banned: the head's wish to end never ends the answer
        if item.tree is not None:
            ends = [row for row, token in enumerate(item.tree.tokens) if token in stops]
            drafted += len(ends)
            assert not any(parent in ends for parent in item.tree.parents)
    assert drafted > 0


@pytest.mark.parametrize("context", [16, 17, 33])
def test_the_last_tokens_of_the_context_decode_cleanly(context: int) -> None:
    """Expectations row 25: slots for the tree are reserved, and the answer ends with the context."""
    shape = TreeShape(depth=6, branching=4, nodes=20)
    engine = tiny_engine(context=context, shape=shape, slack=0)
    text = answer(engine, SamplingParams(), speculate=False)
    assert len(PROMPT) + len(text) == context
    engine.reset()
    with_oracle(engine, PROMPT, text, seed=context)
    assert answer(engine, SamplingParams()) == text


@settings(max_examples=40, deadline=None)
@given(depth=st.integers(1, 32), branching=st.integers(1, 64), nodes=st.integers(1, 256))
def test_any_tree_shape_decodes_or_is_refused(depth: int, branching: int, nodes: int) -> None:
    """Expectations row 24: extremes of depth, branching and nodes stay inside every buffer."""
    engine = tiny_engine(shape=TreeShape(depth=depth, branching=branching, nodes=nodes))
    params = SamplingParams(max_tokens=6)
    if (depth - 1) * branching > 512:
        with pytest.raises(UsageError, match="too large a draft"):
            answer(engine, params)
        return
    assert answer(engine, params) == answer(engine, params, speculate=False)


def test_acceptance_never_falls_when_a_node_is_added(engine: Engine) -> None:
    """Expectations row 23: the tree of n + 1 nodes holds the tree of n, so each walk gets at least as far."""
    walks: list[list[int]] = []
    for nodes in range(1, 9):
        shape = TreeShape(depth=4, branching=3, nodes=nodes)
        accepted = []
        for length in range(4, 12):  # one round after each of several prompts
            rounds = list(engine.generate((PROMPT * 2)[:length], SamplingParams(max_tokens=9), tree=shape))
            accepted.append(rounds[1].accepted)
        walks.append(accepted)
    assert all(b >= a for small, large in pairwise(walks) for a, b in zip(small, large, strict=True))


def test_bad_draft_scores_cost_one_plain_step_and_are_counted() -> None:
    """Expectations row 5: non-finite features give a plain round, counted; later rounds draft again, text unharmed."""
    engine = tiny_engine()
    params = SamplingParams(max_tokens=24)
    expected = answer(engine, params, speculate=False)
    engine.reset()
    whole_run = engine._passes._run
    calls = iter(range(1_000))

    def run(*args: object):  # type: ignore[no-untyped-def]
        output = whole_run(*args)  # type: ignore[arg-type]
        return replace(output, features=output.features * float("nan")) if next(calls) == 3 else output

    engine._passes._run = run  # type: ignore[assignment]
    rounds = list(engine.generate(PROMPT, params))
    assert ids_of(rounds) == expected
    assert sum(item.draft_failures for item in rounds) == 1
    assert next(item for item in rounds if item.draft_failures).kind == "plain"
    assert rounds[-2].kind == "tree"
    assert torch.isfinite(engine.head.store.keys).all()  # type: ignore[union-attr]


def test_a_drafted_node_that_overflows_is_a_rejected_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectations row 6: NaN in the KV of a wrong branch reaches neither its siblings nor the text."""
    engine = tiny_engine(shape=TreeShape(depth=4, branching=4, nodes=12))
    params = SamplingParams(max_tokens=20)
    text = answer(engine, params, speculate=False)
    engine.reset()
    broken = [token for token in range(VOCAB) if token not in PROMPT + text]
    healthy = engine.target.embed

    def embed(ids: torch.Tensor) -> torch.Tensor:
        rows = healthy(ids).clone()
        rows[torch.isin(ids, torch.tensor(broken))] = float("nan")
        return rows

    monkeypatch.setattr(engine.target, "embed", embed)
    rounds = list(engine.generate(PROMPT, params))
    drafted = [token for item in rounds if item.tree for token in item.tree.tokens]
    assert set(drafted) & set(broken)
    assert ids_of(rounds) == text


def test_memory_does_not_grow_while_decoding() -> None:
    """Expectations row 26: no growth over 10,000 steps, neither in tensors and their bytes nor in resident memory."""

    def held() -> tuple[int, int]:
        gc.collect()
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        return len(tensors), sum(tensor.nbytes for tensor in tensors)

    engine = tiny_engine(context=256, shape=TreeShape(depth=2, branching=3, nodes=4))
    resident = psutil.Process().memory_info
    steps, seed = 0, 0
    marks: list[tuple[int, int, int]] = []
    while steps < 10_500:
        rounds = engine.generate(
            PROMPT, SamplingParams(temperature=1.0, seed=seed), reuse_prefix=seed % 2 == 0
        )
        steps += sum(item.kind != "prefill" for item in rounds)
        seed += 1
        if (not marks and steps >= 500) or steps >= 10_500:
            marks.append((*held(), resident().rss))
    (tensors, nbytes, rss), (tensors_late, nbytes_late, rss_late) = marks
    assert abs(tensors_late - tensors) <= 2
    assert nbytes_late <= nbytes
    assert rss_late - rss < 8 * 2**20


def test_exact_mode_equals_its_own_plain_decoding_at_16_bits() -> None:
    """Expectations row 28: with one number of rows a pass, rounding cannot tell a tree from plain decoding."""
    engine = tiny_engine(exact=True, bits=16)
    for seed in range(3):
        params = SamplingParams(max_tokens=40, temperature=0.7 * seed, seed=seed)
        plain = answer(engine, params, speculate=False, reuse_prefix=False)
        with_oracle(engine, PROMPT, plain, seed)
        assert answer(engine, params, reuse_prefix=False) == plain
    with pytest.raises(UsageError, match="--exact keeps 16 rows"):
        answer(engine, SamplingParams(), tree=TreeShape(nodes=40))


def test_prompts_that_cannot_be_answered(engine: Engine) -> None:
    with pytest.raises(InputError, match="empty"):
        answer(engine, SamplingParams(), [])
    with pytest.raises(InputError, match="128 tokens, too many for a context of 128"):
        answer(engine, SamplingParams(), [1] * 128)
    with pytest.raises(InputError, match="token id 40 is not in"):
        answer(engine, SamplingParams(), [1, VOCAB])
    assert len(answer(engine, SamplingParams(), [1] * 127)) == 1


def test_a_bias_that_is_no_number_is_refused() -> None:
    for bias in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(UsageError, match="a logit bias is not finite") as caught:
            SamplingParams(logit_bias={1: bias})
        assert "banned_ids" in (caught.value.hint or "")


def test_answers_of_several_threads_take_turns(engine: Engine) -> None:
    """One round runs at a time: two at once would write to each other's slots and buffers."""
    inside, overlaps = [], 0
    next_round, first_round = HostRounds.next, HostRounds.first

    def watched(run):
        def alone(*arguments):
            nonlocal overlaps
            overlaps += bool(inside)
            inside.append(1)
            time.sleep(0.001)  # lets other threads in, where they may
            try:
                return run(*arguments)
            finally:
                inside.pop()

        return alone

    params = SamplingParams(max_tokens=12)
    texts = [answer(engine, params, [start, 2, 3]) for start in range(4)]
    engine.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRounds, "first", watched(first_round))
        patch.setattr(HostRounds, "next", watched(next_round))
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda start: answer(engine, params, [start, 2, 3]), range(4)))
    assert overlaps == 0
    assert found == texts
    assert_cache_equals_prefill(engine)


def test_tie_margin_is_the_difference_of_two_logits(engine: Engine) -> None:
    first = answer(engine, SamplingParams(max_tokens=1))[0]
    assert engine.tie_margin(PROMPT, first, first) == 0.0
    assert engine.tie_margin(PROMPT, first, (first + 1) % VOCAB) > 0.0
