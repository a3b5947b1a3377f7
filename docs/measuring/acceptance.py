"""A model of acceptance by nodes, and what it makes of measured costs: the speed-up of trees of every size.

The head's first candidate at a node is the target's token with chance `first`; where the candidates before it are
wrong, each further one is right with chance `LATER` x `first`. A node is walked with the product of the chances along
its path, a tree is the likeliest nodes, and it settles one token more than the sum of their chances (Sequoia, arXiv
2402.12374, grows trees by such chances too). One number is left, `first`; it is chosen so that the likeliest tree of 16
nodes settles a given number of tokens a round.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

from treeeagle_edge.costs import CostModel

LATER = 0.4  # of the demo's head, 20 nodes a tree, built-in prompts: 52 % first, 23 % the next three together
BRANCHING = 4  # candidates of a node
DEEPEST = 8  # levels
REFERENCE_NODES = 16


@cache
def tree_nodes(first: float, depth: int, most: int) -> tuple[tuple[float, int], ...]:
    """(chance, depth) of the `most` likeliest nodes within `depth` levels, the likeliest first."""
    later = LATER * first
    ranks = [first, *((1 - first) * (1 - later) ** rank * later for rank in range(BRANCHING - 1))]
    frontier = [(-chance, 1) for chance in ranks]
    heapq.heapify(frontier)
    found: list[tuple[float, int]] = []
    while frontier and len(found) < most:
        negative, level = heapq.heappop(frontier)
        found.append((-negative, level))
        if level < depth:
            for chance in ranks:
                heapq.heappush(frontier, (negative * chance, level + 1))
    return tuple(found)


def tokens(first: float, nodes: int, depth: int = DEEPEST) -> float:
    """Tokens that the likeliest tree of `nodes` nodes settles a round; 1 without nodes."""
    return 1 + sum(chance for chance, _ in tree_nodes(first, depth, nodes))


def first_for(wanted: float) -> float:
    """The chance of the first candidate with which the reference tree settles `wanted` tokens (1 to 8) a round."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle, REFERENCE_NODES) < wanted else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Choice:
    """The best tree of one size, by its depth."""

    nodes: int
    depth: int  # levels drafted
    tokens: float  # a round
    speedup: float  # over plain decoding
    break_even: float  # tokens a round at which this tree would be as fast as plain decoding


def best_tree(costs: CostModel, first: float, nodes: int) -> Choice:
    """The depth limit that makes a tree of `nodes` nodes fastest, at measured costs."""
    choices = []
    for limit in range(1, DEEPEST + 1):
        chosen = tree_nodes(first, limit, nodes)
        if len(chosen) < nodes:
            continue  # so few levels do not hold as many
        depth = max(level for _, level in chosen)
        rounds = (costs.draft(depth) + costs.verify(nodes + 1)) / costs.verify(1)
        settled = 1 + sum(chance for chance, _ in chosen)
        choices.append(Choice(nodes, depth, settled, settled / rounds, rounds))
    return max(choices, key=lambda choice: choice.speedup)


def least_acceptance(costs: CostModel, budgets: tuple[int, ...]) -> float | None:
    """Tokens a round, of the reference tree, from which on some tree of `budgets` beats plain decoding; None where none
    does with less than 8.
    """
    low, high = 1.0, float(DEEPEST)
    for _ in range(24):
        middle = (low + high) / 2
        first = first_for(middle)
        pays = max(best_tree(costs, first, nodes).speedup for nodes in budgets) > 1
        low, high = (low, middle) if pays else (middle, high)
    return high if high < DEEPEST else None
