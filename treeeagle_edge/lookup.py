"""What the text itself suggests: where its last tokens stood before, what followed then may follow now.

Summaries, code and answers about a text repeat parts of it, word for word, further than a head sees. A continuation
that is looked up (Yang et al., arXiv 2304.04487; Saxena 2023, prompt lookup decoding) is one more branch of a round's
tree: it costs no pass of the head, and the target checks it with the rest.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeeagle_edge.costs import CostModel
from treeeagle_edge.tree import DraftTree

_SHORT, _LONG = 2, 4  # tokens that must stand there again; where the longer ones do, they are taken
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1  # of a run's number
_LEAST_CHANCE = 0.3  # of a match's first new token: below, looking further takes about what it gains
_LEAST_REACH = 0.02  # a row that is less likely to be walked never pays
_MOST_COMPARED = 16  # tokens back; agreement beyond says nothing new


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier place in the text that reads like its end."""

    length: int  # tokens before it that agree, at most `_MOST_COMPARED`
    tokens: list[int]  # what followed there


class Lookup:
    """A text, and where each of its short runs of tokens stood last."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        # by run length: a number for a run -> where it ended last before the text's own end
        self._ends = {length: _last_ends(self._tokens[:-1], length) for length in (_LONG, _SHORT)}
        self._found: dict[int, int | None] = {}  # where the run at the text's end had stood before
        self._note_end()

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` follow."""
        for token in tokens:
            self._tokens.append(token)
            self._note_end()

    def match(self, most: int) -> Match | None:
        """The place that suggests what follows, with at most `most` tokens from there; None where there is none.

        The newest one that agrees in `_LONG` tokens, else the newest of `_SHORT`. A place so near that its
        continuation runs into the text's end goes on with itself: the text repeats itself in short turns.
        """
        text = self._tokens
        end = self._found[_LONG] or self._found[_SHORT]
        if end is None or most < 1:
            return None
        length, here = 0, len(text)
        while length < min(end, _MOST_COMPARED) and text[end - length - 1] == text[here - length - 1]:
            length += 1
        if length < _SHORT:
            return None  # two runs had the same number
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
    """Where each run of `length` tokens ends last, by its number: hashed into 62 bits, since containers in large
    numbers would keep the garbage collector busy.
    """
    text = np.array(tokens, dtype=np.uint64)
    count = len(text) - length + 1
    if count < 1:
        return {}
    numbers = np.zeros(count, dtype=np.uint64)
    for start in range(length):
        numbers = (numbers * np.uint64(_FACTOR) + text[start : start + count]) & np.uint64(_MASK)
    return dict(
        zip(numbers.tolist(), range(length, len(text) + 1), strict=True)
    )  # of equal ones the last stays


class LookupAcceptance:
    """How often looked-up tokens were right, by how many before them agreed, learnt online.

    Three counts: of all, of those that the head drafted too, and of those that it did not. A token further on in a
    match has the ones before it as agreement, so the same counts serve every place of a match.
    """

    ALL, SHARED, NEW = range(3)
    _WRONG = (
        0.55,
        0.25,
        0.75,
    )  # at two tokens of agreement, before anything was seen; a fifth less with each more
    _PRIOR, _DECAY = 8.0, 0.985

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

    def observe(self, match: Match, shared: int | None, settled: Sequence[int]) -> None:
        """Learn from the tokens that a round `settled`: they tell of the match up to its first wrong token, whether
        they were in the tree or not. The head drafted the first `shared` tokens too; None: it did not draft.
        """
        for place, (looked_up, true) in enumerate(zip(match.tokens, settled, strict=False)):
            kinds = [self.ALL]
            if shared is not None:
                kinds.append(self.SHARED if place < shared else self.NEW)
            at = min(match.length + place, _MOST_COMPARED)
            for kind in kinds:
                self._seen[kind][at] = self._seen[kind][at] * self._DECAY + 1.0
                self._right[kind][at] = self._right[kind][at] * self._DECAY + (looked_up == true)
            if looked_up != true:
                return


def shared_tokens(tree: DraftTree, match: Match) -> int:
    """How many tokens of the match, from its first on, the head drafted as a path below the root."""
    row: int | None = 0
    for place, token in enumerate(match.tokens):
        assert row is not None
        row = tree.child(row, token)
        if row is None or row >= tree.head_rows:
            return place
    return len(match.tokens)


@dataclass(frozen=True)
class RoundWorth:
    """What a round would settle and take without looking anything up."""

    chances: Callable[[DraftTree], list[float]]  # [N] of each row of the tree, that it is walked
    seconds: float  # of drafting
    rate: float  # tokens a second that time is worth elsewhere


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
    """`tree` with as much of the match as makes the round settle most tokens a second, `nodes` at most in all.

    Tokens that the tree has already are its own. `drafted`: whether the head has had its say. Where no round of this
    kind is as good as others are, time is worth what those earn, as in `growth.AdaptiveGrowth`; where it is better,
    the next rounds will be of its kind, and its own speed is what counts.
    """
    new = acceptance.NEW if drafted else acceptance.ALL
    shared = shared_tokens(tree, match)
    if acceptance.chance(new, match.length + shared) < _LEAST_CHANCE:
        return tree
    chances = worth.chances(tree)
    tokens = sum(chances)
    row, reach = 0, 1.0
    for place, token in enumerate(match.tokens[:shared]):
        row = tree.children[row][token]
        reach *= acceptance.chance(acceptance.SHARED, match.length + place)
        tokens += reach - chances[row]
    rows = len(tree)
    reaches: list[float] = []
    plans = [(tokens, worth.seconds + costs.verify(rows))]  # tokens and seconds with 0, 1, ... looked-up rows
    for place, token in enumerate(match.tokens[shared : shared + nodes - tree.num_nodes], start=shared):
        reach *= acceptance.chance(new, match.length + place)
        if reach < _LEAST_REACH:
            break
        reaches.append(reach)
        tokens += reach
        plans.append((tokens, worth.seconds + costs.verify(rows + len(reaches))))
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
