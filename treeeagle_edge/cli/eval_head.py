"""`treeeagle eval-head`: how much of what a head drafts its target takes, and what its probabilities are worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeeagle_edge.cli import options as shared
from treeeagle_edge.cli.console import EXIT_INTERRUPT, EXIT_OK, note, progress_line, say
from treeeagle_edge.cli.option_groups import with_groups
from treeeagle_edge.errors import UsageError
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams

if TYPE_CHECKING:
    from treeeagle_edge.head_report.evaluate import EvalOptions

FORMATS = ("md", "json")

BudgetsOption = Annotated[
    str, typer.Option("--budgets", metavar="N,N,...", help="Nodes of the trees to compare, root not counted.")
]
DepthOption = Annotated[int, typer.Option("--depth", metavar="N", help="Levels of drafted tokens.")]
BranchingOption = Annotated[
    int,
    typer.Option("--branching", metavar="N", help="Nodes expanded a level, and children scored for each."),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest answer.")]
PromptsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help="Questions in the MT-bench format, the first turn of each. May be repeated.",
    ),
]
BuiltinOption = Annotated[
    bool,
    typer.Option("--builtin", help="The built-in prompts beside those of --prompts; alone, they are taken."),
]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", help="Only the first N of each file and built-in scenario."),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", metavar="T", help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same text.")]
OutputOption = Annotated[str, typer.Option("--output", "-o", metavar="md|json", help="Format on stdout.")]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png|svg", help="Draw reliability, and acceptance by depth."),
]


@with_groups
def eval_head_command(
    *,
    machine: shared.MachineOptions,
    budgets: BudgetsOption = "4,8,16,32",
    depth: DepthOption = 5,
    branching: BranchingOption = 4,
    prompts: PromptsOption = None,
    builtin: BuiltinOption = False,
    limit: LimitOption = None,
    max_tokens: MaxTokensOption = 200,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    output: OutputOption = "md",
    plot: PlotOption = None,
) -> None:
    """Measure how good a draft head is for its target: acceptance, tokens per round, and calibration."""
    if (machine.head or "").lower() == "none":
        raise UsageError("--head none leaves nothing to evaluate", "name a head, or leave --head out")
    if max_tokens == 1:
        raise UsageError("--max-tokens is 1, which leaves nothing to draft", "use 2 or more")
    if limit is not None:
        shared.check_range("--limit", limit, 1)
    if output not in FORMATS:
        raise UsageError(f"--output {output!r} is not a format of eval-head", f"use {' or '.join(FORMATS)}")
    shapes = tuple(TreeShape(depth, branching, nodes) for nodes in _budgets(budgets))
    settings = shared.run_settings(
        machine, shared.TreeOptions(depth=depth, branching=branching, nodes=shapes[-1].nodes)
    )
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)

    from treeeagle_edge.head_report.evaluate import EvalOptions, prompt_sets

    sets = prompt_sets(prompts or [], builtin=builtin, limit=limit)
    raise typer.Exit(_evaluate(EvalOptions(settings, params, sets, shapes, limit), output, plot))


def _budgets(text: str) -> list[int]:
    """Numbers of nodes, the smallest first, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise UsageError(
            f"--budgets {text!r} is not a list of whole numbers", "use numbers of nodes, such as 4,8,16,32"
        ) from error
    return found


def _evaluate(options: EvalOptions, output: str, plot: Path | None) -> int:
    """Check what can be checked first, measure, print. Returns the exit code."""
    from treeeagle_edge.bench.plot import check_plot
    from treeeagle_edge.head_report.evaluate import evaluate
    from treeeagle_edge.head_report.output import build_document, render
    from treeeagle_edge.head_report.plot import draw

    if plot is not None:
        check_plot(plot)
    with progress_line() as progress:
        report, runtime = evaluate(options, progress=progress)
    document = build_document(report, options, runtime)
    typer.echo(render(document, output))
    if output == "json":
        for sentence in document["notes"]:
            note(sentence)
    if plot is not None:
        draw(document, plot)
        say(f"drawn to {plot}")
    return EXIT_INTERRUPT if report.interrupted else EXIT_OK
