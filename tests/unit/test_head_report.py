"""What is counted of a head: figures worked out by hand over a scripted drafter, and which questions are asked."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import VOCAB, tiny_engine

from treeeagle_edge.bench.prompts import BenchPrompt
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.head_report.evaluate import HeadReport, PromptSet, measure, prompt_sets
from treeeagle_edge.head_report.tally import BINS, Bin, bin_edges, tally, total
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

PROMPT = [3, 1, 4, 1, 5]
ONE_NODE, FOUR_NODES = TreeShape(3, 2, 1), TreeShape(3, 2, 4)


class OnePrompt:
    """Whatever is asked, the ids are PROMPT; they are as many as a test wants."""

    def __init__(self, length: int = len(PROMPT)) -> None:
        self.length = length

    def encode(self, text: str) -> list[int]:
        return [*PROMPT, *[2] * self.length][: self.length]

    def quote(self, text: str, *, answer: bool = False) -> str:
        return text

    encode_quoted = encode

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return ""

    def render(self, messages, *, add_generation_prompt: bool = True) -> str:
        assert add_generation_prompt
        return messages[0]["content"]


class ScriptedDrafter:
    """Takes the place of `Drafter` and knows the text to come.

    Within four nodes, trees A and B take turns; within one node, the right token alone is drafted.

        A:  root ─┬─ right (0.65) ── right (0.95) ── wrong (0.55)
                  └─ wrong (0.15)
        B:  root ─┬─ wrong (0.72) ── wrong (0.93)
                  └─ right (0.25)
    """

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        assert engine.head is not None
        self.head = engine.head
        self._text = text
        self._drawn = 0

    def draft(self, features, rows, growth) -> DraftTree:
        self.head.extend_rows(features.tensor(), rows, growth.branching)
        root, root_position = rows.ids[-1], rows.prefix.stop - 1 + len(rows.ids)
        right = [self._text[root_position + depth] for depth in (1, 2, 3)]
        wrong = [(token + 1) % VOCAB for token in right]
        if growth._nodes == ONE_NODE.nodes:
            return tree_of(root, [(0, right[0], 0.65)])
        self._drawn += 1
        if self._drawn % 2:
            return tree_of(
                root, [(0, right[0], 0.65), (0, wrong[0], 0.15), (1, right[1], 0.95), (3, wrong[2], 0.55)]
            )
        return tree_of(root, [(0, wrong[0], 0.72), (0, right[0], 0.25), (1, wrong[1], 0.93)])


def tree_of(root: int, nodes: Sequence[tuple[int, int, float]]) -> DraftTree:
    """A tree of (parent row, token, probability given the parent)."""
    tokens, parents, depths, log_probs = [root], [-1], [0], [0.0]
    for parent, token, probability in nodes:
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        log_probs.append(log_probs[parent] + math.log(probability))
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(log_probs))


def questions(count: int, name: str = "file") -> PromptSet:
    return PromptSet(name, tuple(BenchPrompt("any", f"{number}", ("hello",)) for number in range(count)))


@pytest.fixture(scope="module")
def report() -> HeadReport:
    """Two questions of ten tokens each, answered with one node and with four."""
    engine = tiny_engine(shape=FOUR_NODES)
    params = SamplingParams(max_tokens=20)
    plain = [token for item in engine.generate(PROMPT, params, speculate=False) for token in item.ids]
    engine._passes._drafter = ScriptedDrafter(engine, [*PROMPT, *plain])  # type: ignore[assignment]
    return measure(
        engine,
        OnePrompt(),
        [questions(2)],
        (ONE_NODE, FOUR_NODES),
        replace(params, max_tokens=10),
    )


def test_counts_with_one_node(report: HeadReport) -> None:
    """1 token of the prefill, then 2 a round; the fifth round has room for one token, so it drafts nothing."""
    first, second = report.tallies(1)
    assert first == second
    assert (first.tokens, first.rounds, first.drafted_rounds, first.accepted) == (10, 5, 4, 4)
    assert first.tokens_per_round == 9 / 5
    assert first.first_token_acceptance == 1.0
    assert first.acceptance_by_depth == (4 / 5, 0, 0)


def test_counts_with_four_nodes(report: HeadReport) -> None:
    """1 token of the prefill, then A (3 tokens), B (2), A (3), and one token without a tree.

    The second question goes on with B (2), A (3), B (2). Two tokens are left and A gives three: what is accepted counts
    before the answer is cut.
    """
    first, second = report.tallies(4)
    assert (first.tokens, first.rounds, first.drafted_rounds, first.accepted) == (10, 4, 3, 5)
    assert first.tokens_per_round == 9 / 4
    assert first.first_token_acceptance == 2 / 3  # B's likeliest is wrong, though its second choice is walked
    assert first.acceptance_by_depth == (3 / 4, 2 / 4, 0)
    assert (second.tokens, second.rounds, second.accepted) == (10, 4, 1 + 2 + 1 + 2)
    assert second.first_token_acceptance == 2 / 4


def test_calibration_counts_nodes_whose_parent_was_walked(report: HeadReport) -> None:
    """A, B, A by hand. B's node of 0.93 hangs below a token that was not taken, so nothing is known about it."""
    first = report.tallies(4)[0]
    nodes = {at: (item.nodes, item.accepted) for at, item in enumerate(first.bins) if item.nodes}
    assert nodes == {1: (2, 0), 2: (1, 1), 5: (2, 0), 6: (2, 2), 7: (1, 0), 9: (2, 2)}
    assert [item.predicted for item in first.bins] == pytest.approx(
        [0, 0.3, 0.25, 0, 0, 1.1, 1.3, 0.72, 0, 1.9]
    )
    assert first.judged == 10
    assert first.calibration_error == pytest.approx((0.3 + 0.75 + 1.1 + 0.7 + 0.72 + 0.1) / 10)


