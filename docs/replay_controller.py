"""Plays recorded drafts again: what rules of sizing trees are worth, in seconds and without the clock's noise.

python docs/replay_controller.py --record drafts.npz [--bits 4] [--tokens 64] [--prompts mine.jsonl] [--check 8x4,3x3]
python docs/replay_controller.py --play drafts.npz [--verify 1:2.5,8:3.0,32:8.6 --draft 0.24,0.09] [-o replay.json]

`--record` answers every prompt plainly and keeps the tree of 60 nodes that the head drafts at each position. Then, and
with `--play`, every answer is played by plain decoding, with fixed trees, and with the program's own controller, with
lookup and without. It plays all of them `--repetitions` times, in an order that changes, and keeps what it has learnt.

What passes cost is measured when drafts are recorded, and kept in the file; `--measure` does it anew. Costs of other
hours and machines are given in milliseconds with `--verify` and `--draft`, or as a file of the program's cache. What
the controller sees of them is noisy. Fixed trees learn nothing, so they are played once, at the costs as given.

A fixed tree that is much smaller than the recorded one is the tree that the head would draft. An adaptive one may ask
for children that were not recorded, and then there are none; a line below the table says how often. `--check` has the
models answer again: with fixed trees in the engine, and for `adaptive` at the costs that are played here.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from measure_controller import ADAPTIVE, BRANCHING, FIXED, PLAIN, pooled, shape
from measuring.clock import play
from measuring.costs import MS, add_costs, costs_of, in_words
from measuring.drafts import Recording, load_recording, record_all, save
from measuring.replay import Arm
from measuring.runs import (
    Report,
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
from measuring.timing import Decoded, decode

from treeeagle_edge.drafting.costs import CostTable
from treeeagle_edge.errors import UsageError
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.runtime import Runtime

WITHOUT = "no lookup"
CONTEXT = 1024


def within(name: str, recording: Recording) -> TreeShape:
    """The fixed tree "nodes x depth". Raises UsageError where the recorded trees are smaller than it."""
    found, recorded = shape(name), recording.shape
    if found.nodes > recorded.nodes or found.depth > recorded.depth:
        raise UsageError(
            f"the tree {name} is larger than the recorded ones: {recorded.label}",
            "record with more --nodes or --depth, or name smaller trees",
        )
    return found


def new_arm(tree: TreeShape | None, table: CostTable, chosen: argparse.Namespace) -> Arm:
    """An arm that has played nothing yet."""
    return Arm(tree, table, other=chosen.other * MS, noise=chosen.noise, seed=chosen.seed)


def play_all(
    recording: Recording, table: CostTable, fixed: Sequence[str], chosen: argparse.Namespace
) -> dict[str, Arm]:
    """Every arm, played."""
    adaptive = recording.bounds
    trees = {PLAIN: None, ADAPTIVE: adaptive, WITHOUT: replace(adaptive, lookup=False)}
    arms = {name: new_arm(tree, table, chosen) for name, tree in trees.items()}
    arms |= {name: new_arm(within(name, recording), table, chosen) for name in fixed}
    for arm in arms.values():
        order = random.Random(chosen.seed)  # the same for all arms
        for _ in range(chosen.repetitions if arm.learns else 1):
            for scenario in order.sample(recording.scenarios, len(recording.scenarios)):
                mine = [answer for answer in recording.answers if answer.case.scenario == scenario]
                arm.repeat(scenario, order.sample(mine, len(mine)), recording.params)
    return arms


def results_of(recording: Recording, arms: Mapping[str, Arm]) -> dict[str, dict[str, Any]]:
    """By scenario: the speed of every arm, the share of the best that adaptive ones reach, and means of rounds."""
    found = {}
    for scenario in recording.scenarios:
        by_repetition = {name: [pooled(turn) for turn in arm.answers[scenario]] for name, arm in arms.items()}
        speeds = {name: median(each) for name, each in by_repetition.items()}
        best = max((name for name, arm in arms.items() if not arm.learns), key=lambda name: speeds[name])
        found[scenario] = {
            "speeds": speeds,
            "by_repetition": by_repetition,
            "best": best,
            "share": speeds[ADAPTIVE] / speeds[best],
            "share_without": speeds[WITHOUT] / speeds[best],
            "rounds": {name: arm.means(scenario) for name, arm in arms.items()},
        }
    return found


def means_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over scenarios."""
    rows = list(results.values())
    return {
        "speeds": {arm: geometric_mean(row["speeds"][arm] for row in rows) for arm in rows[0]["speeds"]},
        **{key: geometric_mean(row[key] for row in rows) for key in ("share", "share_without")},
    }


def table_of(results: Mapping[str, Mapping[str, Any]], means: Mapping[str, Any]) -> str:
    """One row for each scenario, then the means. Tokens, nodes and levels are those of the adaptive tree."""
    of_round = ("tokens", "nodes", "levels")
    header = ("scenario", *(f"{name} tok/s" for name in means["speeds"]), "best fixed", f"{ADAPTIVE} / best",
              f"{WITHOUT} / best", *(f"{key} a round" for key in of_round))  # fmt: skip

    def cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
        own = [f"{row['rounds'][ADAPTIVE][key]:.2f}" if "rounds" in row else "" for key in of_round]
        speeds = (f"{speed:.1f}" for speed in row["speeds"].values())
        return (
            name,
            *speeds,
            row.get("best", ""),
            f"{row['share']:.3f}",
            f"{row['share_without']:.3f}",
            *own,
        )

    rows = [cells(name, row) for name, row in results.items()]
    return aligned_table(header, [*rows, cells("geometric mean", means)], left=(0,))


