"""Scripts of dialogues: whose turn it is, which tokens are given, and which the target chooses.

A script is a generator of `DialogueToken`s, in order. Where a token carries a `Wish`, the caller chooses the token that
follows it and sends that back; else it sends None. Scripts know nothing of models: `generate.py` runs many at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from treeeagle_edge.training.pieces import ChatPieces
from treeeagle_edge.training.starters import Starter

ANSWER_TOKENS = 256
_LEAST_USER_TOKENS = 3
_CIRCLE = 12  # an answer whose last 12 tokens stood there twice before goes in circles, and is cut
_TURNS = ((1, 0.65), (2, 0.25), (3, 0.10))  # how many, and how often
_ANSWER_TEMPERATURES = ((0.0, 0.65), (0.4, 0.15), (0.8, 0.1), (1.0, 0.1))


@dataclass(frozen=True)
class Wish:
    """How the next token is to be chosen."""

    temperature: float  # 0: the most likely
    may_stop: bool = True


@dataclass(frozen=True)
class DialogueToken:
    """One token of a dialogue."""

    token: int
    in_answer: bool  # chosen by the target as part of its answer: a head learns to predict such tokens
    wish: Wish | None = None  # how the token after it is to be chosen; None: the script gives it


Script = Generator[DialogueToken, int | None, None]


def self_written(pieces: ChatPieces, starters: Sequence[Starter], rng: np.random.Generator) -> Script:
    """A dialogue in which the target writes both parts. A person's turn begins with a starter, which may be empty."""
    waiting = [DialogueToken(token, False) for token in pieces.opening]
    for turn in range(int(_pick(rng, _TURNS))):
        starter = starters[_weighted(rng, [s.follow_up if turn else s.weight for s in starters])]
        waiting += [DialogueToken(token, False) for token in starter.ids]
        wish = Wish(_pick(rng, ((0.8, 0.4), (1.0, 0.6))))
        yield from _turn(waiting, wish, pieces, starter.tokens, in_answer=False)
        waiting = [DialogueToken(token, False) for token in pieces.reply]
        wish = Wish(_pick(rng, _ANSWER_TEMPERATURES))
        stop = yield from _turn(waiting, wish, pieces, ANSWER_TOKENS, in_answer=True)
        if stop is None:
            return  # the answer was cut before its end, so nothing can follow it
        waiting = _after_answer(pieces, stop)
    yield waiting[0]


def retold(
    pieces: ChatPieces,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    opening: Sequence[int] | None = None,
    regenerate: Wish | None = None,
) -> Script:
    """A given dialogue. `turns`: for each turn the ids of the person's words and the ids of the answer.

    With `regenerate` the target writes the answers itself, choosing tokens in that way, and the given ones are unused.
    """
    waiting = [DialogueToken(token, False) for token in (pieces.opening if opening is None else opening)]
    for user, answer in turns:
        waiting += [DialogueToken(token, False) for token in (*user, *pieces.reply)]
        stop: int | None = pieces.again[0]
        if regenerate is None:
            yield from waiting
            yield from (DialogueToken(token, True) for token in answer)
        else:
            stop = yield from _turn(waiting, regenerate, pieces, ANSWER_TOKENS, in_answer=True)
        if stop is None:
            return
        waiting = _after_answer(pieces, stop)
    yield waiting[0]


def _after_answer(pieces: ChatPieces, stop: int) -> list[DialogueToken]:
    """The end token that the target chose, then what the chat template writes up to the person's next words."""
    rest = pieces.again[1:] if pieces.again[0] == stop else pieces.again
    return [DialogueToken(stop, stop in pieces.stop_ids), *(DialogueToken(token, False) for token in rest)]


def _turn(
    waiting: Sequence[DialogueToken], wish: Wish, pieces: ChatPieces, limit: int, *, in_answer: bool
) -> Generator[DialogueToken, int | None, int | None]:
    """Yield the tokens of `waiting`, then those that are chosen. Returns the end token; None where the turn was cut."""
    yield from waiting[:-1]
    last = waiting[-1]
    said: list[int] = []
    least = 0 if in_answer else _LEAST_USER_TOKENS
    while True:
        asked = Wish(wish.temperature, may_stop=len(said) >= least)
        token = yield DialogueToken(last.token, last.in_answer, asked)
        assert token is not None
        if token in pieces.stop_ids:
            return token
        if len(said) == limit or (in_answer and _goes_in_circles(said)):
            return None
        said.append(token)
        last = DialogueToken(token, in_answer)


def _goes_in_circles(said: Sequence[int]) -> bool:
    """Whether the last tokens already stood there twice before. Checked once every `_CIRCLE` tokens."""
    if len(said) < 3 * _CIRCLE or len(said) % _CIRCLE:
        return False
    last = list(said[-_CIRCLE:])
    earlier = range(len(said) - _CIRCLE)
    return sum(said[at] == last[0] and list(said[at : at + _CIRCLE]) == last for at in earlier) >= 2


def _weighted(rng: np.random.Generator, weights: Sequence[float]) -> int:
    return int(np.searchsorted(np.cumsum(weights) / np.sum(weights), rng.random(), side="right"))


def _pick(rng: np.random.Generator, choices: Sequence[tuple[float, float]]) -> float:
    return choices[_weighted(rng, [share for _, share in choices])][0]
