"""Runs arms in turn, times answers, and computes medians of ratios."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams

REST_S = 0.03  # pause before an arm, in which threads of the arm before stop spinning and free their cores
T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def text(self, digits: int = 2, unit: str = "") -> str:
        """The text for a cell of a table."""
        low, high = f"{self.low:.{digits}f}", f"{self.high:.{digits}f}"
        return f"{self.median:.{digits}f}{unit} ({low}-{high})"


def turned(names: Sequence[str], turn: int) -> tuple[str, ...]:
    """`names` in another order every turn: rotated, and backwards every other turn, so that neighbours change too."""
    start = turn % len(names)
    order = (*names[start:], *names[:start])
    return order if turn // len(names) % 2 == 0 else order[::-1]


def in_turn(arms: Mapping[str, Callable[[], T]], turn: int) -> dict[str, T]:
    """The results of all arms, run one right after the other in the order of this turn."""
    found: dict[str, T] = {}
    for name in turned(tuple(arms), turn):
        time.sleep(REST_S)
        found[name] = arms[name]()
    return found


def ratio(top: Sequence[float], bottom: Sequence[float]) -> Spread:
    """The spread of top / bottom, pair by pair: both of a pair were measured one right after the other."""
    return Spread.of([a / b for a, b in zip(top, bottom, strict=True)])


@dataclass(frozen=True)
class Decoded:
    """One answer. `decode_s`: from the first token to the last."""

    ids: tuple[int, ...]
    ttft_s: float
    decode_s: float
    rounds: tuple[Round, ...] = ()  # without the prefill's

    @property
    def tps(self) -> float:
        """Tokens after the first a second. The answer must have two."""
        return (len(self.ids) - 1) / self.decode_s

    @property
    def tokens_per_round(self) -> float:
        """Sum of (accepted + 1) by verify passes."""
        return sum(item.accepted + 1 for item in self.rounds) / len(self.rounds)


def decode(
    engine: Engine,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    speculate: bool = True,
    tree: TreeShape | None = None,
) -> Decoded:
    """One answer without a reused prefix. `tree` overrides the engine's own shape."""
    began = time.perf_counter()
    rounds: list[Round] = []
    stamps: list[float] = []
    for item in engine.generate(ids, params, speculate=speculate, tree=tree, reuse_prefix=False):
        stamps.append(time.perf_counter())
        rounds.append(item)
    tokens = tuple(token for item in rounds for token in item.ids)
    return Decoded(tokens, stamps[0] - began, stamps[-1] - stamps[0], tuple(rounds[1:]))
