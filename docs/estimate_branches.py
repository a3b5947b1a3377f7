"""Estimates what branches of repeated text would bring on a graphics card, from assumed costs. It measures no card.

python docs/estimate_branches.py [--level 0.17 --level 0.05] [--tokens 128] [--temperature 0] [-o branches.json]

Rounds led by the device run on the CPU, over the demo model in fp32, and choose their shapes as on a card. Only their
times are made up: reading the target once costs 1, each further tile of 16 rows `--tile`, and each level that the head
drafts `--level`. Tokens a unit of cost are compared with and without shapes that have a branch; texts are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import exp, log
from typing import Any

from measuring.runs import (
    PromptIds,
    Report,
    add_prompts,
    as_ids,
    load,
    parser,
    questions,
    require_head,
    run,
    say,
)

from treeeagle_edge.drafting.lookup import Match
from treeeagle_edge.drafting.round_shapes import RoundShape
from treeeagle_edge.drafting.shape_choice import ShapeChoice
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.rounds import Round, TreeShape, tree_shape
from treeeagle_edge.sampling_params import SamplingParams

CONTEXT = 1024
BOUNDS = tree_shape(5, 4, 0)
_TILE_ROWS = 16
WITHOUT, WITH = "without", "with branches"


def cost(shape: RoundShape, level: float, tile: float) -> float:
    """Of a round, by what plain decoding costs."""
    depth, nodes = (shape.tree.depth, shape.tree.nodes) if shape.tree is not None else (0, 0)
    rows = 1 + nodes + shape.branch
    return 1.0 + level * depth + (tile * -(-rows // _TILE_ROWS) if rows > 1 else 0.0)


def in_turns(cases: Sequence[PromptIds]) -> list[PromptIds]:
    """The first prompt of each scenario, then the second ones: what is learnt from one kind of text serves the next."""
    lists: dict[str, list[PromptIds]] = {}
    for case in cases:
        lists.setdefault(case.scenario, []).append(case)
    return [case for turn in zip_longest(*lists.values()) for case in turn if case is not None]


class AssumedCosts(ShapeChoice):
    """Chooses by what shapes are assumed to cost, and adds up what rounds would have."""

    def __init__(self, bounds: TreeShape, level: float, tile: float) -> None:
        super().__init__(bounds)
        self.spent = 0.0
        self.chosen: Counter[str] = Counter()
        self._costs = {shape: cost(shape, level, tile) for shape in self.rounds}
        for shape, each in self._costs.items():
            super().time(shape, each)

    def time(self, shape: RoundShape, seconds: float) -> None:
        """What this machine took says nothing."""

    def learn(self, shape: RoundShape, round_: Round, match: Match | None = None) -> None:
        """See `drafting.shape_choice.Choice.learn`."""
        super().learn(shape, round_, match)
        self.spent += self._costs[shape]
        parts = ("tree" if shape.tree else "", "branch" if shape.branch else "")
        self.chosen[" and ".join(part for part in parts if part) or "plain"] += 1


def measure(
    engine: Engine,
    cases: Sequence[PromptIds],
    chosen: argparse.Namespace,
    stops: frozenset[int],
    level: float,
) -> dict[str, dict[str, Any]]:
    """By scenario: tokens a unit of cost without and with branches, and what rounds there were with them."""
    arms = {
        name: AssumedCosts(replace(BOUNDS, lookup=name == WITH), level, chosen.tile)
        for name in (WITHOUT, WITH)
    }
    found: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(cases):
        params = SamplingParams(
            max_tokens=chosen.tokens, temperature=chosen.temperature, seed=number, stop_ids=stops
        )
        row = found.setdefault(
            case.scenario, {"rounds": Counter(), **{name: {"tokens": 0, "cost": 0.0} for name in arms}}
        )
        for name, choice in arms.items():
            before, seen = choice.spent, Counter(choice.chosen)
            settled = list(engine.generate(case.ids, params, choice=choice))[1:]
            row[name]["tokens"] += sum(len(one.ids) for one in settled)
            row[name]["cost"] += choice.spent - before
            if name == WITH:
                row["rounds"].update(choice.chosen - seen)
        say(f"level {level}: {number + 1}/{len(cases)}")
    for row in found.values():
        for name in arms:
            row[name]["speed"] = row[name]["tokens"] / row[name]["cost"]
        row["ratio"] = row[WITH]["speed"] / row[WITHOUT]["speed"]
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row for each scenario, then their geometric mean."""
    header = ("text", WITHOUT, WITH, "ratio", "rounds with a branch", "of them without a tree")
    rows = []
    for name, row in found.items():
        rounds = row["rounds"]
        branches = rounds["branch"] + rounds["tree and branch"]
        alone = f"{rounds['branch'] / branches:.0%}" if branches else "-"
        rows.append((name, f"{row[WITHOUT]['speed']:.2f}", f"{row[WITH]['speed']:.2f}", f"{row['ratio']:.2f}x",
                     f"{branches / rounds.total():.0%}", alone))  # fmt: skip
    mean = exp(sum(log(row["ratio"]) for row in found.values()) / len(found))
    return aligned_table(header, [*rows, ("geometric mean", "", "", f"{mean:.2f}x", "", "")], left=(0,))


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add_prompts(made)
    made.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument(
        "--level", type=float, action="append", help="cost of a level: 0.17 and 0.05 unless given"
    )
    made.add_argument("--tile", type=float, default=0.05, help="cost of 16 rows beside reading the target")
    return made.parse_args()


def main() -> int:
    """Run both arms at each cost of a level."""
    chosen = arguments()
    report = Report("branches", chosen)
    runtime = load(chosen, 32, context=CONTEXT)
    require_head(runtime)
    report.environment(runtime)
    made, fixed = runtime.engine, replace(BOUNDS, adaptive=False)  # so that none is timed
    slots = CONTEXT + BOUNDS.nodes + 2
    engine = Engine(
        made.target, made.head, context=CONTEXT, slots=slots, tree=fixed, on_device=True, graphs=False
    )
    stops = runtime.generation.stop_ids | runtime.tokenizer.stop_ids
    cases = in_turns(as_ids(runtime, questions(chosen)))
    for level in chosen.level or (0.17, 0.05):
        found = measure(engine, cases, chosen, stops, level)
        report.section(
            f"Tokens a unit of cost, a level at {level:g}",
            table(found),
            "Assumed costs, no card.",
            data=found,
        )
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
