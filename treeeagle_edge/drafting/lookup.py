"""Drafts from the text itself: what followed the last tokens when they stood there before may follow them again.

Summaries, code and answers about a text repeat long parts of it word for word, and a head cannot see that far. The
continuation is looked up (prompt lookup decoding, Saxena 2023; Yang et al., arXiv 2304.04487) and becomes one more
branch of the round's tree. It costs no pass of the head, and the target checks it with the rest.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeeagle_edge.drafting.costs import CostModel
from treeeagle_edge.tree import DraftTree

_SHORT, _LONG = 2, 4  # lengths of the runs of tokens that are looked for; a long one is preferred
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1  # make a number of a run
_LEAST_CHANCE = 0.3  # of a match's first new token: below it, the time in Python is about what a branch gains
_LEAST_REACH = 0.02  # chance of a row to be walked, below which it never pays
_MOST_COMPARED = 16  # tokens; what agrees further back says nothing new


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place in the text that reads like its end."""

    length: int  # how many tokens up to there are the same, at most `_MOST_COMPARED`
    tokens: list[int]  # what followed


class Lookup:
    """A text, with an index of where each run of two and of four tokens ended last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # for each length of run: the number of a run -> where it ended last
        self._ends = {length: _last_ends(self._tokens[:-1], length) for length in (_LONG, _SHORT)}
        self._found: dict[
            int, int | None
        ] = {}  # for each length: where the run at the text's end ended before
        self._note_end()

    def extend(self, tokens: Sequence[int]) -> None:
        """Add `tokens` to the text."""
        for token in tokens:
            self._tokens.append(token)
            self._note_end()

    def match(self, most: int) -> Match | None:
        """The newest place where the last four tokens stood before, else the last two, with the `most` tokens that
        followed; None where there is no such place.

        Where fewer than `most` have followed so far, the text runs in a circle, and the continuation goes round too.
        """
        text = self._tokens
        end = self._found[_LONG] or self._found[_SHORT]
        if end is None or most < 1:
            return None
        length, here = 0, len(text)
        while length < min(end, _MOST_COMPARED) and text[end - length - 1] == text[here - length - 1]:
            length += 1
        if length < _SHORT:
            return None  # another run that has the same number
        following = text[end : end + most]
        while len(following) < most:
            following += following[: most - len(following)]
        return Match(length, following)

    def _note_end(self) -> None:
        text = self._tokens
        for length, ends in self._ends.items():
            if len(text) < length:
                self._found[length] = None
                continue
            number = 0
            for token in text[-length:]:
                number = (number * _FACTOR + token) & _MASK
            self._found[length] = ends.get(number)
            ends[number] = len(text)


def _last_ends(tokens: Sequence[int], length: int) -> dict[int, int]:
    """The number of each run of `length` tokens -> where it ends last.

    Numbers and not tuples: the garbage collector would go through so many containers again and again.
    """
    text = np.array(tokens, dtype=np.uint64)
    count = len(text) - length + 1
    if count < 1:
        return {}
    numbers = np.zeros(count, dtype=np.uint64)
    for start in range(length):
        numbers = (numbers * np.uint64(_FACTOR) + text[start : start + count]) & np.uint64(_MASK)
    ends = range(length, len(text) + 1)
    return dict(zip(numbers.tolist(), ends, strict=True))  # a later end replaces an earlier one


class LookupAcceptance:
    """How often looked-up tokens were right, learnt online, by the number of tokens before them that agreed.

    There are four counts: of all tokens, of those that the head drafted too, of the first that it did not, and of those
    behind that one, about which it was not asked. When the walk comes to the third token of a match, the two before it
    agreed as well. So a token counts by the match's length plus its place.
    """

    ALL, SHARED, NEW, BEHIND_NEW = range(4)
    _WRONG = (
        0.55,
        0.25,
        0.85,
        0.45,
    )  # chance to be wrong after two tokens; each further one makes it a fifth less
    _PRIOR = 8.0  # observations that this counts for
    _DECAY = 0.985  # weight that an observation keeps with each later one of its kind

    def __init__(self) -> None:
        places = range(_MOST_COMPARED + 1)
        self._prior = [[1.0 - wrong * 0.8 ** max(0, n - 2) for n in places] for wrong in self._WRONG]
        self._seen = [array("d", [0.0] * len(places)) for _ in self._WRONG]
        self._right = [array("d", [0.0] * len(places)) for _ in self._WRONG]

    def chance(self, kind: int, agreed: int) -> float:
        """Probability that a looked-up token is right after `agreed` tokens that agree."""
        at = min(agreed, _MOST_COMPARED)
        right = self._right[kind][at] + self._PRIOR * self._prior[kind][at]
        return right / (self._seen[kind][at] + self._PRIOR)

    @classmethod
    def kind(cls, place: int, shared: int) -> int:
        """Which count a match's token has, where the head drafted its first `shared` tokens too."""
        return cls.SHARED if place < shared else cls.NEW if place == shared else cls.BEHIND_NEW

    def observe(self, match: Match, shared: int | None, settled: Sequence[int]) -> None:
        """Learn from the tokens that a round settled, up to the match's first wrong token. Which of the match's tokens
        were in the tree does not matter.

        shared: how many of the first tokens the head drafted too; None where it did not draft.
        """
        for place, (looked_up, true) in enumerate(zip(match.tokens, settled, strict=False)):
            kinds = [self.ALL]
            if shared is not None:
                kinds.append(self.kind(place, shared))
            at = min(match.length + place, _MOST_COMPARED)
            for kind in kinds:
                self._seen[kind][at] = self._seen[kind][at] * self._DECAY + 1.0
                self._right[kind][at] = self._right[kind][at] * self._DECAY + (looked_up == true)
            if looked_up != true:
                return


