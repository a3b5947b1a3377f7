"""A model of how acceptance grows with nodes; with measured costs, it gives the speed-up of trees of every size.

At each node, the head's first candidate is the target's token with probability `first`. Where it and those before are
wrong, the next candidate is right with probability `LATER` x `first`. A node is accepted with the product of the
probabilities along its path. A tree consists of the likeliest nodes, and gives one token more than the sum of their
probabilities (Sequoia, arXiv 2402.12374, grows trees by such probabilities too). The only free number is `first`: it is
chosen so that the tree of the 16 likeliest nodes gives a wanted number of tokens a round.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache

from treeeagle_edge.drafting.costs import CostModel

LATER = 0.4  # from the demo's head with 20 nodes on the built-in prompts: 52 % first, 23 % the next three together
BRANCHING = 4  # candidates of a node
DEEPEST = 8  # levels
REFERENCE_NODES = 16


@cache
def tree_nodes(first: float, depth: int, most: int) -> tuple[tuple[float, int], ...]:
    """(probability, depth) of the `most` likeliest nodes within `depth` levels, the likeliest first."""
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
    """Tokens that a round gives with the likeliest tree of `nodes` nodes; 1 without nodes."""
    return 1 + sum(chance for chance, _ in tree_nodes(first, depth, nodes))


def first_for(wanted: float) -> float:
    """The `first` with which the tree of 16 nodes gives `wanted` tokens (1 to 8) a round."""
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
            continue  # so few levels cannot hold so many nodes
        depth = max(level for _, level in chosen)
        rounds = (costs.draft(depth) + costs.verify(nodes + 1)) / costs.verify(1)
        settled = 1 + sum(chance for chance, _ in chosen)
        choices.append(Choice(nodes, depth, settled, settled / rounds, rounds))
    return max(choices, key=lambda choice: choice.speedup)


def least_acceptance(costs: CostModel, budgets: tuple[int, ...]) -> float | None:
    """How many tokens a round the tree of 16 nodes must give for some tree of `budgets` to beat plain decoding.

    None where 8 are not enough.
    """
    low, high = 1.0, float(DEEPEST)
    for _ in range(24):
        middle = (low + high) / 2
        first = first_for(middle)
        pays = max(best_tree(costs, first, nodes).speedup for nodes in budgets) > 1
        low, high = (low, middle) if pays else (middle, high)
    return high if high < DEEPEST else None
