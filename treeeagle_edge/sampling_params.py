"""How the next token is chosen and when an answer ends: validated once, then passed along unchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from treeeagle_edge.errors import UsageError

# The likeliest token wins at any temperature below this one, whatever the noise; scores over it may be infinite.
LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SamplingParams:
    """Processing order: bias and bans, penalties, temperature, top-k, top-p, min-p.

    Raises UsageError with the allowed range for a value outside it.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # over prompt and answer, as in transformers
    presence_penalty: float = 0.0  # over the answer, as OpenAI defines it
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_ids: frozenset[int] = frozenset()
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    max_tokens: int | None = None  # None: up to the context

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 10.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.1, 10.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                raise UsageError(
                    f"{name.replace('_', '-')} is {value}, which is out of range", f"use {low:g} to {high:g}"
                )
        if self.top_p == 0.0:
            raise UsageError("top-p is 0, which leaves no token", "use a value above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:  # native code takes no more, and no vocabulary has so many tokens
            raise UsageError(
                f"top-k is {self.top_k}, which is out of range", "use 0 (off) or a positive number below 2^31"
            )
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise UsageError("a logit bias is not finite", "use a number; banned_ids rules a token out")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max-tokens is {self.max_tokens}, which is out of range", "use 1 or more")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}, which is out of range", "use 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """True where the most likely token is always taken."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def uses_history(self) -> bool:
        """True where the distribution depends on which tokens came before (a penalty is on)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
