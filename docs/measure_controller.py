"""Measures whether the controller chooses well: its trees against plain decoding and fixed trees, in each scenario.

python docs/measure_controller.py [--bits 8 --bits 4] [--repetitions 5] [--tokens 160] [-o controller.json]

Plain decoding, the adaptive tree and a handful of fixed trees answer every prompt in turn, in an order that changes
each time. The speed of an arm in a scenario is the median over repetitions of (tokens after the first) / (seconds
after the first), pooled over the scenario's prompts. The goal: the adaptive tree reaches at least 0.95 of the speed
of the best other arm. The controller keeps what it has learnt, as it does in a chat. Fixed trees are the head's alone;
the adaptive one also has what the text repeats. Short answers tell little: with 64 tokens luck moves an arm by 5 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from measuring.runs import (
    PromptIds,
    Report,
    add_bits,
    add_prompts,
    as_ids,
    forget_costs,
    load,
    parser,
    questions,
    require_head,
    run,
    say,
)
from measuring.timing import Decoded, decode, in_turn

from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.runtime import Runtime
from treeeagle_edge.sampling_params import SamplingParams

PLAIN, ADAPTIVE = "plain", "adaptive"
FIXED = ("1x1", "2x2", "3x3", "4x3", "6x4", "8x4", "12x5", "16x5")  # nodes x depth
BAR = 0.95
BRANCHING = 4


def shape(name: str) -> TreeShape:
    """ "8x4": 8 nodes, at most 4 levels. Raises UsageError out of range, ValueError for another form."""
    nodes, depth = (int(part) for part in name.split("x"))
    return TreeShape(depth=depth, branching=BRANCHING, nodes=nodes)


def pooled(answers: Sequence[Decoded]) -> float:
    """Tokens after the first a second, over several answers."""
    return sum(len(item.ids) - 1 for item in answers) / sum(item.decode_s for item in answers)


def best_other(speeds: Mapping[str, float]) -> str:
    """The fastest arm that is not the adaptive one."""
    return max((name for name in speeds if name != ADAPTIVE), key=lambda name: speeds[name])


def measure(
    runtime: Runtime, cases: Sequence[PromptIds], fixed: Sequence[str], chosen: argparse.Namespace
) -> dict[str, Any]:
    """One scenario: the speed of every arm in every repetition, and what the adaptive tree drafted."""
    engine = runtime.engine
    stops = runtime.generation.stop_ids | runtime.tokenizer.stop_ids
    params = SamplingParams(max_tokens=chosen.tokens, stop_ids=stops)
    by_repetition: dict[str, list[float]] = {name: [] for name in (PLAIN, ADAPTIVE, *fixed)}
    drafted: list[Decoded] = []
    for repetition in range(chosen.repetitions):
        answers: dict[str, list[Decoded]] = {name: [] for name in by_repetition}
        for number, case in enumerate(cases):
            arms = {
                PLAIN: partial(decode, engine, case.ids, params, speculate=False),
                ADAPTIVE: partial(decode, engine, case.ids, params),
                **{name: partial(decode, engine, case.ids, params, tree=shape(name)) for name in fixed},
            }
            for name, answer in in_turn(arms, repetition * len(cases) + number).items():
                answers[name].append(answer)
        say(f"{cases[0].scenario}: repetition {repetition + 1}/{chosen.repetitions}")
        drafted += answers[ADAPTIVE]
        for name, found in answers.items():
            by_repetition[name].append(pooled(found))
    speeds = {name: median(found) for name, found in by_repetition.items()}
    rounds = [item for answer in drafted for item in answer.rounds]
    return {
        "speeds": speeds,
        "by_repetition": by_repetition,
        "best": best_other(speeds),
        "share": speeds[ADAPTIVE] / speeds[best_other(speeds)],
        "nodes": sum(item.drafted for item in rounds) / len(rounds),
        "plain_rounds": sum(item.kind == "plain" for item in rounds) / len(rounds),
    }


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One row for each scenario: tokens a second of every arm, and the adaptive one's share of the best."""
    arms = list(next(iter(results.values()))["speeds"])
    header = (
        "scenario",
        *(f"{name} tok/s" for name in arms),
        "best other",
        "adaptive / best",
        "nodes a round",
    )
    rows = [
        (name, *(f"{item['speeds'][arm]:.1f}" for arm in arms), item["best"], f"{item['share']:.3f}",
         f"{item['nodes']:.1f}")
        for name, item in results.items()
    ]  # fmt: skip
    return aligned_table(header, rows, left=(0,))


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    add_bits(made)
    made.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--fixed", default=",".join(FIXED), help="fixed trees as nodes x depth, with commas")
    return made.parse_args()


def main() -> int:
    """Measure; exit code 1 where a scenario misses the bar."""
    chosen = arguments()
    report = Report("controller", chosen)
    forget_costs()
    fixed = chosen.fixed.split(",")
    for bits in chosen.bits or (8, 4):
        runtime = load(chosen, bits, context=1024)
        require_head(runtime)
        report.environment(runtime)
        cases = as_ids(runtime, questions(chosen))
        results = {}
        for scenario in dict.fromkeys(case.scenario for case in cases):
            mine = [case for case in cases if case.scenario == scenario]
            results[scenario] = measure(runtime, mine, fixed, chosen)
        note = (
            f"{chosen.repetitions} repetitions, answers of at most {chosen.tokens} tokens, greedy; fixed trees are "
            f"nodes x depth, branching {BRANCHING}"
        )
        report.section(f"Controller, {bits} bits", table(results), note, data=results)
        for scenario, item in results.items():
            report.verdict(f"{bits}-bit, {scenario}: adaptive / {item['best']}", item["share"], BAR)
        print()
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
