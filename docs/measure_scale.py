"""Estimates what speculation is worth on larger targets, from measured costs and a model of acceptance.

python docs/measure_scale.py [--models Qwen2-0.5B,Llama-3.2-1B] [--threads 2] [--plot docs/scale.svg] [-o scale.json]

Weights are random, in the shapes of the models, at 8 and 4 bits on the native kernels; the head is as wide as the
target. Measured: a plain pass, verify passes by rows, drafts by levels, all after a prefix of --prefix tokens.
Computed: the speed-up of trees by their number of nodes, each at its best depth, if the head's tree of 16 nodes gave
2, 3 or 4 tokens a round (docs/measuring/acceptance.py models how acceptance grows with nodes); and the number of
tokens a round from which on a tree is faster. Nothing is said about the acceptance that a real head reaches on these
models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import acceptance
from measuring.passes import MOST_ROWS, PassTimer
from measuring.random_models import SHAPES, RandomCheckpoint, random_head, smaller
from measuring.runs import Report, add_bits, parser, run, say
from measuring.timing import in_turn

from treeeagle_edge.bench.plot import check_plot, save
from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.errors import UsageError
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.markdown_table import aligned_table
from treeeagle_edge.model.native_head import NativeHead
from treeeagle_edge.model.native_target import load_native_target
from treeeagle_edge.model_config import ModelConfig

ROWS = (1, 2, 4, 8, 12, 16, 24, 32)
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 31)  # nodes
LEVELS = (1, 4)  # of the measured drafts
ACCEPTED = (2, 3, 4)  # tokens a round of the tree of 16 nodes


def timer(config: ModelConfig, bits: int, chosen: argparse.Namespace, team: Team) -> PassTimer:
    """A random target and head behind a prefix."""
    context, rows = chosen.prefix + MOST_ROWS + 2, 256
    checkpoint = RandomCheckpoint(config, bits)
    target = load_native_target(checkpoint, team, bits=bits, context=context, max_rows=rows)
    draft_vocab = min(chosen.draft_vocab, config.vocab_size)
    head = NativeHead(
        random_head(config, draft_vocab), target, bits=4, slots=context + MAX_EXPANSIONS, context=context,
        max_rows=rows, max_scored=64, max_expanded=MAX_EXPANSIONS,
    )  # fmt: skip
    return PassTimer(target, head, [1 + i % (config.vocab_size - 1) for i in range(chosen.prefix)])


def measure(timers: dict[str, PassTimer], turns: int) -> dict[str, CostTable]:
    """Costs of every model and width, all passes in turn; the median over turns."""
    arms: dict[str, Callable[[], float]] = {}
    for name, passes in timers.items():
        arms |= {f"{name}, verify {rows}": partial(passes.verify, rows) for rows in ROWS}
        arms |= {
            f"{name}, draft {levels}": partial(passes.draft, levels, acceptance.BRANCHING, 3)
            for levels in LEVELS
        }
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns):
        for name, seconds in in_turn(arms, turn).items():
            found[name].append(seconds)
        say(f"passes: turn {turn + 1}/{turns}")
    tables = {}
    for name in timers:
        verify = tuple(median(found[f"{name}, verify {rows}"]) for rows in ROWS)
        short, deep = (median(found[f"{name}, draft {levels}"]) for levels in LEVELS)
        # a difference of two times may come out at zero or below
        step = max((deep - short) / (LEVELS[1] - LEVELS[0]), short / 20)
        tables[name] = CostTable(ROWS, verify, short, step)
    return tables


def cost_table(tables: dict[str, CostTable]) -> str:
    """Milliseconds of a plain pass, and everything else as multiples of it."""
    header = (
        "model, bits",
        "plain pass, ms",
        *(f"{rows} rows" for rows in ROWS[1:]),
        "first draft level",
        "each further",
    )
    rows = []
    for name, item in tables.items():
        plain = item.verify[0]
        others = (*item.verify[1:], item.extend, item.step)
        rows.append((name, f"{plain * 1e3:.1f}", *(f"{seconds / plain:.2f}" for seconds in others)))
    return aligned_table(header, rows, left=(0,))


def speedups(item: CostTable) -> dict[str, Any]:
    """The best tree of every budget for each acceptance, and the least acceptance that pays."""
    costs = CostModel(item)
    curves = {
        accepted: [acceptance.best_tree(costs, acceptance.first_for(accepted), nodes) for nodes in BUDGETS]
        for accepted in ACCEPTED
    }
    return {"curves": curves, "least": acceptance.least_acceptance(costs, BUDGETS)}


def as_plain(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The results as plain values for the JSON."""
    return {
        name: {"least": item["least"]} | {f"{accepted} tokens": [vars(choice) for choice in curve]
                                          for accepted, curve in item["curves"].items()}
        for name, item in results.items()
    }  # fmt: skip


