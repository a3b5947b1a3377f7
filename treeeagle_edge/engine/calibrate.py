"""Measures what passes cost on this machine, in less than a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.tree import DraftTree

_PREFIX = 48  # tokens before the measured passes: a short conversation
_ROWS = (1, 8, 32, 16, 4, 12, 24, 2, 48, 64)  # the first three always; the others as long as there is time
_ALWAYS = 3
_LEVELS = 4  # the cost of a level is taken from drafts of one level and of this many
_TIME, _MOST_TURNS = 0.7, 9  # seconds, after which no further turn is begun; and the most turns
_STEADY = 1.2  # the second-fastest time of a quiet machine is at most so many times the fastest


def measure_costs(passes: Passes, pool: KVPool, context: int, bounds: TreeShape) -> CostTable:
    """Time verify passes of several sizes, and drafts of one level and of several where there is a head, on a made-up
    prompt.

    Verify passes and drafts take turns, as they do in rounds: so neither finds its weights in the cache, and a busy
    moment of the machine does not hit one of them alone. The fastest time of each counts. `context`: tokens. Slots are
    taken from `pool` and given back; its cached prefixes are dropped.
    """
    vocab = passes.target.config.vocab_size
    prompt = [i % vocab for i in range(1, min(_PREFIX, context // 2) + 1)]
    device = passes.target.device
    drafts = passes.head is not None
    sequence = LiveSequence(pool, prompt, with_head=drafts, reuse=False, capacity=context + 1, device=device)
    sizes = [count for count in _ROWS if count <= bounds.nodes + 1]
    taken: dict[str, list[float]] = {}

    def measure(name: str, seconds: float) -> None:
        taken.setdefault(name, []).append(seconds)

    try:
        passes.prefill(sequence, prompt, peaks_only=True)
        started = time.perf_counter()
        for turn in range(_MOST_TURNS):
            for place, count in enumerate(sizes):
                late = time.perf_counter() - started > _TIME
                if late and (turn or place >= _ALWAYS):
                    break
                measure(f"verify {count}", _verify_seconds(passes, sequence, count))
                levels = 1 if place % 2 == 0 else _LEVELS
                if drafts:
                    measure(f"draft {levels}", _draft_seconds(passes, sequence, levels, bounds.branching))
    finally:
        sequence.close()
        pool.clear_cache()
    best = {name: min(seconds) for name, seconds in taken.items()}
    rows = sorted(count for count in sizes if f"verify {count}" in best)
    extend = step = 0.0
    if drafts:
        extend, deep = best["draft 1"], best.get(f"draft {_LEVELS}", math.inf)
        # a level is never free, whatever the clock says
        step = max((deep - extend) / (_LEVELS - 1), extend / 20)
    steady = all(_is_steady(taken[f"verify {count}"]) for count in sizes[:_ALWAYS])
    return CostTable(tuple(rows), tuple(best[f"verify {count}"] for count in rows), extend, step, steady)


def _is_steady(seconds: list[float]) -> bool:
    fastest, *others = sorted(seconds)
    return bool(others) and others[0] <= _STEADY * fastest


def _verify_seconds(passes: Passes, sequence: LiveSequence, rows: int) -> float:
    children, vocab = rows - 1, passes.target.config.vocab_size
    tree = DraftTree(
        tuple(i % vocab for i in range(rows)), (-1, *[0] * children), (0, *[1] * children), (0.0,) * rows
    )
    slots = sequence.borrow(rows)
    seconds = _timed(lambda: passes.verify(sequence, tree, slots, peaks_only=True), passes.target.device)
    sequence.commit([], [])
    return seconds


def _draft_seconds(passes: Passes, sequence: LiveSequence, levels: int, branching: int) -> float:
    sequence.announce(sequence.borrow(1))
    pending, head_tokens = sequence.pending, sequence.head_tokens
    growth = FixedGrowth(TreeShape(levels, branching, 256))
    seconds = _timed(lambda: passes.draft(sequence, 1, growth), passes.target.device)
    sequence.pending, sequence.head_tokens = pending, head_tokens
    sequence.commit([], [])
    return seconds


def _timed(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
