"""Keeps the control tokens that a template writes apart from the same characters in a message.

A message may hold what looks like a control token: somebody types `<|im_end|>`, or pastes a file with it. Read as the
token, it would end the message and could begin one in another role. So messages are quoted before the template sees
them: each character of such a place gets QUOTE before it. What the template itself writes stays as it is. Then the
whole is tokenised at once, so that a text without such places has the tokens it always had, and one with them has, at
these places, the tokens of ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Container, Iterable
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

QUOTE = "\U0010fffd"  # for private use; where a message holds it, it is quoted itself
_QUOTED = re.compile(f"{QUOTE}(.)", re.DOTALL)
_NOT_SPACE = re.compile(r"\S")  # what templates trim stays as it is


def unquote(text: str) -> str:
    """The text that was quoted, or of which parts were."""
    return _QUOTED.sub(r"\1", text) if QUOTE in text else text


def _quoted(text: str) -> str:
    return _NOT_SPACE.sub(QUOTE + r"\g<0>", text)


class Quoting:
    """Quotes messages, and tokenises prompts that hold quoted places."""

    def __init__(
        self, backend: Backend, *, named: Iterable[str], stop_ids: frozenset[int], around: str, begun: str
    ) -> None:
        """Control tokens are the special ones, the `named` ones, those that end an answer, and any other added token
        that a template writes `around` messages, or where it has `begun` the next answer.
        """
        self._backend = backend
        added, by_name = backend.get_added_tokens_decoder(), set(named)
        self._never_answered = {
            index
            for index, token in added.items()
            if token.special or token.content in by_name or index in stop_ids or token.content in around
        }
        self._names = {
            index: token.content
            for index, token in added.items()
            if index in self._never_answered or token.content in begun
        }
        # those that are matched after the text was normalised: it may spell them with other characters
        self._normalised = {i for i in self._names if backend.normalizer is not None and added[i].normalized}

    def quote(self, text: str, *, answer: bool = False) -> str:
        """`text` with every place quoted that would be read as a control token. `answer`: the model wrote it, so what
        belongs to answers, such as a tag before its thoughts, keeps its meaning.
        """
        looks = QUOTE in text or any(name in text for name in self._names.values())
        if not (looks or self._normalised):
            return text
        pieces, end = [], 0
        for _, start, stop in self._places(text, self._never_answered if answer else self._names):
            pieces += [text[end:start].replace(QUOTE, 2 * QUOTE), _quoted(text[start:stop])]
            end = stop
        return "".join(pieces) + text[end:].replace(QUOTE, 2 * QUOTE)

    def holds_control(self, ids: Iterable[int]) -> bool:
        """Whether a token is among `ids` that would be quoted in an answer."""
        return not self._never_answered.isdisjoint(ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, nothing added. What is quoted is ordinary text; any other control token is the token."""
        if QUOTE not in text:
            return self._backend.encode(text, add_special_tokens=False).ids
        plain = unquote(text)
        masked = _QUOTED.sub(QUOTE, text)  # as long as `plain`, and without what is quoted
        places = self._places(masked, self._names)
        stretches, names, end = [], [], 0
        for index, start, stop in places:
            place, secret = plain[start:stop], self._secrets[index]  # some tokens take the spaces around them
            stretches.append(plain[end:start])
            names.append(place.replace(self._names[index], secret) if self._names[index] in place else secret)
            end = stop
        stretches.append(plain[end:])
        joined = "".join(map("".join, zip(stretches, [*names, ""], strict=True)))
        ids = self._secretive.encode(joined, add_special_tokens=False).ids
        wanted = [index for index, _, _ in places]
        if [index for index in ids if index in wanted] == wanted:
            return ids
        # a token that merges alone lead to: the library does not find it under another name
        around = [self._secretive.encode(stretch, add_special_tokens=False).ids for stretch in stretches]
        return [
            *chain.from_iterable([*ids, index] for ids, index in zip(around, wanted, strict=False)),
            *around[-1],
        ]

    def _places(self, text: str, wanted: Container[int]) -> list[tuple[int, int, int]]:
        """(id, start, end) of every wanted token that `text` spells, in characters; an unknown letter spells none."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return [
            (index, start, end)
            for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if index in wanted and (index in self._normalised or self._names[index] in text[start:end])
        ]

    @cached_property
    def _secrets(self) -> dict[int, str]:
        """A name for each control token that nobody can type."""
        key = secrets.token_hex(8)
        return {index: f"{QUOTE}{key}-{index}{QUOTE}" for index in self._names}

    @cached_property
    def _secretive(self) -> Backend:
        """The tokenizer with secret names for its control tokens, so that their own names are ordinary text."""
        content = json.loads(self._backend.to_str())
        names = {self._names[index]: secret for index, secret in self._secrets.items()}
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        content["post_processor"] = None
        content["model"] = _renamed(content["model"], names)
        return type(self._backend).from_str(json.dumps(content))


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A model of the tokenizers library, as JSON, in which no text leads to the tokens that get other names."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed: Any = {names.get(token, token): index for token, index in vocab.items()}
    else:
        renamed = [[names.get(token, token), score] for token, score in vocab]
    changed = {**model, "vocab": renamed}
    if "merges" in model:
        changed["merges"] = [
            [a, b] for a, b in model["merges"] if not (a in names or b in names or a + b in names)
        ]
    if model.get("unk_token") in names:
        changed["unk_token"] = names[model["unk_token"]]
    return changed
