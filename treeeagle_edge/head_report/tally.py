"""Counts what the target accepted of a head's trees, and computes figures from the counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from treeeagle_edge.rounds import Round
from treeeagle_edge.tree import DraftTree

BINS = 10  # of equal width, from probability 0 to 1


@dataclass(frozen=True)
class Bin:
    """Judged nodes of one range of predicted probability.

    A node is judged where its parent was accepted: only then did the target accept or refuse it. The root counts as
    accepted.
    """

    nodes: int = 0
    predicted: float = 0.0  # sum of the probabilities that the head gave the nodes, each given its parent
    accepted: int = 0  # how many of the nodes were accepted


@dataclass(frozen=True)
class Tally:
    """Counts over the verify passes of one or more answers with trees of one shape. Tallies can be added up."""

    tokens: int  # in the answers, the one of the prefill included
    rounds: int  # verify passes; the prefill is not one
    drafted_rounds: int  # rounds with a tree: the last round of an answer may have no room for one
    accepted: int  # nodes accepted, also those that the end of an answer cut off
    first_choices: int  # rounds in which the target took the token that the head thought likeliest
    reached: tuple[int, ...]  # [depth] rounds that accepted a node at depth 1, 2, ...
    bins: tuple[Bin, ...]  # [BINS]
    failures: int  # rounds that decoded plainly because the head gave non-finite scores

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of (accepted + 1) over rounds. None without a round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def first_token_acceptance(self) -> float | None:
        """Share of the rounds with a tree in which the head's likeliest token was the target's. None without one.

        Depth 1 of `acceptance_by_depth` counts second choices too, as many as the tree has room for.
        """
        return self.first_choices / self.drafted_rounds if self.drafted_rounds else None

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """[depth] share of the rounds that accepted a node at depth 1, 2, ...; empty without a round.

        The shares sum up to `tokens_per_round` less one.
        """
        return tuple(walks / self.rounds for walks in self.reached) if self.rounds else ()

    @property
    def judged(self) -> int:
        """How many nodes the target judged."""
        return sum(item.nodes for item in self.bins)

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error (Guo et al., arXiv 1706.04599), 0 to 1. None without a judged node.

        In each bin, how far the share accepted lies from the mean prediction; then the mean over all judged nodes.
        """
        if not self.judged:
            return None
        return sum(abs(item.accepted - item.predicted) for item in self.bins) / self.judged


def tally(rounds: Sequence[Round], depth: int) -> Tally:
    """Count one answer. rounds: all that `Engine.generate` gave, prefill first. depth: the deepest a tree may be."""
    passes = [item for item in rounds if item.kind != "prefill"]
    drafts = [(item.tree, item.walked) for item in passes if item.tree is not None and item.drafted]
    return Tally(
        tokens=sum(len(item.ids) for item in rounds),
        rounds=len(passes),
        drafted_rounds=len(drafts),
        accepted=sum(item.accepted for item in passes),
        first_choices=sum(_took_first_choice(tree, walked) for tree, walked in drafts),
        reached=tuple(sum(item.accepted >= level for item in passes) for level in range(1, depth + 1)),
        bins=_bins(drafts),
        failures=sum(item.draft_failures for item in passes),
    )


def total(tallies: Sequence[Tally]) -> Tally:
    """The sum of tallies of one depth, at least one."""
    return Tally(
        tokens=sum(item.tokens for item in tallies),
        rounds=sum(item.rounds for item in tallies),
        drafted_rounds=sum(item.drafted_rounds for item in tallies),
        accepted=sum(item.accepted for item in tallies),
        first_choices=sum(item.first_choices for item in tallies),
        reached=tuple(map(sum, zip(*(item.reached for item in tallies), strict=True))),
        bins=tuple(_sum_of(column) for column in zip(*(item.bins for item in tallies), strict=True)),
        failures=sum(item.failures for item in tallies),
    )


def _sum_of(bins: Sequence[Bin]) -> Bin:
    return Bin(
        sum(item.nodes for item in bins),
        sum(item.predicted for item in bins),
        sum(item.accepted for item in bins),
    )


def _took_first_choice(tree: DraftTree, walked: Sequence[int]) -> bool:
    likeliest = max(tree.children[0].values(), key=lambda row: tree.log_probs[row])
    return likeliest in walked


def _bins(drafts: Sequence[tuple[DraftTree, tuple[int, ...]]]) -> tuple[Bin, ...]:
    found: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for tree, walked in drafts:
        path = set(walked)
        for row, parent in enumerate(tree.parents):
            if parent in path:
                probability = math.exp(tree.log_probs[row] - tree.log_probs[parent])
                # rounding may give a certain node a little more than 1: it belongs to the last bin
                found[min(int(probability * BINS), BINS - 1)].append((probability, row in path))
    return tuple(
        Bin(len(nodes), math.fsum(probability for probability, _ in nodes), sum(took for _, took in nodes))
        for nodes in found
    )


def bin_edges() -> tuple[tuple[float, float], ...]:
    """[BINS] lower edge, which belongs to the bin, and upper edge, which does not except in the last bin."""
    return tuple(pairwise(edge / BINS for edge in range(BINS + 1)))
