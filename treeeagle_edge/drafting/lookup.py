"""Drafts from the text itself: what followed the last tokens when they stood there before may follow them again.

Summaries, code and answers about a text repeat long parts of it word for word, and a head cannot see that far. The
continuation is looked up (prompt lookup decoding, Saxena 2023; Yang et al., arXiv 2304.04487); `lookup_branch` makes
one more branch of the round's tree of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_SHORT, _LONG = 2, 4  # lengths of the runs of tokens that are looked for; a long one is preferred
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1  # make a number of a run
MOST_COMPARED = 16  # tokens; what agrees further back says nothing new


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place in the text that reads like its end."""

    length: int  # how many tokens up to there are the same, at most `MOST_COMPARED`
    tokens: list[int]  # what followed


class Lookup:
    """A text, with an index of where each run of two and of four tokens ended last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # for each length of run: the number of a run -> where it ended last
        self._ends = {length: _last_ends(self._tokens[:-1], length) for length in (_LONG, _SHORT)}
        self._found: dict[
            int, int | None
        ] = {}  # for each length: where the run at the text's end ended before
        self._note_end()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the text."""
        for token in tokens:
            self._tokens.append(token)
            self._note_end()

    def match(self, most: int) -> Match | None:
        """The newest place where the last four tokens stood before, else the last two, with the `most` tokens that
        followed; None where there is no such place.

        Where fewer than `most` have followed so far, the text runs in a circle, and the continuation goes round too.
        """
        text = self._tokens
        end = self._found[_LONG] or self._found[_SHORT]
        if end is None or most < 1:
            return None
        length, here = 0, len(text)
        while length < min(end, MOST_COMPARED) and text[end - length - 1] == text[here - length - 1]:
            length += 1
        if length < _SHORT:
            return None  # another run that has the same number
        following = text[end : end + most]
        while len(following) < most:
            following += following[: most - len(following)]
        return Match(length, following)

    def _note_end(self) -> None:
        text = self._tokens
        for length, ends in self._ends.items():
            if len(text) < length:
                self._found[length] = None
                continue
            number = 0
            for token in text[-length:]:
                number = (number * _FACTOR + token) & _MASK
            self._found[length] = ends.get(number)
            ends[number] = len(text)


def _last_ends(tokens: Sequence[int], length: int) -> dict[int, int]:
    """The number of each run of `length` tokens -> where it ends last.

    Numbers and not tuples: the garbage collector would go through so many containers again and again.
    """
    text = np.array(tokens, dtype=np.uint64)
    count = len(text) - length + 1
    if count < 1:
        return {}
    numbers = np.zeros(count, dtype=np.uint64)
    for start in range(length):
        numbers = (numbers * np.uint64(_FACTOR) + text[start : start + count]) & np.uint64(_MASK)
    ends = range(length, len(text) + 1)
    return dict(zip(numbers.tolist(), ends, strict=True))  # a later end replaces an earlier one
