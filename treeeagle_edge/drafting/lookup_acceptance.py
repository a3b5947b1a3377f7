"""How far what the text suggests can be trusted, learnt from the rounds that checked it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from treeeagle_edge.drafting.lookup import MOST_COMPARED, Match
from treeeagle_edge.drafting.online_line import OnlineLine
from treeeagle_edge.tree import DraftTree

_ALL, _SHARED, _NEW, _BEHIND_NEW = range(4)
# shift and slope at the start, about what fits answers to public questions (docs/measurements.md)
_STARTS = ((-0.75, 0.27), (0.1, 0.2), (-0.4, 0.2), (0.6, 0.13))
_DOUBT = (0.1, 0.0, 0.002)  # variances at the start: shift and slope may be off by some 0.3 and 0.04
_KEEP = 0.998  # half of what a token taught is forgotten in some 350 later ones
_LEAST = 1e-3  # the head's chances are taken to be that far from 0 and from 1
_LEAST_LEFT = 0.02
_LEAST_ODDS = -20.0


@dataclass(frozen=True, slots=True)
class Opinion:
    """What the head's tree says of a match."""

    rows: list[int]  # of the match's first tokens, which the head drafted too, as a path below the root
    # the log odds of each that the walk goes on to it, and the logarithm of the chance that is left there to tokens
    # which the head did not draft: the match's next one is among them
    odds: list[float]


def opinion(tree: DraftTree, match: Match, chances: Sequence[float]) -> Opinion:
    """What a tree that the head drafted says of `match`. chances: [N] of its rows to be walked."""
    row, rows, odds = 0, list[int](), list[float]()
    for token in match.tokens:
        below = tree.child(row, token)
        if below is None or below >= tree.head_rows:
            break
        chance = min(max(chances[below] / chances[row], _LEAST), 1.0 - _LEAST)
        odds.append(math.log(chance / (1.0 - chance)))
        rows.append(below)
        row = below
    taken = sum(chances[at] for at in range(row + 1, tree.head_rows) if tree.parents[at] == row)
    odds.append(math.log(max(1.0 - taken / chances[row], _LEAST_LEFT)))
    return Opinion(rows, odds)


class LookupAcceptance:
    """Chances of looked-up tokens to be right once those before them were.

    The log odds are a straight line, learnt online, over the number of tokens before it that agree, plus what the head
    thinks of the token. When the walk comes to the third token of a match, the two before it agreed as well; so a token
    counts by the match's length plus its place. There are four lines: of all tokens, for where the head does not draft;
    and for where it does, of the tokens that it drafted too, of the first that it did not, and of those behind that
    one, about which it was not asked.
    """

    def __init__(self) -> None:
        self._lines = [
            OnlineLine(*start, doubt=_DOUBT, keep=_KEEP, least=(-math.inf, 0.0)) for start in _STARTS
        ]

    def chance(self, match: Match, place: int, heads: Opinion | None = None) -> float:
        """Probability that token `place` of a match is right. heads: what the head thinks; None if it was not asked."""
        return self._chance(_agreed(match, place), *_kind(place, heads))

    def observe(self, match: Match, heads: Opinion | None, settled: Sequence[int]) -> None:
        """Learn from the tokens that a round settled, up to the match's first wrong token. Which of the match's tokens
        were in the tree does not matter.
        """
        for place, (looked_up, true) in enumerate(zip(match.tokens, settled, strict=False)):
            right = looked_up == true
            self._learn(_agreed(match, place), right, _ALL, 0.0)
            if heads is not None:
                self._learn(_agreed(match, place), right, *_kind(place, heads))
            if not right:
                return

    def _learn(self, agreed: int, right: bool, kind: int, odds: float) -> None:
        chance = self._chance(agreed, kind, odds)
        self._lines[kind].learn(agreed, right - chance, chance * (1.0 - chance))

    def _chance(self, agreed: int, kind: int, odds: float) -> float:
        return 1.0 / (1.0 + math.exp(-max(self._lines[kind].at(agreed) + odds, _LEAST_ODDS)))


def _agreed(match: Match, place: int) -> int:
    return min(match.length + place, MOST_COMPARED)


def _kind(place: int, heads: Opinion | None) -> tuple[int, float]:
    """The line of a match's token, and what the head adds to it."""
    if heads is None:
        return _ALL, 0.0
    shared = len(heads.rows)
    if place > shared:
        return _BEHIND_NEW, 0.0
    return _SHARED if place < shared else _NEW, heads.odds[place]
