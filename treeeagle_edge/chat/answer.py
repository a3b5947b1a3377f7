"""One finished answer: its text, its ids, why it ended, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from treeeagle_edge.rounds import Round

ENOUGH_ROUNDS = 16  # before this many rounds, tokens per round says little
ENOUGH_PLAIN_ROUNDS = 4  # before this many plain steps, their time says little


@dataclass(frozen=True)
class Speculation:
    """What drafting did over some rounds. The prefill is not counted: it verifies nothing."""

    enabled: bool = False
    rounds: int = 0  # verify passes, plain steps included
    settled: int = 0  # sum of (accepted + 1) over the rounds, before cutting
    drafted: int = 0  # nodes
    accepted: int = 0  # nodes walked
    looked_up: int = 0  # of the drafted nodes, those that the text itself suggested
    looked_up_accepted: int = 0  # and of those, the ones that were walked
    draft_failures: int = 0  # rounds that fell back to a plain step because the head's scores were not finite
    tree_rounds: int = 0
    draft_s: float = 0.0  # over the rounds with a tree
    verify_s: float = 0.0  # over the rounds with a tree
    sample_s: float = 0.0  # over the rounds with a tree
    levels: int = 0  # sum over the trees of their deepest level
    plain_rounds: int = 0
    plain_s: float = 0.0  # whole time of the plain rounds

    @classmethod
    def of(cls, rounds: Iterable[Round], *, enabled: bool) -> Speculation:
        """Add up `rounds`, leaving out the prefill."""
        steps = [step for step in rounds if step.kind != "prefill"]
        trees = [step for step in steps if step.kind == "tree"]
        plain = [step for step in steps if step.kind == "plain"]
        return cls(
            enabled=enabled,
            rounds=len(steps),
            settled=sum(step.accepted + 1 for step in steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(step.accepted for step in steps),
            looked_up=sum(step.tree.looked_up for step in trees if step.tree is not None),
            looked_up_accepted=sum(step.looked_up_accepted for step in trees),
            draft_failures=sum(step.draft_failures for step in steps),
            tree_rounds=len(trees),
            draft_s=sum(step.draft_s for step in trees),
            verify_s=sum(step.verify_s for step in trees),
            sample_s=sum(step.sample_s for step in trees),
            levels=sum(max(step.tree.depths) for step in trees if step.tree is not None),
            plain_rounds=len(plain),
            plain_s=sum(step.draft_s + step.verify_s + step.sample_s for step in plain),
        )

    def __add__(self, other: Speculation) -> Speculation:
        """Totals of two stretches."""
        names = [item.name for item in fields(self) if item.name != "enabled"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Speculation(enabled=self.enabled or other.enabled, **sums)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a verify pass settled on average; 0 where there was none."""
        return self.settled / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_tree(self) -> float:
        """Tokens that a round with a tree settled on average; 0 without trees. A plain step settles one."""
        return (self.settled - self.plain_rounds) / self.tree_rounds if self.tree_rounds else 0.0

    @property
    def nodes_per_tree(self) -> float:
        """Average number of nodes of a tree; 0 without trees. Where trees are adaptive, what the controller chose."""
        return self.drafted / self.tree_rounds if self.tree_rounds else 0.0

    @property
    def levels_per_tree(self) -> float:
        """Average depth of a tree; 0 without trees."""
        return self.levels / self.tree_rounds if self.tree_rounds else 0.0

    @property
    def both_seen(self) -> bool:
        """True where both rounds with a tree and plain steps were seen often enough to compare them."""
        return self.tree_rounds >= ENOUGH_ROUNDS and self.plain_rounds >= ENOUGH_PLAIN_ROUNDS

    @property
    def measured(self) -> bool:
        """True where enough plain steps were seen, and their times are plausible.

        Steps that took longer than the same work for a whole tree are not: something else slowed them down.
        """
        return self.both_seen and self.plain_s / self.plain_rounds <= self._most_plain_s

    @property
    def gain(self) -> float | None:
        """Speed with trees by speed of plain decoding: from times where those are `measured`, else an upper bound.

        The bound never exceeds the tokens that a round with a tree settled. None before there are enough such rounds.
        """
        spent = self.draft_s + self.verify_s + self.sample_s
        if self.tree_rounds < ENOUGH_ROUNDS or spent <= 0:
            return None
        plain = self.plain_s / self.plain_rounds if self.measured else self._most_plain_s
        return self.tokens_per_tree * self.tree_rounds * plain / spent

    @property
    def _most_plain_s(self) -> float:
        """Seconds of a plain step at most: one row costs no more to verify and to sample than a tree's rows."""
        return (self.verify_s + self.sample_s) / self.tree_rounds


@dataclass(frozen=True)
class Answer:
    """What came back for one message."""

    text: str
    token_ids: tuple[int, ...]  # the end token included
    finish_reason: str  # "stop", "length" or "interrupt"
    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose keys and values were reused
    ttft_s: float  # seconds from the question to the first token
    decode_s: float  # seconds from the first token to the last
    seed: int
    speculation: Speculation

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer, the end token included."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """(completion_tokens - 1) / decode_s, the clock starting at the first token; 0 for a single token."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 and self.token_ids else 0.0


def answer_json(answer: Answer, *, model: str, head: str | None, device: str, bits: int) -> dict[str, Any]:
    """The one object that `--json` prints; its keys are a promise to scripts."""
    speculation = answer.speculation
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens},
        "timings": {
            "ttft_s": answer.ttft_s,
            "decode_s": answer.decode_s,
            "tokens_per_second": answer.tokens_per_second,
        },
        "speculation": {
            "enabled": speculation.enabled,
            "rounds": speculation.rounds,
            "tokens_per_round": speculation.tokens_per_round,
            "drafted": speculation.drafted,
            "accepted": speculation.accepted,
            "looked_up": speculation.looked_up,
            "looked_up_accepted": speculation.looked_up_accepted,
            "tree_rounds": speculation.tree_rounds,
            "plain_rounds": speculation.plain_rounds,
            "nodes_per_tree": speculation.nodes_per_tree,
            "levels_per_tree": speculation.levels_per_tree,
        },
        "model": model,
        "head": head,
        "device": device,
        "bits": bits,
        "seed": answer.seed,
    }