def speed_table(results: dict[str, dict[str, Any]]) -> str:
    """One row for each model and acceptance: the speed-up by nodes, the best of them, and where trees begin to pay."""
    header = ("model, bits", "tokens a round", *(f"{nodes} nodes" for nodes in BUDGETS), "best", "its break-even",
              "trees pay from")  # fmt: skip
    rows = []
    for name, item in results.items():
        least = "more than 8" if item["least"] is None else f"{item['least']:.2f}"
        for accepted, curve in item["curves"].items():
            best = max(curve, key=lambda choice: choice.speedup)
            shown = f"{best.speedup:.2f}x: {best.nodes} nodes, depth {best.depth}"
            rows.append(
                (name, str(accepted), *(f"{choice.speedup:.2f}x" for choice in curve), shown,
                 f"{best.break_even:.2f} tokens", f"{least} tokens")
            )  # fmt: skip
    return aligned_table(header, rows, left=(0,))


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed-up by nodes, one panel for each model and width."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(3.4 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (name, item) in zip(panels, results.items(), strict=True):
        for accepted, curve in item["curves"].items():
            axes.plot(BUDGETS, [choice.speedup for choice in curve], marker="o", markersize=3,
                      label=f"{accepted} tokens a round")  # fmt: skip
        axes.axhline(1.0, color="#8c96a3", linewidth=1)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("nodes")
    panels[0].set_ylabel("speed-up over plain decoding")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), fontsize=9,
                  title="where a tree of 16 nodes would settle", title_fontsize=9)  # fmt: skip
    save(figure, path)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(SHAPES), help="of these, separated by commas")
    add_bits(made)
    made.add_argument("--prefix", type=int, default=200, help="tokens before every measured pass")
    made.add_argument("--turns", type=int, default=9, help="over all passes")
    made.add_argument("--draft-vocab", type=int, default=32_000, help="ids the head scores")
    made.add_argument("--layers", type=int, help="fewer than the model has, for a trial")
    made.add_argument("--vocab", type=int, help="fewer tokens than the model has, for a trial")
    made.add_argument("--plot", type=Path, help="a .svg or .png to draw")
    return made.parse_args()


@torch.inference_mode()
def main() -> int:
    """Measure, compute, draw."""
    chosen = arguments()
    names = chosen.models.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise UsageError(f"there are no shapes named {unknown[0]}", f"use some of {', '.join(SHAPES)}")
    if chosen.plot:
        check_plot(chosen.plot)
    torch.set_num_threads(chosen.threads)
    report = Report("scale", chosen)
    team = Team(chosen.threads)
    timers = {}
    for name in names:
        for bits in chosen.bits or (8, 4):
            say(f"making {name} at {bits} bits")
            config = smaller(SHAPES[name], chosen.layers, chosen.vocab)
            timers[f"{name}, {bits}-bit"] = timer(config, bits, chosen, team)
    tables = measure(timers, chosen.turns)
    trial = " (a trial: fewer layers or tokens than the model has)" if chosen.layers or chosen.vocab else ""
    note = (
        f"{team.isa}, {chosen.threads} threads, {chosen.prefix} tokens in the prefix; passes with logits and the "
        f"greedy walk; a head of the target's width, {chosen.draft_vocab:,} draft ids, {acceptance.BRANCHING} nodes a "
        "level"
    )
    costs = {name: vars(item) for name, item in tables.items()}
    report.section(f"Costs as multiples of a plain pass{trial}", cost_table(tables), note, data=costs)
    results = {name: speedups(item) for name, item in tables.items()}
    note = (
        "tokens a round are those of the likeliest tree of 16 nodes; the first candidate of a node is right with one "
        f"chance p everywhere, each later one with {acceptance.LATER} p where those before it are wrong"
    )
    report.section(f"Speed-up by nodes{trial}", speed_table(results), note, data=as_plain(results))
    if chosen.plot:
        draw(results, chosen.plot)
    report.close()
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
