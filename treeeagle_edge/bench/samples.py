"""What the bench measures: answers of two arms, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

PLAIN, TREE = "plain", "tree"


@dataclass(frozen=True)
class Case:
    """One prompt as token ids."""

    scenario: str
    prompt: str
    turn: int  # 1 is the first
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """One answer of one arm. Seconds count the time inside the engine only."""

    scenario: str
    prompt: str
    turn: int
    arm: str  # PLAIN or TREE
    repetition: int  # 0 is the first
    prompt_tokens: int
    ids: tuple[int, ...]  # the answer, end token included
    finish_reason: str
    ttft_s: float  # until the first token
    decode_s: float  # from the first token to the last
    rounds: int  # verify passes; the prefill is not one
    drafted: int  # nodes
    accepted: int  # drafted tokens walked, before cutting
    offered: tuple[int, ...]  # by depth, from 1: rounds whose tree had this level
    reached: tuple[int, ...]  # by depth, from 1: rounds whose walk got to this level
    draft_s: float
    verify_s: float
    sample_s: float
    draft_failures: int
    peak_bytes: int

    @property
    def decoded(self) -> int:
        """Tokens that `decode_s` paid for: all but the first, which the prefill gives."""
        return max(len(self.ids) - 1, 0)


@dataclass(frozen=True)
class Pair:
    """One prompt answered by every arm, in the order they ran."""

    case: Case
    samples: tuple[Sample, ...]

    def arm(self, name: str) -> Sample:
        """The sample of one arm. Raises KeyError for an arm that did not run."""
        return {sample.arm: sample for sample in self.samples}[name]


@dataclass(frozen=True)
class Divergence:
    """The first token at which the tree arm says something else than the plain arm."""

    scenario: str
    prompt: str
    turn: int
    repetition: int
    token: int  # index into the answer, 0 is the first
    plain_id: int | None  # None: this arm had ended
    tree_id: int | None
    margin: float | None  # |logit difference| of the two; None where something else than the logits decides


@dataclass(frozen=True)
class Limits:
    """How much is measured. With `seconds`, no repetition is begun that would not end in that time."""

    max_tokens: int
    repetitions: int
    seconds: float | None = None


@dataclass(frozen=True)
class Pace:
    """What the warm-up saw, in seconds, both arms together."""

    prefill_s: float  # a prompt token
    decode_s: float  # an answer token


@dataclass(frozen=True)
class BenchRun:
    """Everything measured; the samples in the order they were taken."""

    arms: tuple[str, ...]
    limits: Limits
    repetitions: int  # complete ones
    samples: tuple[Sample, ...]
    divergences: tuple[Divergence, ...]
    interrupted: bool = False


def first_difference(plain: tuple[int, ...], tree: tuple[int, ...]) -> int | None:
    """Index of the first token that differs, or at which one answer has ended; None for equal answers."""
    for index, (a, b) in enumerate(zip_longest(plain, tree)):
        if a != b:
            return index
    return None
