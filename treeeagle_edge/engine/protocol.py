"""The seam between text and tokens: what chat, benchmark and head evaluation ask of the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from treeeagle_edge.rounds import Round, TreeShape
from treeeagle_edge.sampling_params import SamplingParams

# Told how far a prompt is read: tokens so far, tokens to read. Before the first pass over it, and after each.
Reading = Callable[[int, int], None]


def unwatched(_read: int, _to_read: int) -> None:
    """The reading of a prompt that nobody watches."""


class TokenEngine(Protocol):
    """Token ids go in, rounds come out. `engine.loop.Engine` is the one implementation; tests have scripted ones."""

    @property
    def context(self) -> int:
        """Longest prompt and answer together, in tokens."""

    @property
    def has_head(self) -> bool:
        """Whether it can draft trees."""

    @property
    def speculates(self) -> bool:
        """Whether rounds may have trees: from a head, or of what the text repeats."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        speculate: bool = True,
        reuse_prefix: bool = True,
        tree: TreeShape | None = None,
        reading: Reading = unwatched,
    ) -> Generator[Round]:
        """The prefill's Round, then one for each verify pass, until the answer ends.

        `tree` replaces the engine's own shape. `reading` counts no tokens that the cache holds. Closing the generator
        at any time keeps the caches consistent.
        """

    def tie_margin(self, ids: Sequence[int], a: int, b: int) -> float:
        """|logit(a) - logit(b)| for the token after `ids`, by a plain pass. Small: rounding may decide."""
