"""The built-in prompts, and files in the MT-bench question format."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from treeeagle_edge.bench.prompts import BenchPrompt, builtin_prompts, read_prompts
from treeeagle_edge.errors import InputError

SCENARIOS = ["chat", "code", "summary", "question answering", "maths"]


def write(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_builtin_prompts_are_four_in_each_of_five_scenarios():
    prompts = builtin_prompts()
    assert Counter(prompt.scenario for prompt in prompts) == dict.fromkeys(SCENARIOS, 4)
    assert list(dict.fromkeys(prompt.scenario for prompt in prompts)) == SCENARIOS
    assert len({prompt.name for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == 20


def test_a_summary_prompt_carries_the_text_to_summarise():
    for prompt in builtin_prompts():
        words = len(prompt.turns[0].split())
        assert (words > 90) == (prompt.scenario == "summary"), prompt.name


def test_quick_takes_the_first_of_each_scenario():
    quick, everything = builtin_prompts(1), builtin_prompts()
    assert quick == everything[::4]


def test_reads_the_mt_bench_format_and_groups_by_scenario(tmp_path: Path):
    path = write(
        tmp_path / "questions.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"], "reference": ["ignored"]},
        {"category": "maths", "turns": ["1+1?"]},
        {"question_id": "x", "category": "writing", "turns": ["Third?"]},
        {"turns": ["No category?"]},
    )
    assert read_prompts(path) == (
        BenchPrompt("writing", "81", ("First?",)),
        BenchPrompt("writing", "x", ("Third?",)),
        BenchPrompt("maths", "line-2", ("1+1?",)),
        BenchPrompt("custom", "line-4", ("No category?",)),
    )
    assert read_prompts(path, turns="all")[0].turns == ("First?", "Second?")


def test_byte_order_mark_blank_lines_and_line_separators_in_a_text_are_read(tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes('\ufeff{"turns": ["a\u2028b"]}\r\n\n  \n{"turns": ["c"]}'.encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [("a\u2028b",), ("c",)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"]', "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON: it is nested too deeply"),
        ('{"turns": ["\\ud83d"]}', "line 2 is not JSON: it holds half a surrogate pair"),
        ('["a"]', "line 2 is not a JSON object"),
        ('{"prompt": "a"}', 'line 2 has no "turns"'),
        ('{"turns": "a"}', 'line 2: "turns" is not a list of texts'),
        ('{"turns": []}', 'line 2: "turns" is not a list of texts'),
        ('{"turns": ["a", 3]}', 'line 2: "turns" is not a list of texts'),
        ('{"turns": [" "]}', 'line 2: "turns" is not a list of texts'),
        ('{"turns": ["a"], "category": 7}', 'line 2: "category" is not a text'),
    ],
)
def test_a_bad_line_is_named_and_the_format_shown(tmp_path: Path, line: str, message: str):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"turns": ["fine"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert message in caught.value.message
    assert caught.value.hint
    assert '"turns"' in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the prompts"), (b"\n", "holds no prompts"), (b"\xff\xfe{", "is not UTF-8 text")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "questions.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path)


@pytest.mark.parametrize("category", ["", None])
def test_an_empty_category_is_none_at_all(tmp_path, category):
    """Public question files leave it empty; that is no reason to refuse them."""
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question_id": 1, "category": category, "turns": ["Hello?"]}))
    assert [case.scenario for case in read_prompts(file)] == ["custom"]
