"""Measures where the time of a round goes: inside the native calls, and in Python around them.

python docs/measure_round.py [--bits 8 --bits 4] [--tokens 128] [--threads 2] [-o round.json]

The two native entry points, a target pass and a draft tree, are wrapped with a clock while prompts are answered plainly
and with the adaptive tree, in turn. Counted are the rounds after the first token, up to the last. What is outside the
native calls is split by what the engine was doing: drafting, verifying, walking and sampling, the rest. The bar:
outside is under 10 % of the time, in the median over prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from measuring.runs import (
    Report,
    add_bits,
    add_prompts,
    as_ids,
    forget_costs,
    load_each,
    parser,
    questions,
    run,
    say,
)
from measuring.timing import Spread, in_turn

from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.errors import InputError
from treeeagle_edge.kernels.native.library import library
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.rounds import Round
from treeeagle_edge.sampling_params import SamplingParams

BAR = 0.10
TARGET, HEAD = "te_forward", "te_draft_tree"


class NativeClock:
    """Seconds spent in each of the two entry points since `restart`, while the context is open."""

    def __init__(self) -> None:
        self.seconds = {TARGET: 0.0, HEAD: 0.0}
        self._own: dict[str, Any] = {}

    def __enter__(self) -> NativeClock:
        for name in self.seconds:
            self._own[name] = getattr(library(), name)
            setattr(library(), name, partial(self._timed, name, self._own[name]))
        return self

    def __exit__(self, *reason: object) -> None:
        for name, function in self._own.items():
            setattr(library(), name, function)

    def restart(self) -> None:
        """Set both back to zero."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _timed(self, name: str, function: Callable[..., int], *given: Any) -> int:
        started = time.perf_counter()
        code = function(*given)
        self.seconds[name] += time.perf_counter() - started
        return code


@dataclass(frozen=True)
class Split:
    """The seconds of one answer's rounds."""

    rounds: int
    whole: float
    target: float  # inside target passes
    head: float  # inside draft trees
    drafting: float  # around draft trees
    verifying: float  # around target passes
    sampling: float

    @property
    def outside(self) -> float:
        """Share of the time outside native calls."""
        return 1 - (self.target + self.head) / self.whole

    @property
    def rest(self) -> float:
        """Seconds of the engine's own bookkeeping between the parts it times."""
        return self.whole - self.target - self.head - self.drafting - self.verifying - self.sampling


def split_of(rounds: Sequence[Round], whole: float, native: dict[str, float]) -> Split:
    """`whole`: seconds of `rounds`; `native`: seconds inside each entry point meanwhile."""
    return Split(
        rounds=len(rounds),
        whole=whole,
        target=native[TARGET],
        head=native[HEAD],
        drafting=sum(item.draft_s for item in rounds) - native[HEAD],
        verifying=sum(item.verify_s for item in rounds) - native[TARGET],
        sampling=sum(item.sample_s for item in rounds),
    )


def answer(
    engine: Engine, ids: Sequence[int], params: SamplingParams, clock: NativeClock, speculate: bool
) -> Split:
    """One answer; the prefill is not counted."""
    stream = iter(engine.generate(ids, params, speculate=speculate, reuse_prefix=False))
    next(stream)
    rounds: list[Round] = []
    clock.restart()
    started = last = time.perf_counter()
    native = clock.seconds
    for item in stream:
        last, native = (
            time.perf_counter(),
            dict(clock.seconds),
        )  # time after the last round does not count
        rounds.append(item)
    return split_of(rounds, last - started, native)


def table(found: dict[str, list[Split]]) -> str:
    """One row for each arm: milliseconds of a round by part, and the share outside."""
    parts = ("target", "head", "drafting", "verifying", "sampling", "rest")
    header = ("arm, bits", "ms a round", "target pass", "draft tree", "around drafting", "around verifying",
              "sampling", "rest", "outside, share (quartiles)")  # fmt: skip
    rows = []
    for name, splits in found.items():
        rounds = sum(item.rounds for item in splits)
        sums = [sum(getattr(item, part) for item in splits) for part in ("whole", *parts)]
        share = Spread.of([item.outside * 100 for item in splits])
        rows.append((name, *(f"{seconds / rounds * 1e3:.2f}" for seconds in sums), share.text(1, " %")))
    return aligned_table(header, rows, left=(0,))


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    add_bits(made)
    made.add_argument("--tokens", type=int, default=128, help="of an answer")
    return made.parse_args()


def main() -> int:
    """Measure; exit code 1 where the bar is missed."""
    chosen = arguments()
    chosen.bits = chosen.bits or [8, 4]
    report = Report("round", chosen)
    forget_costs()
    runtimes = load_each(chosen, report, context=1024)
    first = runtimes[chosen.bits[0]]
    if first.kernels != "native":
        raise InputError(
            "this machine has no native kernels, so there are no native calls", "install a C++ compiler"
        )
    cases = as_ids(first, questions(chosen))
    params = SamplingParams(max_tokens=chosen.tokens)
    found: dict[str, list[Split]] = {}
    with NativeClock() as clock:
        for turn, case in enumerate(cases):
            arms = {
                f"{arm} {bits}": partial(answer, runtime.engine, case.ids, params, clock, arm == "tree")
                for bits, runtime in runtimes.items()
                for arm in ("plain", "tree")
            }
            for name, split in in_turn(arms, turn).items():
                found.setdefault(name, []).append(split)
            say(f"{turn + 1}/{len(cases)} {case.name}")
    found = dict(sorted(found.items(), key=lambda item: item[0].split()[::-1], reverse=True))
    note = f"{len(cases)} prompts, {chosen.tokens} tokens each, greedy, end tokens ignored"
    report.section("Where a round's time goes", table(found), note,
                   data={name: [vars(item) for item in splits] for name, splits in found.items()})  # fmt: skip
    for name, splits in found.items():
        share = Spread.of([item.outside for item in splits]).median
        report.verdict(f"outside native calls, {name}-bit", share * 100, BAR * 100, at_least=False, unit=" %")
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
