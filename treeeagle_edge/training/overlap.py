"""Keeps out of the training data what does not belong there: questions that judge a head, and repetitions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

WORDS = 8  # a dialogue that shares this many words in a row with a judging question is left out
_SEEN_TOKENS = 8  # repetitions are found by runs of this many tokens
_TABLE_BITS = 26  # 64 MB: with a few million runs noted, hardly any other run is taken for one of them
_MOST_SEEN = 0.5  # a dialogue is left out where more than this share of its runs occurred before


def word_grams(text: str) -> set[tuple[str, ...]]:
    """Every run of WORDS words of the text, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


class Excluded:
    """Texts that training data must not share WORDS words in a row with."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams = {gram for text in texts for gram in word_grams(text)}

    def overlaps(self, text: str) -> bool:
        """Whether `text` shares WORDS words in a row with one of the texts."""
        return not self._grams.isdisjoint(word_grams(text))


class Seen:
    """Remembers which runs of tokens have occurred. A run is a flag in a table, at the place of its hash."""

    def __init__(self) -> None:
        self._table = np.zeros(1 << _TABLE_BITS, dtype=bool)

    def is_repeated(self, tokens: Sequence[int] | np.ndarray) -> bool:
        """Whether most runs of `tokens` occurred before. If not, its runs are noted."""
        places = self._places(np.asarray(tokens, dtype=np.uint64))
        if len(places) and self._table[places].mean() > _MOST_SEEN:
            return True
        self._table[places] = True
        return False

    @staticmethod
    def _places(tokens: np.ndarray) -> np.ndarray:
        """Places of all runs in the table: a polynomial modulo 2^64, then Knuth's multiplicative hash."""
        if len(tokens) < _SEEN_TOKENS:
            return np.empty(0, np.int64)
        runs = np.lib.stride_tricks.sliding_window_view(tokens, _SEEN_TOKENS)
        factors = np.array([pow(0x100000001B3, i, 1 << 64) for i in range(_SEEN_TOKENS)], dtype=np.uint64)
        mixed = ((runs + np.uint64(1)) * factors).sum(axis=1, dtype=np.uint64)
        return ((mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
