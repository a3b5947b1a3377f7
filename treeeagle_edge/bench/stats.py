"""Sums up samples in the rows of the result: one row for each scenario, and one for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from treeeagle_edge.bench.samples import PLAIN, TREE, BenchRun, Divergence, Sample


@dataclass(frozen=True)
class Figure:
    """A mean over repetitions, and its sample standard deviation: None where there was one repetition."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class BenchRow:
    """One line of the result. None where nothing was measured: there was no tree arm, or no token to time.

    Where there was no tree arm, `tokens` and `ttft_ms` are those of the plain arm.
    """

    name: str
    tokens: int  # of the tree arm's answers, all prompts and repetitions together
    plain_tps: Figure | None  # tokens after the first of each answer, divided by the seconds after the first
    tree_tps: Figure | None
    speedup: Figure | None  # ratio of the two means, and the deviation of the repetitions' ratios
    tokens_per_round: float | None  # mean of (accepted + 1) over verify passes
    accepted_pct: float | None  # accepted tokens, as a percentage of the levels of all trees
    acceptance_by_depth: tuple[float, ...]  # from depth 1: share of the trees with a node accepted there
    ttft_ms: Figure | None  # of the tree arm
    peak_bytes: int  # most memory in use during any of these answers
    pairs: int
    divergences: tuple[Divergence, ...]
    samples: tuple[Sample, ...]


def scenario_rows(run: BenchRun) -> tuple[BenchRow, ...]:
    """One row for each scenario, in the order in which they ran."""
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

    A repetition's speed pools its answers: all their tokens after the first, divided by all the seconds after the
    first, so that a long answer weighs more than a short one. Mean and deviation are over repetitions.
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
    """Pooled tokens a second of one arm, by repetition. A repetition without a timed token is left out."""
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
    # Divided by all trees, not by those that had the level: deep trees are drafted where much will be accepted, so that
    # such shares would rise with depth. These shares sum up to the accepted tokens of a tree.
    trees = sum(sample.offered[0] for sample in samples if sample.offered)
    return tuple(walks / trees for walks in reached)