def shared_tokens(tree: DraftTree, match: Match) -> int:
    """How many of the match's first tokens the head drafted too, as a path below the root."""
    row: int | None = 0
    for place, token in enumerate(match.tokens):
        assert row is not None
        row = tree.child(row, token)
        if row is None or row >= tree.head_rows:
            return place
    return len(match.tokens)


@dataclass(frozen=True)
class RoundWorth:
    """What a branch is weighed against."""

    chances: Callable[
        [DraftTree], list[float]
    ]  # of a tree that the head drafted: [N] that each row is walked
    seconds: float  # that the draft took
    rate: float  # tokens a second that rounds earned lately


def with_match(
    tree: DraftTree,
    match: Match,
    worth: RoundWorth,
    *,
    drafted: bool,
    acceptance: LookupAcceptance,
    costs: CostModel,
    nodes: int,
    stop_ids: Collection[int],
) -> DraftTree:
    """`tree` with a branch of so many of the match's tokens that the round settles most tokens a second.

    The first tokens may be in the tree already; the branch begins below them. Where a round like this one is faster
    than rounds were lately, its own speed decides, since the next ones will be like it. Otherwise its time is worth
    what they earned, as in `drafting.growth.AdaptiveGrowth`.

    drafted: whether the head drafted `tree`. nodes: the most in all. Nothing follows a token of `stop_ids`.
    """
    shared = shared_tokens(tree, match)

    def chance(place: int) -> float:
        kind = acceptance.kind(place, shared) if drafted else acceptance.ALL
        return acceptance.chance(kind, match.length + place)

    if chance(shared) < _LEAST_CHANCE:
        return tree
    chances = worth.chances(tree)
    tokens = sum(chances)
    row, reach = 0, 1.0
    for place, token in enumerate(match.tokens[:shared]):
        row = tree.children[row][token]
        reach *= chance(place)
        tokens += reach - chances[row]
    rows = len(tree)
    reaches: list[float] = []
    verify = costs.verify_by_rows(nodes + 1)
    plans = [(tokens, worth.seconds + verify[rows])]  # tokens and seconds with 0, 1, ... looked-up rows
    for place, token in enumerate(match.tokens[shared : shared + nodes - tree.num_nodes], start=shared):
        reach *= chance(place)
        if reach < _LEAST_REACH:
            break
        reaches.append(reach)
        tokens += reach
        plans.append((tokens, worth.seconds + verify[rows + len(reaches)]))
        if token in stop_ids:
            break
    rate = max(worth.rate, *(gained / spent for gained, spent in plans))
    values = [gained - rate * spent for gained, spent in plans]
    kept = values.index(max(values))
    if not kept:
        return tree
    depth, above = tree.depths[row], tree.log_probs[row]
    return replace(
        tree,
        tokens=(*tree.tokens, *match.tokens[shared : shared + kept]),
        parents=(*tree.parents, row, *range(rows, rows + kept - 1)),
        depths=(*tree.depths, *range(depth + 1, depth + 1 + kept)),
        log_probs=(*tree.log_probs, *(min(above, math.log(chance)) for chance in reaches[:kept])),
        looked_up=kept,
    )
