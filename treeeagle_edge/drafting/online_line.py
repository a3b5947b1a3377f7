"""A straight line that is learnt one observation at a time, and forgets."""

from __future__ import annotations

import math
from array import array

Doubt = tuple[float, float, float]  # variance of the shift, covariance, variance of the slope


class OnlineLine:
    """shift + slope * x by recursive least squares with forgetting (Ljung, System Identification, 1999, chapter 11).

    What is not seen for long becomes unsure again, but never more than at the start.
    """

    def __init__(
        self, shift: float, slope: float, *, doubt: Doubt, keep: float, least: tuple[float, float]
    ) -> None:
        """doubt: how unsure shift and slope are, in units of the noise of one observation of weight 1. keep: weight
        that earlier observations keep with each newer one. least: bounds of shift and slope from below.
        """
        self.terms = array("d", (shift, slope))  # float64 [2]; it keeps its place, which native code knows
        self._doubt = self._most = doubt
        self._keep = keep
        self._least = least

    def at(self, x: float) -> float:
        """The line's value."""
        return self.terms[0] + self.terms[1] * x

    def learn(self, x: float, error: float, weight: float = 1.0) -> None:
        """Learn that at `x` the line was `error` too low.

        weight: how much the observation counts. Where the line stands for something else, as log odds do for a chance,
        `error` is in units of that, and `weight` is its derivative.
        """
        var_shift, both, var_slope = self._doubt
        along_shift, along_slope = var_shift + both * x, both + var_slope * x
        gain = 1.0 / (self._keep + weight * (along_shift + along_slope * x))
        self.terms[0] = max(self._least[0], self.terms[0] + gain * along_shift * error)
        self.terms[1] = max(self._least[1], self.terms[1] + gain * along_slope * error)
        gain *= weight
        var_shift = min((var_shift - gain * along_shift * along_shift) / self._keep, self._most[0])
        var_slope = min((var_slope - gain * along_slope * along_slope) / self._keep, self._most[2])
        bound = 0.99 * math.sqrt(var_shift * var_slope)
        both = min(max((both - gain * along_shift * along_slope) / self._keep, -bound), bound)
        self._doubt = var_shift, both, var_slope
