"""Scripts of dialogues: who says what, which tokens are given and which the target chooses.

A script is a generator. It yields one `Say` a token, in order, and is sent the token chosen after it where it wished
for one, else None. It knows nothing of models; `generate.py` plays many scripts at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from treeeagle_edge.training.pieces import ChatPieces
from treeeagle_edge.training.starters import Starter

ANSWER_TOKENS = 256
_LEAST_USER_TOKENS = 3
_CIRCLE = 12  # an answer that says so many tokens for the third time goes round in circles, and is cut
_TURNS = ((1, 0.65), (2, 0.25), (3, 0.10))  # how many, and how often
_ANSWER_TEMPERATURES = ((0.0, 0.65), (0.4, 0.15), (0.8, 0.1), (1.0, 0.1))


@dataclass(frozen=True)
class Wish:
    """How the next token is to be chosen."""

    temperature: float  # 0: the most likely
    may_stop: bool = True


@dataclass(frozen=True)
class Say:
    """One token of a dialogue."""

    token: int
    in_answer: bool  # chosen by the target as its answer: what a head is trained to foresee
    wish: Wish | None = None


Script = Generator[Say, int | None, None]


def self_written(pieces: ChatPieces, starters: Sequence[Starter], rng: np.random.Generator) -> Script:
    """A dialogue in which the target plays both parts. Each person's turn begins with a starter, or freely."""
    waiting = [Say(token, False) for token in pieces.opening]
    for turn in range(int(_pick(rng, _TURNS))):
        starter = starters[_weighted(rng, [s.follow_up if turn else s.weight for s in starters])]
        waiting += [Say(token, False) for token in starter.ids]
        wish = Wish(_pick(rng, ((0.8, 0.4), (1.0, 0.6))))
        yield from _turn(waiting, wish, pieces, starter.tokens, in_answer=False)
        waiting = [Say(token, False) for token in pieces.reply]
        wish = Wish(_pick(rng, _ANSWER_TEMPERATURES))
        stop = yield from _turn(waiting, wish, pieces, ANSWER_TOKENS, in_answer=True)
        if stop is None:
            return  # cut: nothing follows an answer without an end
        waiting = _after_answer(pieces, stop)
    yield waiting[0]


def retold(
    pieces: ChatPieces,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    opening: Sequence[int] | None = None,
    regenerate: Wish | None = None,
) -> Script:
    """A given dialogue: (ids of the person's words, ids of the answer) a turn.

    With `regenerate` the answers are the target's own, chosen so.
    """
    waiting = [Say(token, False) for token in (pieces.opening if opening is None else opening)]
    for user, answer in turns:
        waiting += [Say(token, False) for token in (*user, *pieces.reply)]
        stop: int | None = pieces.again[0]
        if regenerate is None:
            yield from waiting
            yield from (Say(token, True) for token in answer)
        else:
            stop = yield from _turn(waiting, regenerate, pieces, ANSWER_TOKENS, in_answer=True)
        if stop is None:
            return
        waiting = _after_answer(pieces, stop)
    yield waiting[0]


def _after_answer(pieces: ChatPieces, stop: int) -> list[Say]:
    """The end token, which the target chose, and what the template writes up to the person's next words."""
    rest = pieces.again[1:] if pieces.again[0] == stop else pieces.again
    return [Say(stop, stop in pieces.stop_ids), *(Say(token, False) for token in rest)]


def _turn(
    waiting: Sequence[Say], wish: Wish, pieces: ChatPieces, limit: int, *, in_answer: bool
) -> Generator[Say, int | None, int | None]:
    """Say what waits, then what is chosen, up to the end token, which is returned, not said. None: it was cut."""
    yield from waiting[:-1]
    last = waiting[-1]
    said: list[int] = []
    least = 0 if in_answer else _LEAST_USER_TOKENS
    while True:
        asked = Wish(wish.temperature, may_stop=len(said) >= least)
        token = yield Say(last.token, last.in_answer, asked)
        assert token is not None
        if token in pieces.stop_ids:
            return token
        if len(said) == limit or (in_answer and _goes_in_circles(said)):
            return None
        said.append(token)
        last = Say(token, in_answer)


def _goes_in_circles(said: Sequence[int]) -> bool:
    """Whether the last tokens stood there, just so, twice before; looked at now and then."""
    if len(said) < 3 * _CIRCLE or len(said) % _CIRCLE:
        return False
    last = list(said[-_CIRCLE:])
    earlier = range(len(said) - _CIRCLE)
    return sum(said[at] == last[0] and list(said[at : at + _CIRCLE]) == last for at in earlier) >= 2


def _weighted(rng: np.random.Generator, weights: Sequence[float]) -> int:
    return int(np.searchsorted(np.cumsum(weights) / np.sum(weights), rng.random(), side="right"))


def _pick(rng: np.random.Generator, choices: Sequence[tuple[float, float]]) -> float:
    return choices[_weighted(rng, [share for _, share in choices])][0]
