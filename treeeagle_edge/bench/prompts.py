"""The prompts of a bench: the built-in ones, by scenario, or a person's own in the MT-bench question format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path

import yaml

from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.json_file import json_lines, json_reason, parse_json
from treeeagle_edge.text_file import read_text

FORMAT_HINT = 'one JSON object a line, such as {"question_id": 1, "category": "chat", "turns": ["Hello?"]}'


@dataclass(frozen=True)
class BenchPrompt:
    """One question, or a dialogue of several user turns."""

    scenario: str
    name: str
    turns: tuple[str, ...]


def builtin_prompts(per_scenario: int | None = None) -> tuple[BenchPrompt, ...]:
    """The prompts written for this project: five scenarios, the first `per_scenario` prompts of each."""
    table = yaml.safe_load((files("treeeagle_edge.bench") / "prompts.yaml").read_text(encoding="utf-8"))
    return tuple(
        BenchPrompt(scenario, entry["name"], (entry["text"],))
        for scenario, entries in table.items()
        for entry in entries[:per_scenario]
    )


def read_prompts(path: Path, *, turns: str = "first", limit: int | None = None) -> tuple[BenchPrompt, ...]:
    """Read a JSONL file in the MT-bench question format, grouped by scenario in order of first appearance.

    A line is an object with `turns` (a list of user messages), and optionally `question_id` and `category`,
    which becomes the scenario. Other keys are ignored, blank lines skipped. `turns` is "first" (one answer a
    question) or "all"; `limit` takes the first questions of the file only, None all of them.
    Raises InputError, naming file and line, for what cannot be read as that.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise InputError(
            f"cannot read the prompts {path}: {reason_of(error)}", "give a JSONL file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text", f"give a JSONL file: {FORMAT_HINT}") from error
    prompts = tuple(islice(_parse_lines(text, path, turns), limit))
    if not prompts:
        raise InputError(f"{path} holds no prompts", FORMAT_HINT)
    order = {
        scenario: rank for rank, scenario in enumerate(dict.fromkeys(prompt.scenario for prompt in prompts))
    }
    return tuple(sorted(prompts, key=lambda prompt: order[prompt.scenario]))


def _parse_lines(text: str, path: Path, turns: str) -> Iterator[BenchPrompt]:
    for number, line in json_lines(text):
        yield _parse_line(line, f"{path} line {number}", f"line-{number}", turns)


def _parse_line(line: str, where: str, default_name: str, turns: str) -> BenchPrompt:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {json_reason(error)}", FORMAT_HINT) from error
    if not isinstance(entry, dict):
        raise InputError(f"{where} is not a JSON object", FORMAT_HINT)
    if "turns" not in entry:
        raise InputError(f'{where} has no "turns"', FORMAT_HINT)
    said = entry["turns"]
    texts = isinstance(said, list) and all(isinstance(turn, str) and turn.strip() for turn in said)
    if not texts or not said:
        raise InputError(f'{where}: "turns" is not a list of texts with at least one', FORMAT_HINT)
    scenario = entry.get("category") or "custom"  # some files leave it ""
    if not isinstance(scenario, str) or not scenario.strip():
        raise InputError(f'{where}: "category" is not a text', FORMAT_HINT)
    name = str(entry.get("question_id", default_name))
    chosen = tuple(said if turns == "all" else said[:1])
    return BenchPrompt(" ".join(scenario.split()), " ".join(name.split()), chosen)


def check_room(prompt: BenchPrompt, tokens: int, context: int) -> None:
    """Raise InputError where a prompt of so many tokens leaves no room in the context for an answer of two tokens: the
    prefill gives one, and so does the shortest round.
    """
    if tokens + 2 > context:
        raise InputError(
            f"the prompt {prompt.name} has {tokens:,} tokens, "
            f"which leaves no room for an answer in a context of {context:,}",
            "give a larger --context, or leave this prompt out",
        )
