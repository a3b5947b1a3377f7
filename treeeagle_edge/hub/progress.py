"""How far a fetch has come, in sentences: how much, how fast, and how long the rest will take."""

from __future__ import annotations

import io
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treeeagle_edge.progress import Progress
from treeeagle_edge.units import format_size

_REFRESH = 0.2  # seconds between messages where each replaces the one before
_WINDOW = 10.0  # seconds over which the speed is taken
_STEPS = 20  # messages about bytes in all, where each is a line of its own


class Meter:
    """Counts the bytes of several files that come one after another, and says now and then how far it is.

    `say` gets more messages where each can replace the one before on the screen: see `treeeagle_edge.progress`.
    """

    def __init__(self, say: Progress, total: int) -> None:
        """`total`: bytes of all files."""
        self.say = say
        self._total = total
        self._settled = 0  # bytes of the files that are complete
        self._current = 0  # bytes of the file that is coming
        self._name = ""
        self._fetched = 0  # bytes from the network
        self._recent: deque[tuple[float, int]] = deque()  # (time, bytes from the network), a second apart
        self._in_place = bool(getattr(say, "in_place", False))
        self._said = (0.0, 0)  # time and step of the last message

    def begin(self, name: str, here: int) -> None:
        """The file `name` comes next, or starts again; `here` bytes of it are already on disk."""
        self._name, self._current = name, here
        self._said = (self._said[0], self._step)

    def chunk(self, count: int) -> None:
        """`count` more bytes of the file came. Negative where bytes were removed from its end."""
        now = time.monotonic()
        if not self._recent or now - self._recent[-1][0] >= 1:
            self._recent.append((now, self._fetched))
        while now - self._recent[0][0] > _WINDOW:
            self._recent.popleft()
        self._fetched += count
        self._current += count
        due = now - self._said[0] >= _REFRESH if self._in_place else self._step > self._said[1]
        if due and self._done < self._total:
            self._said = (now, self._step)
            self.say(f"{self._name}: {self._text(now)}")

    def end(self, size: int) -> None:
        """The file is complete, with `size` bytes."""
        self._settled, self._current = self._settled + size, 0

    @property
    def _done(self) -> int:
        return self._settled + self._current

    @property
    def _step(self) -> int:
        return self._done * _STEPS // max(1, self._total)

    def _text(self, now: float) -> str:
        text = f"{format_size(self._done)} of {format_size(self._total)}"
        since, before = self._recent[0]
        if now - since < 1 or self._fetched <= before:
            return text
        rate = (self._fetched - before) / (now - since)
        return f"{text}, {format_size(rate)}/s, {duration((self._total - self._done) / rate)} left"


def duration(seconds: float) -> str:
    """Such as "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class CountedFile(io.BufferedWriter):
    """A file to append to, which calls `count` with the bytes of every write; negative where its end is cut off."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        """Opens `path`, which need not exist."""
        super().__init__(io.FileIO(path, "a"))
        self._count = count

    def write(self, data: Any) -> int:
        """Append `data`."""
        written = super().write(data)
        self._count(written)
        return written

    def truncate(self, size: int | None = None) -> int:
        """Cut the file: the hub's client does so where a server begins anew."""
        self.flush()
        before = os.fstat(self.fileno()).st_size
        after = super().truncate(size)
        self._count(after - before)
        return after
