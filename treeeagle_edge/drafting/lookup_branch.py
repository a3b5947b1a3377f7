"""What the text suggests, as a branch of a round's tree: no pass of the head; the target checks it with the rest."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv

from treeeagle_edge.drafting.costs import CostModel
from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.drafting.lookup_acceptance import LookupAcceptance, Opinion, opinion
from treeeagle_edge.tree import DraftTree

_LEAST_CHANCE = (
    0.15  # of a match's first new token: below it, the time in Python is about what a branch gains
)
_LEAST_REACH = 0.02  # chance of a row to be walked, below which it never pays
_LEAST_WRONG = 1e-3  # chance that the head is wrong about a token, at least


@dataclass(frozen=True, slots=True)
class Drafted:
    """A round's tree before what the text suggests, and what that is weighed against."""

    tree: DraftTree
    chances: list[float] | None  # [N] that each row is walked; None where the head did not draft
    seconds: float  # that the draft took
    rate: float  # tokens a second that rounds earned lately


def with_match(
    drafted: Drafted,
    match: Match,
    *,
    acceptance: LookupAcceptance,
    costs: CostModel,
    nodes: int,
    stop_ids: Collection[int],
) -> DraftTree:
    """The tree with a branch of the match's tokens, of so many rows that the round settles most tokens a second.

    The first tokens may be in the tree already; the branch begins below them. A match that is likely to be right makes
    what the head drafted beside it unlikely, so rows of the head's may have to go. Where a round like this one is
    faster than rounds were lately, its own speed decides, since the next ones will be like it. Otherwise its time is
    worth what they earned, as in `drafting.growth.AdaptiveGrowth`.

    nodes: the most in all. Nothing follows a token of `stop_ids`.
    """
    tree, chances = drafted.tree, drafted.chances or [1.0]
    heads = opinion(tree, match, chances) if drafted.chances is not None else None
    path = heads.rows if heads is not None else []
    shared = len(path)
    if shared == len(match.tokens) or acceptance.chance(match, shared, heads) < _LEAST_CHANCE:
        return tree
    sure, reaches = _follow(match, heads, acceptance, stop_ids)
    whole = _with_branch(tree, path, match.tokens[shared : len(reaches)], reaches[shared:])
    chances = _weighed(tree, chances, path, sure) + reaches[shared:]
    # a row comes after its parent, which has no less of a chance
    best = sorted(range(1, len(whole)), key=chances.__getitem__, reverse=True)[:nodes]
    tokens = list(accumulate((chances[row] for row in best), initial=1.0))
    verify = costs.verify_by_rows(nodes + 1)
    seconds = [drafted.seconds + verify[rows] for rows in range(1, len(tokens) + 1)]
    rate = max(drafted.rate, *map(truediv, tokens, seconds))
    values = [gained - rate * spent for gained, spent in zip(tokens, seconds, strict=True)]
    return whole.part(sorted(best[: values.index(max(values))]))


def _follow(
    match: Match, heads: Opinion | None, acceptance: LookupAcceptance, stop_ids: Collection[int]
) -> tuple[list[float], list[float]]:
    """The chances of a match's tokens to be right once those before them were, and to be walked.

    They go up to an end token, or to the last one that may pay.
    """
    sure, reaches, reach = list[float](), list[float](), 1.0
    shared = len(heads.rows) if heads is not None else 0
    for place, token in enumerate(match.tokens):
        chance = acceptance.chance(match, place, heads)
        reach *= chance
        if reach < _LEAST_REACH and place >= shared:
            break
        sure.append(chance)
        reaches.append(reach)
        if token in stop_ids:
            break
    return sure, reaches


def _weighed(
    tree: DraftTree, chances: Sequence[float], path: Sequence[int], sure: Sequence[float]
) -> list[float]:
    """[N] that each row of the head's is walked, by the head and by the match: what one gains, the others lose.

    path: rows that the match agrees with. sure: of each of them and of the match's next token, to be right.
    """
    own = dict(zip(path, sure, strict=False))
    # what is left to the other children of a row, as a share of what the head gave them
    others = {}
    for parent, child, chance in zip((0, *path), path, sure, strict=False):
        others[parent] = (1.0 - chance) / max(1.0 - chances[child] / chances[parent], _LEAST_WRONG)
    if len(sure) > len(path):
        others[path[-1] if path else 0] = 1.0 - sure[len(path)]
    found = [1.0]
    for row in range(1, len(tree)):
        parent = tree.parents[row]
        step = own.get(row)
        if step is None:
            step = min(chances[row] / chances[parent] * others.get(parent, 1.0), 1.0)
        found.append(found[parent] * step)
    return found


def _with_branch(
    tree: DraftTree, path: Sequence[int], tokens: Sequence[int], reaches: Sequence[float]
) -> DraftTree:
    """`tree` with `tokens` below the last row of `path`, or below the root."""
    if not tokens:
        return tree
    above, rows, count = path[-1] if path else 0, len(tree), len(tokens)
    depth, most = tree.depths[above], tree.log_probs[above]
    return DraftTree(
        (*tree.tokens, *tokens),
        (*tree.parents, above, *range(rows, rows + count - 1)),
        (*tree.depths, *range(depth + 1, depth + 1 + count)),
        (*tree.log_probs, *(min(most, math.log(reach)) for reach in reaches)),
        looked_up=count,
    )
