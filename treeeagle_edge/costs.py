"""What a pass costs on this machine: measured once, cached, and corrected while decoding."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path

from treeeagle_edge.rounds import Round

_LEARN = 0.08  # weight of the newest round in the running corrections


@dataclass(frozen=True)
class CostTable:
    """Seconds of passes at a short context, as measured at the start."""

    rows: tuple[int, ...]  # ascending, from 1
    verify: tuple[float, ...]  # a target pass of so many rows, logits included
    extend: float  # a head pass over true features
    step: float  # a head pass over a drafted level


class CostModel:
    """The table, scaled by what rounds really take: contexts grow, and other programs want the cores too."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._by_rows = [0.0]  # the table for 0, 1, 2, ... rows, as far as somebody asked
        self._verify_scale = 1.0
        self._draft_scale = 1.0
        self._sample = 0.0  # seconds a round

    def verify(self, rows: int) -> float:
        """Seconds to check `rows` rows and walk through them; straight lines between the measured points."""
        return self._table_verify(rows) * self._verify_scale + self._sample

    def verify_by_rows(self, most: int) -> list[float]:
        """`verify` of 0 (which costs nothing), 1, ..., `most` rows: what sizing a tree looks up time and again."""
        return [0.0, *(self.verify(rows) for rows in range(1, most + 1))]

    def draft(self, levels: int) -> float:
        """Seconds to draft `levels` levels: the first one comes with the true features."""
        return (
            (self.table.extend + max(0, levels - 1) * self.table.step) * self._draft_scale if levels else 0.0
        )

    def step(self) -> float:
        """Seconds of one level more."""
        return self.table.step * self._draft_scale

    def observe(self, round_: Round, levels: int) -> None:
        """Learn from what a round took. `levels` the head scored in it; 0 where nothing was drafted."""
        expected = self._table_verify(round_.drafted + 1)
        self._verify_scale += _LEARN * (round_.verify_s / expected - self._verify_scale)
        self._sample += _LEARN * (round_.sample_s - self._sample)
        if levels:
            expected = self.table.extend + (levels - 1) * self.table.step
            self._draft_scale += _LEARN * (round_.draft_s / expected - self._draft_scale)

    def _table_verify(self, rows: int) -> float:
        while len(self._by_rows) <= rows:
            self._by_rows.append(self._between(len(self._by_rows)))
        return self._by_rows[rows]

    def _between(self, rows: int) -> float:
        known, seconds = self.table.rows, self.table.verify
        at = bisect_left(known, rows)
        if at == len(known):
            return seconds[-1] * rows / known[-1]
        if known[at] == rows or at == 0:
            return seconds[at]
        low, high = known[at - 1], known[at]
        return seconds[at - 1] + (seconds[at] - seconds[at - 1]) * (rows - low) / (high - low)


def load_table(path: Path) -> CostTable | None:
    """A table saved before; None where there is none or it cannot be used."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        table = CostTable(tuple(raw["rows"]), tuple(raw["verify"]), float(raw["extend"]), float(raw["step"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = len(table.rows) == len(table.verify) > 0 and min(*table.verify, table.extend, table.step) > 0
    return table if whole else None


def save_table(path: Path, table: CostTable) -> None:
    """Save for the next start. A folder that cannot be written only means that the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps(asdict(table)), encoding="utf-8")
        fresh.replace(path)
    except OSError:
        return
