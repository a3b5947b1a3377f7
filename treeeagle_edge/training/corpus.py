"""The dialogues that a head learns from and is judged by, and the batches they come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.training.overlap import Excluded, Seen
from treeeagle_edge.training.processes import Place
from treeeagle_edge.training.shards import Dialogue, Shard, shard_path

HELD_OUT_EVERY = 64  # one dialogue in 64 is not trained on: the head is judged by it
LEAST_ANSWER = 4  # tokens; shorter answers teach nothing about drafting

# To pad little, a batch holds dialogues of similar length: the order is cut into stretches of this many batches, and
# each stretch is sorted by length before it is cut into batches.
_SORTED_BATCHES = 32


@dataclass(frozen=True)
class Entry:
    """Where a dialogue lies, and how long it is."""

    shard: int
    index: int
    length: int
    answers: int  # tokens in answers


@dataclass(frozen=True)
class Corpus:
    """Dialogues that passed the checks."""

    shards: tuple[Shard, ...]
    train: tuple[Entry, ...]
    held_out: tuple[Entry, ...]
    repeated: int  # dialogues left out because most of their words occurred in earlier ones
    excluded: int  # dialogues left out because they share words with an excluded text
    counts: Counter[int]  # of answer tokens in `train`

    def read(self, entry: Entry) -> Dialogue:
        """The dialogue itself."""
        return self.shards[entry.shard].dialogue(entry.index)

    @property
    def tokens(self) -> int:
        """Tokens of all training dialogues."""
        return sum(entry.length for entry in self.train)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answers in the training dialogues."""
        return sum(entry.answers for entry in self.train)


def open_corpus(folder: Path, shards: int, decode: Callable[[list[int]], str], excluded: Excluded) -> Corpus:
    """Read all dialogues in order; leave out near-duplicates and those that share words with `excluded`."""
    opened = tuple(Shard(shard_path(folder, index)) for index in range(shards))
    seen, counts = Seen(), Counter[int]()
    train: list[Entry] = []
    held_out: list[Entry] = []
    repeated = overlapping = 0
    for number, shard in enumerate(opened):
        for index in range(len(shard)):
            rows = shard.span(index)
            tokens, in_answer = shard.tokens[rows].numpy(), shard.in_answer[rows].numpy()
            entry = Entry(number, index, len(tokens), int(in_answer.sum()))
            if entry.answers < LEAST_ANSWER:
                continue
            if excluded.overlaps(decode(tokens.tolist())):
                overlapping += 1
            elif seen.is_repeated(tokens[in_answer]):
                repeated += 1
            elif index % HELD_OUT_EVERY == 0:
                held_out.append(entry)
            else:
                train.append(entry)
                counts.update(tokens[in_answer].tolist())
    return Corpus(opened, tuple(train), tuple(held_out), repeated, overlapping, counts)


def draft_vocabulary(counts: Counter[int], size: int, vocab_size: int, always: frozenset[int]) -> Tensor:
    """[size] int64, increasing: the tokens that answers use most. `always`: tokens that are in it in any case."""
    ranked = sorted(range(vocab_size), key=lambda token: (token not in always, -counts[token], token))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int64)


def batches(
    entries: Sequence[Entry], *, tokens: int, seed: int, epoch: int, place: Place
) -> Iterator[list[Entry]]:
    """This process's part of each batch of about `tokens` answer tokens. Seed and epoch decide the order.

    However many processes share the work, a batch holds the same dialogues and the batches come in the same order.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(entries))
    mean = max(1.0, sum(entry.answers for entry in entries) / len(entries))
    size = max(place.count, round(tokens / mean))
    groups: list[np.ndarray] = []
    for begin in range(0, len(order), size * _SORTED_BATCHES):
        like = sorted(order[begin : begin + size * _SORTED_BATCHES], key=lambda i: entries[i].length)
        groups += [np.array(like[at : at + size]) for at in range(0, len(like), size)]
    for group in rng.permutation(len(groups)):
        yield [entries[i] for i in groups[group][place.index :: place.count]]


@dataclass(frozen=True)
class Batch:
    """B dialogues, each padded to T tokens."""

    tokens: Tensor  # [B, T] int64
    in_answer: Tensor  # [B, T] bool, False in the padding
    best: Tensor  # [B, T] int64
    features: Tensor  # [B, T, taps * Ht] bfloat16
    hidden: Tensor  # [B, T, Ht] bfloat16


def collate(dialogues: Sequence[Dialogue]) -> Batch:
    """Stack dialogues, with zeros after the end of the shorter ones."""

    def padded(part: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [getattr(dialogue, part) for dialogue in dialogues], batch_first=True
        )

    return Batch(
        padded("tokens").long(), padded("in_answer"), padded("best").long(),
        padded("features"), padded("hidden"),
    )  # fmt: skip