def test_the_sum_pools_rounds(report: HeadReport) -> None:
    """Not the mean of two averages: 9/4 and 10/4 happen to have as many rounds, so a third answer is added."""
    pooled = total([*report.tallies(4), report.tallies(1)[0]])
    assert pooled.tokens_per_round == (5 + 6 + 4 + 13) / 13
    assert pooled.first_token_acceptance == (2 + 2 + 4) / (3 + 4 + 4)
    assert pooled.acceptance_by_depth == (11 / 13, 4 / 13, 0)
    assert pooled.bins[6].nodes == 2 + 2 + 4
    assert sum(pooled.acceptance_by_depth) == pytest.approx(pooled.tokens_per_round - 1)


def test_what_was_not_measured_is_none() -> None:
    prefill = Round((7,), "prefill", 0, 0, None, (), 7, 0.0, 0.1, 0.0, "stop")
    found = tally([prefill], depth=3)
    assert (found.tokens, found.rounds) == (1, 0)
    assert found.tokens_per_round is None
    assert found.first_token_acceptance is None
    assert found.acceptance_by_depth == ()
    assert found.calibration_error is None


@pytest.mark.parametrize(("probability", "at"), [(1.0, 9), (0.899, 8), (0.0004, 0)])
def test_a_probability_has_one_bin(probability: float, at: int) -> None:
    tree = tree_of(5, [(0, 6, 1.0), (1, 7, probability)])
    walked = Round((6, 8), "tree", 2, 1, tree, (0, 1), 8, 0.0, 0.0, 0.0)
    bins = tally([walked], depth=2).bins
    low, high = bin_edges()[at]
    assert low <= probability <= high
    expected = Bin(
        nodes=1 + (at == 9), predicted=pytest.approx(probability + (at == 9)), accepted=int(at == 9)
    )
    assert bins[at] == expected
    assert sum(item.nodes for item in bins) == 2
    assert len(bins) == len(bin_edges()) == BINS


def test_a_round_the_head_failed_in_is_counted_as_that() -> None:
    failed = Round((6,), "plain", 0, 0, DraftTree.root_only(5), (0,), 6, 0.0, 0.0, 0.0, draft_failures=1)
    found = tally([failed], depth=2)
    assert (found.rounds, found.drafted_rounds, found.failures) == (1, 0, 1)
    assert found.tokens_per_round == 1.0


