"""What a bench measures: the answers of both arms, and where they differ."""

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
    drafted: int  # nodes of all trees
    accepted: int  # drafted tokens that were accepted, also those that the end of the answer cut off
    offered: tuple[int, ...]  # by depth, from 1: rounds whose tree had a node of this depth
    reached: tuple[int, ...]  # by depth, from 1: rounds that accepted a node of this depth
    draft_s: float
    verify_s: float
    sample_s: float
    draft_failures: int
    peak_bytes: int

    @property
    def decoded(self) -> int:
        """Tokens that came in `decode_s`: all but the first, which the prefill gives."""
        return max(len(self.ids) - 1, 0)


@dataclass(frozen=True)
class Pair:
    """The answers of every arm to one prompt, in the order in which they ran."""

    case: Case
    samples: tuple[Sample, ...]

    def arm(self, name: str) -> Sample:
        """The sample of one arm. Raises KeyError for an arm that did not run."""
        return {sample.arm: sample for sample in self.samples}[name]


@dataclass(frozen=True)
class Divergence:
    """The first token in which the two arms' answers differ."""

    scenario: str
    prompt: str
    turn: int
    repetition: int
    token: int  # index into the answer, 0 is the first
    plain_id: int | None  # None: this arm's answer had ended
    tree_id: int | None
    margin: float | None  # |logit difference| of the two tokens; None where not only logits decide


@dataclass(frozen=True)
class Limits:
    """How much is measured. With `seconds`, no repetition begins that would probably end later than that."""

    max_tokens: int
    repetitions: int
    seconds: float | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds that a token took in the warm-up, both arms together."""

    prefill_s: float  # for each token of a prompt
    decode_s: float  # for each token of an answer


@dataclass(frozen=True)
class BenchRun:
    """Everything that was measured, with the samples in the order in which they ran."""

    arms: tuple[str, ...]
    limits: Limits
    repetitions: int  # how many are complete
    samples: tuple[Sample, ...]
    divergences: tuple[Divergence, ...]
    interrupted: bool = False


def first_difference(plain: tuple[int, ...], tree: tuple[int, ...]) -> int | None:
    """Index of the first token that differs, or where one answer has ended and the other goes on; None if equal."""
    for index, (a, b) in enumerate(zip_longest(plain, tree)):
        if a != b:
            return index
    return None
