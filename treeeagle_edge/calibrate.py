"""Measures what passes cost on this machine, in well under a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from treeeagle_edge.costs import CostTable
from treeeagle_edge.growth import FixedGrowth
from treeeagle_edge.kv_pool import KVPool
from treeeagle_edge.passes import Passes
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sequence import LiveSequence
from treeeagle_edge.tree import DraftTree

_PREFIX = 48  # tokens before the measured passes: a short conversation
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_REPEATS = 3  # the fastest counts: what else the machine does is not the model's cost
_LEVELS = 4  # a draft of so many levels tells what one costs


def measure_costs(passes: Passes, pool: KVPool, context: int, bounds: TreeShape) -> CostTable:
    """Time verify passes of several sizes and drafts of one and of several levels, on a made-up prompt.

    `context` in tokens. Slots are taken from `pool` and given back; its cached prefixes are dropped.
    """
    vocab = passes.target.config.vocab_size
    prompt = [i % vocab for i in range(1, min(_PREFIX, context // 2) + 1)]
    device = passes.target.device
    sequence = LiveSequence(pool, prompt, with_head=True, reuse=False, capacity=context + 1, device=device)
    try:
        passes.prefill(sequence, prompt)
        rows = [count for count in _ROWS if count <= bounds.nodes + 1]
        verify = [_verify_seconds(passes, sequence, count) for count in rows]
        extend = _draft_seconds(passes, sequence, TreeShape(1, bounds.branching, 1))
        deep = _draft_seconds(passes, sequence, TreeShape(_LEVELS, bounds.branching, 256))
    finally:
        sequence.close()
        pool.clear_cache()
    step = max((deep - extend) / (_LEVELS - 1), extend / 20)  # a level is never free, whatever the clock says
    return CostTable(tuple(rows), tuple(verify), extend, step)


def _verify_seconds(passes: Passes, sequence: LiveSequence, rows: int) -> float:
    children, vocab = rows - 1, passes.target.config.vocab_size
    tree = DraftTree(
        tuple(i % vocab for i in range(rows)), (-1, *[0] * children), (0, *[1] * children), (0.0,) * rows
    )
    slots = sequence.borrow(rows)
    seconds = _fastest(lambda: passes.verify(sequence, tree, slots), passes.target.device)
    sequence.commit([], [])
    return seconds


def _draft_seconds(passes: Passes, sequence: LiveSequence, shape: TreeShape) -> float:
    sequence.announce(sequence.borrow(1))
    pending, head_tokens = sequence.pending, sequence.head_tokens

    def draft() -> None:
        sequence.pending, sequence.head_tokens = pending, head_tokens
        passes.draft(sequence, 1, FixedGrowth(shape))

    seconds = _fastest(draft, passes.target.device)
    sequence.pending, sequence.head_tokens = pending, head_tokens
    sequence.commit([], [])
    return seconds


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
