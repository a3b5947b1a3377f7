"""From samples to the rows of the bench: one row a scenario, and one over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from treeeagle_edge.bench.samples import PLAIN, TREE, BenchRun, Divergence, Sample


@dataclass(frozen=True)
class Figure:
    """A mean over repetitions and its sample standard deviation, None where one repetition was made."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class BenchRow:
    """One line of the result. None stands for what was not measured (no tree arm, or no token to time)."""

    name: str
    # answer tokens of the tree arm, or of the plain one alone; all prompts and repetitions together
    tokens: int
    plain_tps: Figure | None  # tokens after the first, by seconds after the first
    tree_tps: Figure | None
    speedup: Figure | None  # the ratio of the two means; the deviation is that of the ratios by repetition
    tokens_per_round: float | None  # sum of (accepted + 1) over verify passes, before cutting, by passes
    accepted_pct: float | None  # accepted tokens in 100 levels that the trees offered
    acceptance_by_depth: tuple[float, ...]  # share of the trees whose walk got there; from depth 1
    ttft_ms: Figure | None  # of the tree arm, or of the plain one alone
    peak_bytes: int  # most memory in use during any of these answers
    pairs: int
    divergences: tuple[Divergence, ...]
    samples: tuple[Sample, ...]


def scenario_rows(run: BenchRun) -> tuple[BenchRow, ...]:
    """One row a scenario, in the order they ran."""
    names = dict.fromkeys(sample.scenario for sample in run.samples)
    return tuple(
        bench_row(
            name,
            [sample for sample in run.samples if sample.scenario == name],
            [item for item in run.divergences if item.scenario == name],
        )
        for name in names
    )


def bench_row(name: str, samples: Sequence[Sample], divergences: Sequence[Divergence]) -> BenchRow:
    """Sum up the samples of one scenario, or of all.

    A repetition's speed is pooled: its tokens after the first, by its seconds after the first; a long answer
    weighs more than a short one. Mean and deviation are over repetitions.
    """
    plain = [sample for sample in samples if sample.arm == PLAIN]
    tree = [sample for sample in samples if sample.arm == TREE]
    shown = tree or plain
    plain_tps, tree_tps = _by_repetition(plain), _by_repetition(tree)
    rounds = sum(sample.rounds for sample in tree)
    accepted = sum(sample.accepted for sample in tree)
    levels = sum(sum(sample.offered) for sample in tree)
    return BenchRow(
        name=name,
        tokens=sum(len(sample.ids) for sample in shown),
        plain_tps=_figure(plain_tps),
        tree_tps=_figure(tree_tps),
        speedup=_speedup(plain_tps, tree_tps),
        tokens_per_round=(accepted + rounds) / rounds if rounds else None,
        accepted_pct=100 * accepted / levels if levels else None,
        acceptance_by_depth=_by_depth(tree),
        ttft_ms=_figure(_ttft_by_repetition(shown)),
        peak_bytes=max((sample.peak_bytes for sample in samples), default=0),
        pairs=len(tree),
        divergences=tuple(divergences),
        samples=tuple(samples),
    )


def repetition_speeds(samples: Sequence[Sample], arm: str) -> dict[int, float]:
    """Repetition -> pooled tokens a second of one arm; a repetition without a timed token is left out."""
    return _by_repetition([sample for sample in samples if sample.arm == arm])


def _by_repetition(samples: Sequence[Sample]) -> dict[int, float]:
    speeds: dict[int, float] = {}
    for repetition in sorted({sample.repetition for sample in samples}):
        chosen = [sample for sample in samples if sample.repetition == repetition]
        seconds, tokens = sum(sample.decode_s for sample in chosen), sum(sample.decoded for sample in chosen)
        if seconds > 0 and tokens > 0:
            speeds[repetition] = tokens / seconds
    return speeds


def _ttft_by_repetition(samples: Sequence[Sample]) -> dict[int, float]:
    return {
        repetition: 1000 * fmean(sample.ttft_s for sample in samples if sample.repetition == repetition)
        for repetition in sorted({sample.repetition for sample in samples})
    }


def _figure(values: dict[int, float]) -> Figure | None:
    numbers = list(values.values())
    if not numbers:
        return None
    return Figure(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def _speedup(plain: dict[int, float], tree: dict[int, float]) -> Figure | None:
    both = [(plain[repetition], tree[repetition]) for repetition in plain if repetition in tree]
    if not both:
        return None
    ratios = [fast / slow for slow, fast in both]
    mean = fmean(fast for _, fast in both) / fmean(slow for slow, _ in both)
    return Figure(mean, stdev(ratios) if len(ratios) > 1 else None)


def _by_depth(samples: Sequence[Sample]) -> tuple[float, ...]:
    deepest = max((len(sample.offered) for sample in samples), default=0)
    reached = [0] * deepest
    for sample in samples:
        for depth, walks in enumerate(sample.reached):
            reached[depth] += walks
    # By all trees, not by those that had the level: a deep tree is drawn where much will be accepted, so the
    # latter would rise with depth. Summed up, these shares are the accepted tokens a tree.
    trees = sum(sample.offered[0] for sample in samples if sample.offered)
    return tuple(walks / trees for walks in reached)
