"""Answers on a clock of their own: a round is given the seconds that a table of costs says, not those that it takes.

So a thousand rounds of models that only repeat what they said take less than a second, and no other program disturbs
them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from measuring.drafts import rounds_of, slots_for
from measuring.timing import Decoded
from treeeagle_edge.drafting.controller import Controller
from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.drafting.growth import Growth
from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.model.target import TargetOutput
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree


class Clock:
    """What rounds take: the costs of a table, each time with noise of its own."""

    def __init__(self, table: CostTable, *, other: float, noise: float, seed: int) -> None:
        """other: seconds of a round beside its passes. noise: standard deviation of a cost, as a share of it."""
        self._costs = CostModel(table)  # never told of a round, so it stays what was measured
        self._other = other
        self._noise = noise
        self._random = random.Random(seed)
        self._draft = self._verify = 0.0  # seconds of the newest round
        self.levels = 0  # that the head scored, in all rounds so far

    def round(self, levels: int, rows: int) -> None:
        """A round drafts `levels` levels, which may be none, and verifies `rows` rows."""
        self.levels += levels
        self._draft = self._costs.draft(levels) * self._factor()
        self._verify = self._costs.verify(rows) * self._factor()

    def timed(self, round_: Round) -> Round:
        """The newest round with the seconds of this clock."""
        return replace(round_, draft_s=self._draft, verify_s=self._verify, sample_s=self._other)

    def _factor(self) -> float:
        return max(1.0 + self._random.gauss(0.0, self._noise), 0.1)


class TimedController(Controller):
    """The controller, which is told another clock's seconds."""

    def __init__(self, table: CostTable, clock: Clock) -> None:
        super().__init__(table)
        self._clock = clock

    def observe(self, round_: Round, growth: Growth | None, match: Match | None = None) -> None:
        """See `Controller.observe`."""
        super().observe(self._clock.timed(round_), growth, match)


class _TimedPasses(Passes):
    """Tells a clock what was done."""

    def __init__(self, target: TargetModel, head: DraftHead, clock: Clock, *, slots: int) -> None:
        super().__init__(target, head, slots=slots, fixed_rows=None)
        self._clock = clock
        self._levels = 0  # of this round's draft

    def draft(self, sequence: LiveSequence, root: int, growth: Growth) -> DraftTree | None:
        """See `Passes.draft`."""
        tree = super().draft(sequence, root, growth)
        self._levels = growth.levels
        return tree

    def verify(
        self, sequence: LiveSequence, tree: DraftTree, slots: Sequence[int], *, peaks_only: bool = False
    ) -> TargetOutput:
        """See `Passes.verify`."""
        self._clock.round(self._levels, len(tree))
        self._levels = 0
        return super().verify(sequence, tree, slots, peaks_only=peaks_only)


def play(
    target: TargetModel,
    head: DraftHead,
    prompt: Sequence[int],
    params: SamplingParams,
    shape: TreeShape | None,
    clock: Clock,
    controller: Controller | None = None,
) -> Decoded:
    """One answer in seconds of `clock`; nothing is known of its prefill. `shape` None decodes plainly.

    controller: of an adaptive shape, made with the same clock.
    """
    slots = slots_for(prompt, params, nodes=shape.nodes if shape is not None else 0)
    passes = _TimedPasses(target, head, clock, slots=slots)
    rounds = rounds_of(passes, prompt, params, shape, controller, slots=slots)
    first = next(rounds)
    timed = tuple(clock.timed(each) for each in rounds)
    ids = (*first.ids, *(token for each in timed for token in each.ids))
    return Decoded(ids, 0.0, sum(each.draft_s + each.verify_s + each.sample_s for each in timed), timed)
