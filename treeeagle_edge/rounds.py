"""What the engine hands out: one `Round` a verify pass, ids only."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.errors import UsageError
from treeeagle_edge.tree import DraftTree

MAX_BRANCHING = 64
MAX_NODES = 256
_TYPICAL_NODES, _TYPICAL_DEPTH = 6, 3
MAX_DEPTH = 32
_ADAPTIVE_NODES = 32  # the most nodes of an adaptive tree: no CPU or card that was measured gains from more


@dataclass(frozen=True)
class TreeShape:
    """How a round drafts. In the reference implementation's words: total_token = nodes + 1, depth = ours - 1,
    top_k = branching.

    An adaptive shape gives upper bounds: each tree is sized within them, by what passes cost and what walks accept.
    """

    depth: int = 5  # levels of drafted tokens
    branching: int = 4  # nodes expanded a level, and children scored for each
    nodes: int = 16  # the best of all scored candidates form the tree, the root not counted
    adaptive: bool = False
    lookup: bool = True  # whether an adaptive tree also has what the text suggests (`drafting/lookup.py`)

    def __post_init__(self) -> None:
        for name, high in (("depth", MAX_DEPTH), ("branching", MAX_BRANCHING), ("nodes", MAX_NODES)):
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise UsageError(f"{name} is {value}, which is out of range", f"use 1 to {high}")

    @property
    def label(self) -> str:
        """In words, for headers and tables."""
        if self.adaptive:
            return f"chosen each round: at most {self.nodes} nodes, depth {self.depth}, branching {self.branching}"
        return f"{self.nodes} nodes, depth {self.depth}, branching {self.branching}"

    @property
    def typical(self) -> TreeShape:
        """The tree that a round usually drafts, for estimates. Adaptive trees had 3 to 8 nodes when measured."""
        if not self.adaptive:
            return self
        nodes, depth = min(_TYPICAL_NODES, self.nodes), min(_TYPICAL_DEPTH, self.depth)
        return TreeShape(depth, self.branching, nodes)


def tree_shape(depth: int, branching: int, nodes: int) -> TreeShape:
    """The shape that --depth, --branching and --nodes name: 0 nodes lets the controller choose, within the other two.

    Raises UsageError for a value out of range.
    """
    if not 0 <= nodes <= MAX_NODES:
        raise UsageError(
            f"nodes is {nodes}, which is out of range", f"use 1 to {MAX_NODES}, or 0 to have it chosen"
        )
    if nodes == 0:
        return TreeShape(depth, branching, _ADAPTIVE_NODES, adaptive=True)
    return TreeShape(depth, branching, nodes)


@dataclass(frozen=True)
class Round:
    """Tokens that one step of the engine settled. The first Round of an answer is the prefill's (kind "prefill")."""

    ids: tuple[int, ...]  # accepted tokens and the one sampled after them, cut at a stop id and at max_tokens
    kind: str  # "prefill", "tree" or "plain"
    drafted: int  # nodes in the tree, 0 for plain
    accepted: int  # nodes walked, before cutting
    tree: DraftTree | None  # what was drafted, None for prefill
    walked: tuple[int, ...]  # rows of `tree` on the walked path, the root included
    next_token: int  # the token sampled where the walk ended, before cutting
    draft_s: float  # seconds spent drafting; 0 for a round on the device, whose parts are not timed apart
    # seconds of the target's passes; for a round on the device, of the whole round
    verify_s: float
    sample_s: float  # seconds spent walking and sampling
    finish_reason: str | None = None  # "stop" or "length" on the last Round
    cached_tokens: int = 0  # prefill only: prompt tokens whose KV was reused
    draft_failures: int = 0  # 1 where the head gave non-finite scores and the round fell back to plain

    @property
    def looked_up_accepted(self) -> int:
        """Walked nodes that the text itself suggested."""
        return sum(row >= self.tree.head_rows for row in self.walked) if self.tree else 0
