"""Ctrl-C: once stops the answer at its next round, or the reading before it; twice within a second leaves."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

TWICE_WITHIN_S = 1.0


class LeaveNow(KeyboardInterrupt):
    """Ctrl-C was pressed twice within a second."""


class StopReading(KeyboardInterrupt):
    """Ctrl-C was pressed before anything was answered: reading a long prompt takes its time, and has no rounds."""


class Interrupts:
    """Remembers when Ctrl-C was pressed last, at the prompt or while answering."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._last = float("-inf")
        self.requested = False  # Ctrl-C was pressed since `watch` began
        self.reading = False  # nothing is shown yet, so nothing is lost where a pass is broken off

    def press(self) -> bool:
        """Note a Ctrl-C; True where it is the second within a second."""
        now = self._clock()
        twice = now - self._last < TWICE_WITHIN_S
        self._last = now
        return twice

    @contextmanager
    def watch(self) -> Iterator[Interrupts]:
        """While this lasts, Ctrl-C sets `requested` instead of tearing a target pass apart, or raises StopReading while
        `reading`; twice raises LeaveNow. Outside the main thread signals cannot be caught, and nothing changes.
        """
        self.requested = self.reading = False
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if self.press():
            raise LeaveNow
        if self.reading:
            raise StopReading
