"""Turns messages into prompt ids, in which old answers keep exactly the ids that were generated.

Tokenising an old answer again may split its text at other places. Then nothing after that could be taken from the
cache. So the rendered text is cut at the answers, the pieces between are tokenised, and the generated ids are put
back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from treeeagle_edge.tokenizer.quoting import unquote

# ids dropped at most from the end of an answer to make its decoding equal the rendered text
_LONGEST_TAIL = 16


class TextCodec(Protocol):
    """What a session asks of a tokenizer."""

    stop_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can be used."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special tokens added; those that are written out in it become the special tokens."""

    def quote(self, text: str, *, answer: bool = False) -> str:
        """`text`, a message or an `answer` to one, with everything quoted that would be read as a control token."""

    def encode_quoted(self, text: str) -> list[int]:
        """As `encode`, but quoted places become ordinary tokens."""

    def holds_control(self, ids: Sequence[int]) -> bool:
        """Whether a control token is among the `ids` of an answer."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`."""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """`messages` through the model's own chat template."""


@dataclass(frozen=True)
class Turn:
    """One message of the person and what was answered; `answer` is None while it is being answered."""

    user: str
    answer: str | None = None
    token_ids: tuple[int, ...] = ()  # as generated, the end token included; empty where they are not known
    finish_reason: str | None = None


@dataclass(frozen=True)
class Prompt:
    """What goes to the model."""

    text: str  # as rendered
    ids: tuple[int, ...]


def build_messages(system: str | None, turns: Sequence[Turn]) -> list[dict[str, str]]:
    """The conversation in the form that chat templates take."""
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        if turn.answer is not None:
            messages.append({"role": "assistant", "content": turn.answer})
    return messages


def build_prompt(codec: TextCodec, system: str | None, turns: Sequence[Turn]) -> Prompt:
    """Render the conversation and tokenise it, with the generated ids of old answers put back where they fit.

    Control tokens are those that the template writes: the same characters in a message are ordinary text.
    """
    system = codec.quote(system) if system else system
    turns = [_quoted(codec, turn) for turn in turns]
    text = codec.render(build_messages(system, turns))
    answered = [turn for turn in turns if turn.answer is not None]
    gaps = _gaps(codec, system, turns, len(answered)) if any(turn.token_ids for turn in answered) else None
    pieces = _answers_in(text, gaps, answered) if gaps else None
    if gaps is None or pieces is None:
        return Prompt(unquote(text), tuple(codec.encode_quoted(text)))
    ids: list[int] = []
    pending = gaps[0]  # text that still has to be tokenised
    for turn, piece, gap in zip(answered, pieces, gaps[1:], strict=True):
        known = _ids_of(codec, turn, unquote(piece))
        if known:
            ids += codec.encode_quoted(pending)
            ids += known
            pending = gap
        else:
            pending += piece + gap
    ids += codec.encode_quoted(pending)
    return Prompt(unquote(text), tuple(ids))


def message_ids(codec: TextCodec, text: str, *, answer: bool = False) -> list[int]:
    """Ids of a message, or of an `answer`, without what a template writes around it."""
    return codec.encode_quoted(codec.quote(text, answer=answer))


def _quoted(codec: TextCodec, turn: Turn) -> Turn:
    answer = None if turn.answer is None else codec.quote(turn.answer, answer=True)
    return replace(turn, user=codec.quote(turn.user), answer=answer)


def _gaps(codec: TextCodec, system: str | None, turns: Sequence[Turn], count: int) -> list[str] | None:
    """The text around the answers, found by rendering a marker for each; None where a template hides a marker."""
    marked: list[Turn] = []
    for turn in turns:
        answer = None if turn.answer is None else f"[answer {len(marked)} stands here]"
        marked.append(Turn(turn.user, answer))
    rest = codec.render(build_messages(system, marked))
    gaps: list[str] = []
    for marker in (turn.answer for turn in marked if turn.answer is not None):
        before, found, rest = rest.partition(marker)
        if not found or marker in rest:
            return None
        gaps.append(before)
    return [*gaps, rest] if len(gaps) == count else None


def _answers_in(text: str, gaps: Sequence[str], answered: Sequence[Turn]) -> list[str] | None:
    """Each answer as the template wrote it (some trim answers); None where the text is not gaps and answers in turn."""
    pieces: list[str] = []
    position = len(gaps[0])
    if not text.startswith(gaps[0]):
        return None
    for turn, gap in zip(answered, gaps[1:], strict=True):
        answer = turn.answer or ""
        for piece in (answer, answer.strip(), answer.rstrip(), answer.lstrip()):
            if text.startswith(piece + gap, position):
                break
        else:
            return None
        pieces.append(piece)
        position += len(piece) + len(gap)
    return pieces if position == len(text) else None


def _ids_of(codec: TextCodec, turn: Turn, piece: str) -> list[int]:
    """The generated ids whose decoding is exactly `piece`, without the end token; empty where there are none.

    Some ids are dropped from the end where an answer was cut at a stop string, or where the template trims it. Where
    the model wrote a control token within its answer, the text counts: it has none.
    """
    ids = list(turn.token_ids)
    while ids and ids[-1] in codec.stop_ids:
        ids.pop()
    if codec.holds_control(ids):
        return []
    for _ in range(_LONGEST_TAIL):
        text = codec.decode(ids) if ids else ""
        if text == piece:
            return ids
        if not text.startswith(piece):
            return []
        ids.pop()
    return []
