"""Measures what passes cost on this machine, in a second or in one plain pass, whichever is longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.engine.passes import Passes
from treeeagle_edge.kv.pool import KVPool
from treeeagle_edge.kv.sequence import LiveSequence
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.tree import DraftTree

_ROWS = (1, 8, 32, 16, 4, 12, 24, 2, 48, 64)  # the first three come twice before the others come at all
_FIRST = 3
_LEVELS = 4  # the cost of a level is taken from drafts of one level and of this many
_TIME, _MOST_TURNS = 1.0, 8  # seconds in which everything is over, and the most turns of all sizes
_STEADY = 1.2  # the second-fastest time of a quiet machine is at most so many times the fastest
_LONG = 0.1  # seconds; what took longer alone is an average over many layers and turns of the scheduler
# Of a plain pass, what each further row is assumed to add where none was measured. 32 rows take 3.2 to 4.7 plain passes
# in the larger shapes of docs/measurements.md. Too much would keep trees from being tried, and so from being learnt of.
_ROW_SHARE = 0.1


class _Times:
    """What passes of one kind took, by their size: rows, or levels."""

    def __init__(self, assumed: float) -> None:
        """`assumed`: seconds of size 1 until one was measured."""
        self._assumed = assumed
        self._taken: dict[int, list[float]] = {}
        self._calm: set[int] = set()

    @property
    def best(self) -> dict[int, float]:
        """The fastest time of each size, in the order in which sizes were first taken."""
        return {size: min(seconds) for size, seconds in self._taken.items()}

    def add(self, size: int, seconds: float, *, calm: bool) -> None:
        """`calm`: whether the measurement may be relied on without a second one."""
        self._taken.setdefault(size, []).append(seconds)
        if calm:
            self._calm.add(size)

    def at_most(self, size: int) -> float:
        """Seconds: no more than a larger size took, or else in proportion to the largest one taken."""
        best = self.best or {1: self._assumed}
        largest = max(best)
        above = [seconds for other, seconds in best.items() if other >= size]
        return min(above) if above else best[largest] * size / largest

    def is_steady(self, size: int) -> bool:
        """Whether the two fastest measurements agree, or one was calm."""
        fastest, *others = sorted(self._taken[size])
        return size in self._calm or (bool(others) and others[0] <= _STEADY * fastest)


def measure_costs(passes: Passes, pool: KVPool, context: int, bounds: TreeShape) -> CostTable:
    """Time verify passes of several sizes, and drafts of one level and of several where there is a head, behind a
    single token.

    Everything is over in a second, except that a plain pass is always taken: a further pass must fit into what is left
    of the second if it takes as long as those before it allow, see `_Times.at_most`. Where a size does not fit, the
    largest smaller one that does takes its place. What could not be measured is assumed (see `_verify_line` and
    `_draft_costs`), and rounds correct it.

    Verify passes and drafts take turns, as they do in rounds: so neither finds its weights in the cache, and a busy
    moment of the machine does not hit one of them alone. The fastest time of each counts. `context`: tokens. Slots are
    taken from `pool` and given back; its cached prefixes are dropped.
    """
    device = passes.target.device
    prompt = [1 % passes.target.config.vocab_size]
    drafts = passes.head is not None
    sequence = LiveSequence(pool, prompt, with_head=drafts, reuse=False, capacity=context + 1, device=device)
    sizes = [count for count in _ROWS if count <= bounds.nodes + 1]
    started = time.perf_counter()

    def fits(times: _Times, size: int) -> bool:
        return time.perf_counter() - started + times.at_most(size) <= _TIME

    def take(times: _Times, size: int, run: Callable[[], float]) -> None:
        began = time.thread_time()
        seconds = run()
        # a thread that ran all the time waited neither for a core nor for a disk; on a card it only waits
        ran = time.thread_time() - began if device.type == "cpu" else 0.0
        times.add(size, seconds, calm=seconds >= _LONG and ran * _STEADY >= seconds)

    try:
        verify = _Times(0.0)
        take(verify, 1, partial(_prompt_seconds, passes, sequence, prompt))
        draft = _Times(_head_share(passes) * verify.best[1])

        def take_draft(levels: int) -> None:
            if drafts and fits(draft, levels):
                take(draft, levels, partial(_draft_seconds, passes, sequence, levels, bounds.branching))

        take_draft(1)
        take_draft(_LEVELS)
        for place, wanted in enumerate([*sizes[1:_FIRST], *sizes * _MOST_TURNS]):
            rows = max((size for size in sizes if size <= wanted and fits(verify, size)), default=0)
            if not rows:
                break
            take(verify, rows, partial(_verify_seconds, passes, sequence, rows))
            take_draft(1 if place % 2 == 0 else _LEVELS)
    finally:
        sequence.close()
        pool.clear_cache()
    steady = all(verify.is_steady(size) for size in list(verify.best)[:_FIRST])
    extend, step = _draft_costs(draft) if drafts else (0.0, 0.0)
    return CostTable(*_verify_line(verify.best, max(sizes)), extend, step, steady)


def _verify_line(best: dict[int, float], most: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Rows and seconds of the table, up to `most` rows: if so many were not measured, then each row beyond the largest
    pass adds what rows added up to there on average, and `_ROW_SHARE` of a plain pass at least.
    """
    line = dict(best)
    last, plain = max(best), best[1]
    if last < most:
        average = (best[last] - plain) / (last - 1) if last > 1 else 0.0
        line[most] = best[last] + (most - last) * max(average, _ROW_SHARE * plain)
    rows = tuple(sorted(line))
    return rows, tuple(line[count] for count in rows)


def _head_share(passes: Passes) -> float:
    """What a draft of one level takes, as a share of a plain pass: both mostly read their weights once."""
    return min(passes.head.nbytes / passes.target.nbytes, 1.0) if passes.head is not None else 0.0


def _draft_costs(draft: _Times) -> tuple[float, float]:
    """Seconds of the first level and of each further one, which is assumed to take as long where none was measured."""
    extend, deep = draft.at_most(1), draft.at_most(_LEVELS)
    # a level is never free, whatever the clock says
    return extend, max((deep - extend) / (_LEVELS - 1), extend / 20)


def _prompt_seconds(passes: Passes, sequence: LiveSequence, prompt: list[int]) -> float:
    return _timed(lambda: passes.prefill(sequence, prompt, peaks_only=True), passes.target.device)


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
