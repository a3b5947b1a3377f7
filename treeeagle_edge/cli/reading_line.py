"""A line on the terminal while a long prompt is read, when there is nothing else to see; the answer takes its place."""

from __future__ import annotations

import threading
from types import TracebackType

from treeeagle_edge.cli.console import ProgressLine

PATIENCE_S = 1.0  # most prompts are read sooner, and need no line


class ReadingLine:
    """Told how far the prompt is read, it says so once that takes long: `reading 3,200 tokens, 40 %`.

    Only where the line can be removed again. A pass over a part of the prompt may itself take long, so a timer of its
    own shows the line first.
    """

    def __init__(self, *, silent: bool, patience_s: float = PATIENCE_S) -> None:
        """`silent` shows nothing."""
        self._line = ProgressLine()
        self._shows = self._line.in_place and not silent
        self._sentence = ""
        self._late = False  # it takes long
        self._turn = threading.RLock()  # the timer is another thread, and Ctrl-C may come at any moment
        self._timer = threading.Timer(patience_s, self._show_first)
        self._timer.daemon = True

    def __call__(self, read: int, to_read: int) -> None:
        """Take note of how many tokens are read, of how many."""
        if not self._shows:
            return
        if read >= to_read:
            self.close()
            return
        with self._turn:
            self._sentence = f"reading {to_read:,} tokens, {100 * read // to_read} %"
            if self._late:
                self._line(self._sentence)

    def close(self) -> None:
        """Remove the line, for good."""
        self._timer.cancel()
        with self._turn:
            self._shows = False
            self._line.clear()

    def _show_first(self) -> None:
        with self._turn:
            self._late = True
            if self._shows and self._sentence:
                self._line(self._sentence)

    def __enter__(self) -> ReadingLine:
        if self._shows:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
