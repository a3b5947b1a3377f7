"""Turns token ids into text while they arrive, without showing half a character or a part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an unfinished UTF-8 sequence to


class TextStream:
    """Incremental decoding: the pieces, joined, equal the decoding of all ids at once.

    Each step decodes only a window: the newest ids, and before them an *anchor*, the ids between the last two points
    where the text was complete. The anchor is needed because some tokenizers decode the first token of a text
    differently.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` turns ids into text, special tokens left out."""
        self._decode = decode
        self._anchor: list[int] = []
        self._fresh: list[int] = []
        self._shown = 0  # characters of decode(anchor + fresh) that were handed out

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; a character whose last bytes are still missing is held back."""
        self._fresh.extend(ids)
        text = self._decode(self._anchor + self._fresh)
        complete = text.rstrip(REPLACEMENT)
        piece = complete[self._shown :]
        self._shown = max(self._shown, len(complete))
        if piece and complete == text:
            self._anchor, self._fresh = self._fresh, []
            self._shown = len(self._decode(self._anchor))
        return piece

    def flush(self) -> str:
        """What is left when no more ids come: bytes that never became a character, as U+FFFD."""
        text = self._decode(self._anchor + self._fresh)
        piece = text[self._shown :]
        self._shown = len(text)
        return piece


@dataclass(frozen=True)
class StopMatch:
    """Where a stop string begins and ends in a text, in characters."""

    start: int
    end: int


class StopFilter:
    """Lets text through up to the first stop string, and holds back what could become the start of one.

    First means: the one that is complete first, so that the result does not depend on how the text was chunked.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown now. Nothing comes after a stop string."""
        if self.stopped:
            return ""
        self._held += text
        match = first_stop(self._held, self._stops)
        if match is not None:
            self.stopped = True
            cut = match.start
        else:
            cut = len(self._held) - self._open_suffix()
        visible, self._held = self._held[:cut], self._held[cut:]
        return visible

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return "" if self.stopped else held

    def _open_suffix(self) -> int:
        """Characters at the end that begin a stop string without completing it."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stops), default=0))
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0


def first_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    """The stop string that is complete first in `text`; of two that end together, the longer one."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    end, start = min(found)
    return StopMatch(start, end)
