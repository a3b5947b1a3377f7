"""Single passes of a target and its head after a prefix: times of passes, and scores of texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.protocols import DraftHead, TargetModel
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

MOST_ROWS = 64  # of a verify pass
_PIECE = 256  # rows a pass while scoring


def heap_tree(rows: int, vocab: int) -> DraftTree:
    """A tree of `rows` rows in which every row has two children as long as there are any: depth log2(rows)."""
    parents = tuple((row - 1) // 2 for row in range(rows))
    depths = tuple((row + 1).bit_length() - 1 for row in range(rows))
    return DraftTree(tuple(row % vocab for row in range(rows)), (-1, *parents[1:]), depths, (0.0,) * rows)


class PassTimer:
    """Times passes as the engine makes them, always after the same prefix. The engine's own caches are not used."""

    def __init__(self, target: TargetModel, head: DraftHead | None, prefix: Sequence[int]) -> None:
        """prefix: token ids whose keys and values every measured pass reads."""
        slots = len(prefix) + MOST_ROWS + 2
        self._passes = Passes(target, head, slots=slots, fixed_rows=None)
        self._vocab = target.config.vocab_size
        self._sequence = LiveSequence(
            KVPool(slots), prefix, with_head=head is not None, reuse=False, capacity=slots, device=target.device
        )  # fmt: skip
        self._passes.prefill(self._sequence, prefix, peaks_only=True)
        self._sampler = Sampler(SamplingParams(), prefix, self._vocab, target.device)

    def verify(self, rows: int, calls: int = 5) -> float:
        """Seconds of a target pass over a tree of `rows` rows, with the greedy walk through it.

        The median of `calls` calls, after one that does not count.
        """
        tree = heap_tree(rows, self._vocab)
        slots = self._sequence.borrow(rows)

        def once() -> None:
            output = self._passes.verify(self._sequence, tree, slots, peaks_only=True)
            self._sampler.walk(tree, output.logits, len(self._sequence), output.peaks)

        seconds = _seconds(once, calls)
        self._sequence.commit([], [])
        return seconds

    def draft(self, levels: int, branching: int, settled: int = 1, calls: int = 5) -> float:
        """Seconds to draft `levels` levels after `settled` new features of the target."""
        sequence = self._sequence
        kept, head_tokens = sequence.pending, sequence.head_tokens
        sequence.announce(sequence.borrow(1))
        pending = [kept[-1][-1:].repeat(settled, 1)]
        growth = FixedGrowth(TreeShape(levels, branching, 256))

        def once() -> None:
            sequence.pending, sequence.head_tokens = pending, head_tokens - settled + 1
            self._passes.draft(sequence, 1, growth)

        seconds = _seconds(once, calls)
        sequence.pending, sequence.head_tokens = kept, head_tokens
        sequence.commit([], [])
        return seconds


def _seconds(run: Callable[[], None], calls: int) -> float:
    times = []
    for _ in range(calls + 1):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def log_probs(target: TargetModel, ids: Sequence[int], start: int) -> Tensor:
    """[N - start, V] float32: row i belongs to the token after ids[start + i]."""
    config = target.config
    store = KVStore.allocate(
        config.num_layers, len(ids), config.num_kv_heads, config.head_dim, target.kv_dtype, target.device
    )
    rows, tokens = torch.arange(len(ids)), torch.tensor(list(ids))
    found = []
    for first in range(0, len(ids), _PIECE):
        at = rows[first : first + _PIECE]
        causal = torch.ones(len(at), len(at), dtype=torch.bool).tril()
        view = AttentionView(rows[:first], at, causal)
        scored = slice(min(max(start - first, 0), len(at)), len(at))
        output = target.forward(tokens[at], at, at, view, store, (), scored)
        found.append(output.logits.log_softmax(-1))  # a copy, since the next pass may overwrite the logits
    return torch.cat(found)
