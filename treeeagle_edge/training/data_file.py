"""A person's own dialogues, read from JSON lines in the ShareGPT or the `messages` format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treeeagle_edge.chat.prompt import TextCodec, message_ids
from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.json_file import json_lines, json_reason, parse_json
from treeeagle_edge.training.dialogues import Script, Wish, retold
from treeeagle_edge.training.pieces import ChatPieces
from treeeagle_edge.training.writing import Scripts

FORMAT_HINT = (
    'one JSON object a line: {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", ...}]}'
    ' or ShareGPT\'s {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", ...}]}'
)
_ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class GivenDialogue:
    """A dialogue of the file: its system prompt, and (question, answer) for each turn."""

    system: str | None
    turns: tuple[tuple[str, str], ...]


def read_dialogues(path: Path) -> tuple[GivenDialogue, ...]:
    """All dialogues of the file. Raises InputError, which names the line that is wrong."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {path}: {reason_of(error)}", "give a JSONL file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text", FORMAT_HINT) from error
    dialogues = tuple(_parse(line, f"{path} line {number}") for number, line in json_lines(text))
    if not dialogues:
        raise InputError(f"{path} holds no dialogues", FORMAT_HINT)
    return dialogues


def _parse(line: str, where: str) -> GivenDialogue:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {json_reason(error)}", FORMAT_HINT) from error
    entries = value.get("messages", value.get("conversations")) if isinstance(value, dict) else None
    if not isinstance(entries, list):
        raise InputError(f"{where} has neither messages nor conversations", FORMAT_HINT)
    said = [_entry(entry, where) for entry in entries]
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    if said and said[-1][0] == "user":
        said.pop()  # a question without an answer teaches nothing
    roles = [role for role, _ in said]
    if not said or roles != ["user", "assistant"] * (len(said) // 2):
        raise InputError(f"{where} does not take turns of user and assistant, user first", FORMAT_HINT)
    texts = [text for _, text in said]
    return GivenDialogue(system, tuple(zip(texts[::2], texts[1::2], strict=True)))


def _entry(entry: Any, where: str) -> tuple[str, str]:
    """(role, text) of one message."""
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} has a message that is no object", FORMAT_HINT)
    role = _ROLES.get(str(entry.get("role", entry.get("from"))))
    text = entry.get("content", entry.get("value"))
    if role is None:
        known = ", ".join(_ROLES)
        raise InputError(
            f"{where} has the role {entry.get('role', entry.get('from'))!r}", f"use one of {known}"
        )
    if not isinstance(text, str):
        raise InputError(f"{where} has a message without text", FORMAT_HINT)
    return role, text


def scripts_from_file(
    given: Sequence[GivenDialogue],
    codec: TextCodec,
    pieces: ChatPieces,
    dialogues: int,
    *,
    regenerate: bool,
) -> Scripts:
    """The scripts of each shard: the given dialogues in order, `dialogues` to a shard.

    With `regenerate` the target answers the questions itself, greedily.
    """

    def script(one: GivenDialogue) -> Script:
        turns = [
            (message_ids(codec, asked), message_ids(codec, said, answer=True)) for asked, said in one.turns
        ]
        wish = Wish(0.0) if regenerate else None
        return retold(pieces, turns, opening=_opening(codec, one, pieces), regenerate=wish)

    def of_shard(shard: int, rngs: Sequence[np.random.Generator]) -> list[Script]:
        part = given[shard * dialogues : (shard + 1) * dialogues]
        return [script(one) for one in part]

    return of_shard


def _opening(codec: TextCodec, one: GivenDialogue, pieces: ChatPieces) -> Sequence[int]:
    """Ids of everything that the template writes before the first question, the system prompt among it."""
    if one.system is None:
        return pieces.opening
    question = codec.quote(one.turns[0][0])
    messages = [{"role": "system", "content": codec.quote(one.system)}, {"role": "user", "content": question}]
    text = codec.render(messages, add_generation_prompt=False)
    before, found, _ = text.rpartition(question)
    if not found:
        raise InputError(
            "the model's chat template does not show the question as it is", "leave out system prompts"
        )
    return codec.encode_quoted(before)