def accepted(answers: Sequence[Decoded]) -> list[list[int]]:
    """Nodes walked, by answer and round."""
    return [[each.accepted for each in answer.rounds] for answer in answers]


def tokens_a_round(walks: Sequence[Sequence[int]]) -> float:
    """Of what `accepted` gives."""
    return 1 + sum(map(sum, walks)) / sum(map(len, walks))


def check(
    report: Report, runtime: Runtime, recording: Recording, table: CostTable, chosen: argparse.Namespace
) -> None:
    """The rounds of the models beside those that are played, for each tree of `--check`."""
    engine, params = runtime.engine, recording.params
    assert engine.head is not None
    rows, missed = [], 0
    for name in chosen.check.split(","):
        tree = recording.bounds if name == ADAPTIVE else within(name, recording)
        real, played = new_arm(tree, table, chosen), new_arm(tree, table, chosen)
        found = []
        for answer in recording.answers:
            ids = answer.case.ids
            if name == ADAPTIVE:
                found.append(play(engine.target, engine.head, ids, params, tree, real.clock, real.controller))
            else:
                found.append(decode(engine, ids, params, tree=tree))
        say(f"{name}: the models answered {len(found)} prompts")
        sides = accepted(found), accepted([played.answer(each, params) for each in recording.answers])
        different = sum(one != other for one, other in zip(*sides, strict=True))
        missed += different if name != ADAPTIVE else 0
        rows.append(
            (name, *(f"{tokens_a_round(side):.4f}" for side in sides), str(len(found)), str(different))
        )
    header = ("tree", "tokens a round, models", "tokens a round, played", "answers", "with other rounds")
    report.section("What is played and what the models do", aligned_table(header, rows, left=(0,)), data=rows)
    report.verdict("answers of fixed trees with other rounds", missed, 0, at_least=False)


def make(runtime: Runtime, chosen: argparse.Namespace) -> Recording:
    """Record all prompts, and write them to `--record`."""
    costs = runtime.engine.costs
    assert costs is not None
    stops = runtime.generation.stop_ids | runtime.tokenizer.stop_ids
    trees = TreeShape(chosen.depth, BRANCHING, chosen.nodes)
    empty = Recording(chosen.model, chosen.bits, chosen.tokens, stops, trees, costs)
    made = record_all(runtime.engine, as_ids(runtime, questions(chosen)), empty)
    save(chosen.record, made)
    return made


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    file = made.add_mutually_exclusive_group(required=True)
    file.add_argument("--record", type=Path, metavar="FILE.npz", help="record drafts, then play them")
    file.add_argument("--play", type=Path, metavar="FILE.npz", help="play drafts that were recorded before")
    add_prompts(made)
    made.add_argument("--bits", type=int, default=4, choices=(4, 8, 16, 32), help="of the recorded model")
    made.add_argument("--tokens", type=int, default=64, help="of a recorded answer, at most")
    made.add_argument("--nodes", type=int, default=60, help="of a recorded tree")
    made.add_argument("--depth", type=int, default=8, help="of a recorded tree, and so of an adaptive one")
    add_costs(made)
    made.add_argument("--repetitions", type=int, default=5, help="of what learns")
    made.add_argument("--seed", type=int, default=0, help="of noise and order")
    made.add_argument("--fixed", default=",".join(FIXED), help="fixed trees as nodes x depth, with commas")
    made.add_argument("--check", metavar="TREES", help="compare with the models; such as 8x4,3x3,adaptive")
    return made.parse_args()


def main() -> int:
    """Record or read, and play; exit code 1 where a check shows a difference."""
    chosen = arguments()
    report = Report("replay", chosen)
    runtime = recording = None
    if chosen.play is not None:
        recording = load_recording(chosen.play)
        chosen.model, chosen.bits = recording.model, recording.bits
    if recording is None or chosen.measure or chosen.check:
        forget_costs()
        # the bounds are named so that the tree is adaptive, and costs are measured, whatever the profile says
        runtime = load(chosen, chosen.bits, context=CONTEXT, depth=chosen.depth, branching=BRANCHING, nodes=0)
        require_head(runtime)
        report.environment(runtime)
    if recording is None:
        assert runtime is not None
        recording = make(runtime, chosen)
    table = costs_of(chosen, recording.costs if runtime is None else runtime.engine.costs)
    report.document["costs"] = asdict(table)
    if chosen.check:
        assert runtime is not None
        check(report, runtime, recording, table, chosen)
    arms = play_all(recording, table, chosen.fixed.split(",") if chosen.fixed else (), chosen)
    results = results_of(recording, arms)
    means = means_of(results)
    learning = [arm for arm in arms.values() if arm.learns]
    unknown = sum(arm.unknown for arm in learning) / max(sum(arm.asked for arm in learning), 1)
    notes = (
        f"{len(recording.answers)} recorded answers of at most {recording.tokens} tokens, {recording.bits} bits; "
        f"{chosen.repetitions} repetitions of what learns; fixed trees are nodes x depth, branching {BRANCHING}",
        f"assumed of a round: {in_words(table)}; {chosen.other:g} ms beside its passes; noise {chosen.noise:g}",
        f"of {unknown:.2%} of the nodes that adaptive trees expanded, the children were not recorded",
    )
    title = f"Replayed, {recording.bits} bits"
    report.section(title, table_of(results, means), *notes, data={"scenarios": results, "means": means})
    report.close()
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(run(main))
