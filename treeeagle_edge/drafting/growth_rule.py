"""The rule by which a draft tree grows, as plain numbers: for heads that grow the whole tree in one native call."""

from __future__ import annotations

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worth:
    """The numbers by which `drafting.growth.AdaptiveGrowth` weighs the tokens that a tree may bring against its cost.

    Arrays are float64. Their values may change between two trees; where they lie does not.
    """

    verify: array[float]  # [nodes + 3] cost of a verify pass over 0, 1, ... rows, in tokens
    draft: array[float]  # [depth + 1] cost of drafting 0, 1, ... levels, in tokens
    continues: array[float]  # [depth + 1] chance that a walk which could go on to this depth does
    calibration: array[
        float
    ]  # [2] shift and slope of a node's log odds to be walked over those that the head gives
    least: float  # a node's chance is that far from 0 and from 1


@dataclass(frozen=True, slots=True)
class GrowthRule:
    """Bounds of a tree; without `worth` it grows to them by EAGLE-2's rule."""

    depth: int
    branching: int
    nodes: int
    stop_ids: array[int]  # int64: nothing is drafted behind them
    worth: Worth | None = None
