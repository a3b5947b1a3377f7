"""How a draft tree grows, in plain numbers: what a head that grows a whole tree in one call is told."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worth:
    """What weighs a tree's expected tokens against its cost. `growth.AdaptiveGrowth` says how; arrays of float64, whose
    values may change between two trees.
    """

    verify: array[float]  # [nodes + 3] cost of a verify pass over 0, 1, ... rows, in tokens
    draft: array[float]  # [depth + 1] cost of drafting 0, 1, ... levels, in tokens
    continues: array[float]  # [depth + 1] chance that a walk which could go on to this depth does
    walked: array[float]  # [bins] nodes walked, by the head's log-probability ...
    seen: array[float]  # [bins] ... and those whose parents were
    bin_width: float  # nats; the last bin holds all that is beyond
    prior: float  # observations that the head's own word counts for
    least: float  # the smallest chance of a node


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """Bounds of a tree; without `worth` it grows to them by EAGLE-2's rule."""

    depth: int
    branching: int
    nodes: int
    stop_ids: array[int]  # int64: nothing is drafted behind them
    worth: Worth | None = None
