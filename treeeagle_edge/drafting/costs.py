"""What passes cost on this machine: measured once, cached, and corrected while decoding."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from treeeagle_edge.drafting.online_line import OnlineLine
from treeeagle_edge.rounds import Round

_LEARN = 0.08  # weight of the newest round in the seconds of sampling
_LEARN_POINT = 0.02  # the same in the correction of a single point
_KEEP = 0.97  # weight that earlier rounds keep with each newer one, in the two factors of a curve
_DOUBT = (0.3, 0.0, 1.5)  # variances of the two factors at the start, in units of the noise of one round
_LEAST_FACTOR = 0.05
_MOST_OFF = 3.0  # times too long; what took longer was interrupted
_LEVELS = 8  # points of the curve of drafting; beyond the last, costs are in proportion


_Line = tuple[int, float, int, float]  # two points, each followed by its weight: a count lies between them


@dataclass(frozen=True)
class CostTable:
    """Seconds of passes at a short context, measured at the start; assumed where that would have taken too long."""

    rows: tuple[int, ...]  # ascending, from 1
    verify: tuple[float, ...]  # a target pass of so many rows, logits included
    extend: float  # a head pass over true features; 0 without a head, and so is `step`
    step: float  # a head pass over a drafted level
    # whether what was measured may be relied on by later starts: measurements agreed, or were long and undisturbed
    steady: bool = True


class Curve:
    """Seconds as a function of a count (of rows, or of levels), measured at the start and corrected by real rounds.

    Two factors on the whole curve learn quickly: one on what a count of one takes, one on what more of them add. The
    first is mostly memory and the second mostly arithmetic; another program, a longer context or the processor's clock
    slow down each in its own way. Each measured point also learns slowly for itself, because the first measurement was
    short.
    """

    def __init__(self, points: Sequence[int], seconds: Sequence[float]) -> None:
        """`points` ascending, from 1. More never takes less: no point is above what a later one took."""
        self._points = tuple(points)
        self._seconds = [min(seconds[at:]) for at in range(len(points))]
        # the factors, over what a count adds to the first; all in units of what a count of one took at the start
        self._factors = OnlineLine(1.0, 1.0, doubt=_DOUBT, keep=_KEEP, least=(_LEAST_FACTOR, _LEAST_FACTOR))
        self._lines: list[_Line] = []

    def at(self, count: int) -> float:
        """Seconds for `count`: straight lines between the points, in proportion beyond them."""
        return self._seconds[0] * self._factors.at(self._added(count))

    def up_to(self, most: int) -> list[float]:
        """`at` of 1, 2, ..., `most`."""
        known = self._seconds
        first, more = self._factors.terms
        base = (first - more) * known[0]
        lines = self._lines_to(most)[:most]
        return [base + more * (part * known[low] + rest * known[high]) for low, part, high, rest in lines]

    def observe(self, count: int, seconds: float) -> None:
        """Learn from one measurement, which counts as at most `_MOST_OFF` times too long."""
        expected = self.at(count)
        off = min(seconds / expected, _MOST_OFF) - 1.0
        self._factors.learn(self._added(count), off * expected / self._seconds[0])
        low, part, high, rest = self._lines[count - 1]
        self._seconds[low] *= 1.0 + _LEARN_POINT * min(part, 1.0) * off
        self._seconds[high] *= 1.0 + _LEARN_POINT * rest * off

    def _added(self, count: int) -> float:
        """What was measured for `count`, beyond what a count of one took and as a share of it."""
        low, part, high, rest = self._lines_to(count)[count - 1]
        return (part * self._seconds[low] + rest * self._seconds[high]) / self._seconds[0] - 1.0

    def _lines_to(self, count: int) -> list[_Line]:
        """The lines of the counts 1, 2, ..., `count` and perhaps more. They are made once, and never change."""
        while len(self._lines) < count:
            self._lines.append(self._line(len(self._lines) + 1))
        return self._lines

    def _line(self, count: int) -> _Line:
        at = bisect_left(self._points, count)
        if at == len(self._points):
            return (at - 1, count / self._points[-1], at - 1, 0.0)
        if self._points[at] == count or at == 0:
            return (at, 1.0, at, 0.0)
        low, high = self._points[at - 1], self._points[at]
        part = (count - low) / (high - low)
        return (at - 1, 1.0 - part, at, part)


class CostModel:
    """What a round will take, by its rows and levels."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._verify = Curve(table.rows, table.verify)
        levels = range(1, _LEVELS + 1)
        self._draft = Curve(levels, [table.extend + (count - 1) * table.step for count in levels])
        self._sample = 0.0  # seconds a round
        self._by_rows: list[float] = []  # of verify passes, until a round is learnt from

    def verify(self, rows: int) -> float:
        """Seconds to check `rows` rows and walk through them."""
        return self._verify.at(rows) + self._sample

    def verify_by_rows(self, most: int) -> list[float]:
        """`verify` of 0 (which costs nothing), 1, ..., `most` rows or more: asked often while a tree is sized."""
        if len(self._by_rows) <= most:
            self._by_rows = [0.0, *(seconds + self._sample for seconds in self._verify.up_to(most))]
        return self._by_rows

    def draft(self, levels: int) -> float:
        """Seconds to draft `levels` levels: the first one comes with the true features."""
        return self._draft.at(levels) if levels else 0.0

    def draft_by_levels(self, most: int) -> list[float]:
        """`draft` of 0, 1, ..., `most` levels."""
        return [0.0, *self._draft.up_to(most)]

    def observe(self, round_: Round, levels: int) -> None:
        """Learn from what a round took. `levels`: how many the head scored in it, 0 where nothing was drafted."""
        self._by_rows = []
        self._verify.observe(round_.drafted + 1, round_.verify_s)
        self._sample += _LEARN * (round_.sample_s - self._sample)
        if levels:
            self._draft.observe(levels, round_.draft_s)


def load_table(path: Path) -> CostTable | None:
    """A table saved before; None where there is none or it cannot be used."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        table = CostTable(tuple(raw["rows"]), tuple(raw["verify"]), float(raw["extend"]), float(raw["step"]))
        costs = (*table.verify, table.extend, table.step)
        whole = (
            len(table.rows) == len(table.verify)
            and table.rows == tuple(sorted({*map(int, table.rows)}))
            and table.rows[0] == 1
            and all(map(math.isfinite, costs))
            and min(table.verify) > 0
            and min(table.extend, table.step) >= 0
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return table if whole else None


def save_table(path: Path, table: CostTable) -> None:
    """Save for the next start, unless the table is not steady: a busy machine's figures would mislead later starts.

    Where the folder cannot be written, the next start measures again.
    """
    if not table.steady:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(asdict(table)), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return