class CountingEngine:
    """Answers with one token of a prefill, and is interrupted at a call."""

    context = 50

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.calls: list[tuple[int, bool]] = []
        self._interrupt_at = interrupt_at

    def generate(self, prompt_ids, params, *, reuse_prefix=True, tree=None):
        self.calls.append((tree.nodes, reuse_prefix))
        if len(self.calls) == self._interrupt_at:
            raise KeyboardInterrupt
        yield Round((7,), "prefill", 0, 0, None, (), 7, 0.0, 0.1, 0.0, "length")


def test_every_question_meets_every_budget_and_no_cache() -> None:
    engine, told = CountingEngine(), []
    report = measure(
        engine,
        OnePrompt(),
        [questions(2), questions(1, "other")],
        (ONE_NODE, FOUR_NODES),
        SamplingParams(max_tokens=4),
        progress=told.append,
    )
    assert engine.calls == [(1, False), (4, False)] * 3
    assert told == ["question 1 of 3: file, 0", "question 2 of 3: file, 1", "question 3 of 3: other, 0"]
    assert (len(report.tallies(4)), len(report.tallies(4, "file")), len(report.tallies(1, "other"))) == (
        3,
        2,
        1,
    )
    assert not report.interrupted


def test_an_interrupt_keeps_whole_questions() -> None:
    shapes, params = (ONE_NODE, FOUR_NODES), SamplingParams(max_tokens=4)
    report = measure(CountingEngine(interrupt_at=4), OnePrompt(), [questions(3)], shapes, params)
    assert report.interrupted
    assert (report.answered, report.asked) == (1, 3)
    assert len(report.tallies(1)) == len(report.tallies(4)) == 1
    with pytest.raises(KeyboardInterrupt):
        measure(CountingEngine(interrupt_at=2), OnePrompt(), [questions(3)], shapes, params)


def test_a_prompt_that_leaves_no_room_is_refused_before_any_answer() -> None:
    engine = CountingEngine()
    with pytest.raises(InputError, match="the prompt 0 has 49 tokens, which leaves no room for an answer"):
        measure(engine, OnePrompt(49), [questions(1)], (ONE_NODE,), SamplingParams(max_tokens=4))
    assert engine.calls == []
    measure(engine, OnePrompt(48), [questions(1)], (ONE_NODE,), SamplingParams(max_tokens=4))


def write(path: Path, categories: Sequence[str]) -> Path:
    lines = [
        {"category": name, "turns": [f"question {at}", "and more"]} for at, name in enumerate(categories)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_is_one_row_and_its_first_questions_are_taken(tmp_path: Path) -> None:
    """The first in the file, whatever their categories: a, b, a, b asked for two are a and b."""
    path = write(tmp_path / "mine.jsonl", ["a", "b", "a", "b"])
    (whole,) = prompt_sets([path], builtin=False, limit=None)
    assert (whole.name, len(whole.prompts)) == ("mine.jsonl", 4)
    assert {prompt.turns for prompt in whole.prompts} == {(f"question {at}",) for at in range(4)}
    (part,) = prompt_sets([path], builtin=False, limit=2)
    assert [prompt.turns for prompt in part.prompts] == [("question 0",), ("question 1",)]


def test_built_in_scenarios_stand_alone_or_beside_files(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ["a"])
    scenarios = [f"built-in {name}" for name in ("chat", "code", "summary", "question answering", "maths")]
    alone = prompt_sets([], builtin=False, limit=1)
    assert [(item.name, len(item.prompts)) for item in alone] == [(name, 1) for name in scenarios]
    beside = prompt_sets([path], builtin=True, limit=None)
    assert [item.name for item in beside] == ["mine.jsonl", *scenarios]
    assert {len(item.prompts) for item in beside[1:]} == {4}


def test_files_of_one_name_are_told_apart_and_no_file_counts_twice(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one" / "q.jsonl", ["a"]), write(tmp_path / "other" / "q.jsonl", ["a"])
    assert [item.name for item in prompt_sets([one, other], builtin=False, limit=None)] == [
        str(one),
        str(other),
    ]
    with pytest.raises(UsageError, match="is given twice"):
        prompt_sets([one, one], builtin=False, limit=None)
