"""Sizes each round's tree by what was measured, and pauses drafting while plain decoding is faster."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.drafting.growth import AdaptiveGrowth, Growth
from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.drafting.lookup_acceptance import LookupAcceptance, opinion
from treeeagle_edge.drafting.lookup_branch import Drafted, with_match
from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.tree import DraftTree

_JUDGE_AFTER = 12  # tree rounds before a verdict
_FORGET = 0.92  # weight of the rounds before the newest one, in a verdict
_FORGET_RATE = 0.98  # and in the going rate, which several answers share
# Rounds are learnt from so many at a time: Python code that did not run since the last pass is several times as slow.
_ROUNDS_A_LESSON = 8
# plain rounds; doubles while probing finds that drafting still does not pay
_SHORT_PAUSE, _LONG_PAUSE = 24, 384
# what a draft is thought to gain where a looked-up token is wrong, and the levels it takes for that
_TOKENS_OF_A_DRAFT, _LEVELS_OF_A_DRAFT = 1.0, 2


class _Seen(NamedTuple):
    """A round that is still to be learnt from."""

    round_: Round
    levels: int | None  # that the head scored; None where it did not draft
    match: Match | None  # what the text suggested


class Controller:
    """What one loaded model has taught so far. It lasts from answer to answer."""

    def __init__(self, table: CostTable) -> None:
        self.costs = CostModel(table)
        self.acceptance = Acceptance()
        self.lookups = LookupAcceptance()
        self._tokens = self._seconds = 0.0  # of recent tree rounds, newest counting most
        self._earned = self._spent = 0.0  # the same over a longer while
        self._judged = 0  # tree rounds since the last pause
        self._pause = 0  # plain rounds still to go
        self._next_pause = _SHORT_PAUSE
        self._unlearnt: list[_Seen] = []
        self._growth: AdaptiveGrowth | None = None  # of the last round, and what it was made for
        self._grows: tuple[TreeShape, Collection[int]] | None = None

    @property
    def paused(self) -> bool:
        """Whether the next round decodes plainly because that is faster now."""
        return self._pause > 0

    @property
    def rate(self) -> float:
        """Tokens a second that time is worth: as many as rounds earned lately, or as plain decoding would if more."""
        plain = 1.0 / self.costs.verify(1)
        return max(plain, self._earned / self._spent) if self._spent else plain

    def growth(
        self, bounds: TreeShape, stop_ids: Collection[int], match: Match | None = None
    ) -> AdaptiveGrowth | None:
        """How the next round's tree grows; None where the head should not draft. What is returned serves one round.

        match: what the text suggests. Where that is nearly sure to be right, a draft could gain too little.
        """
        if self.paused:
            return None
        if match is not None:
            wrong = 1.0 - self.lookups.chance(match, 0)
            if wrong * _TOKENS_OF_A_DRAFT < self.rate * self.costs.draft(_LEVELS_OF_A_DRAFT):
                return None
        if self._growth is None or self._grows != (bounds, stop_ids):
            self._grows = (bounds, stop_ids)
            self._growth = AdaptiveGrowth(bounds, self.costs, self.acceptance, self.rate, stop_ids)
        else:
            self._growth.begin()
        return self._growth

    def with_match(
        self,
        tree: DraftTree,
        match: Match,
        bounds: TreeShape,
        stop_ids: Collection[int],
        growth: Growth | None,
    ) -> DraftTree:
        """`tree` with a branch of what the text suggests, see `drafting.lookup_branch.with_match`.

        growth: what sized the tree; None where the head did not draft.
        """
        drafted = Drafted(
            tree,
            self.acceptance.chances(tree) if growth else None,
            self.costs.draft(growth.levels) if growth else 0.0,
            self.rate,
        )
        return with_match(
            drafted,
            match,
            acceptance=self.lookups,
            costs=self.costs,
            nodes=bounds.nodes,
            stop_ids=stop_ids,
        )

    def observe(self, round_: Round, growth: Growth | None, match: Match | None = None) -> None:
        """Learn from a round, now or with some of the next ones.

        growth: what sized the head's tree; None where it did not draft. match: what the text suggested.
        """
        self._unlearnt.append(_Seen(round_, growth.levels if growth else None, match))
        if len(self._unlearnt) < _ROUNDS_A_LESSON and not self.paused:
            return
        for seen in self._unlearnt:
            self._learn(*seen)
        self._unlearnt.clear()
        if self._growth is not None:
            self._growth.weigh(self.rate)

    def _learn(self, round_: Round, levels: int | None, match: Match | None) -> None:
        self.costs.observe(round_, levels or 0)
        if match is not None and round_.tree is not None:
            self._learn_match(match, round_, round_.tree, drafted=levels is not None)
        tokens, seconds = round_.accepted + 1, round_.draft_s + round_.verify_s + round_.sample_s
        if levels is not None or round_.drafted:
            self._earned, self._spent = (
                _FORGET_RATE * self._earned + tokens,
                _FORGET_RATE * self._spent + seconds,
            )
        if levels is None:
            self._pause = max(0, self._pause - 1)
            return
        if round_.tree is not None:
            self.acceptance.observe(round_.tree, round_.walked)
        self._tokens, self._seconds = _FORGET * self._tokens + tokens, _FORGET * self._seconds + seconds
        self._judged += 1
        if self._judged >= _JUDGE_AFTER:
            self._judge()

    def _learn_match(self, match: Match, round_: Round, tree: DraftTree, *, drafted: bool) -> None:
        settled = [*(tree.tokens[row] for row in round_.walked[1:]), round_.next_token]
        heads = opinion(tree, match, self.acceptance.chances(tree)) if drafted else None
        self.lookups.observe(match, heads, settled)

    def _judge(self) -> None:
        """Pause where plain decoding would have been faster over the recent rounds."""
        if self._tokens / self._seconds < 1.0 / self.costs.verify(1):
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONG_PAUSE)
            self._judged, self._tokens, self._seconds = 0, 0.0, 0.0
        elif self._judged >= 4 * _JUDGE_AFTER:
            self._next_pause = _SHORT_PAUSE
