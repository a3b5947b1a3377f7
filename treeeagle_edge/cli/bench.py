"""`treeeagle bench`: both arms in one run, interleaved, with equal output checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeeagle_edge.cli import options as shared
from treeeagle_edge.cli.console import EXIT_INTERRUPT, EXIT_OK, note, progress_line, say
from treeeagle_edge.cli.option_groups import with_groups
from treeeagle_edge.cli.sampling_options import SamplingChoices, StopOption, stop_strings
from treeeagle_edge.errors import UsageError
from treeeagle_edge.sampling_params import SamplingParams

if TYPE_CHECKING:
    from treeeagle_edge.bench.report import Document
    from treeeagle_edge.bench.run import BenchOptions
    from treeeagle_edge.settings import RunSettings

EXIT_DIVERGED = 1
MOST_REPETITIONS = 100
FORMATS = ("md", "csv", "json")

QuickOption = Annotated[bool, typer.Option("--quick", help="One prompt a scenario, about a minute in all.")]
OutputOption = Annotated[
    str, typer.Option("--output", "-o", metavar="md|csv|json", help="Format on stdout; several with commas.")
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE.jsonl", help="Your own, in the MT-bench question format."),
]
TurnsOption = Annotated[
    str,
    typer.Option("--turns", metavar="first|all", help="Of --prompts with several turns: the first, or all."),
]
RepetitionsOption = Annotated[
    int | None,
    typer.Option(
        "--repetitions", metavar="N", help="Runs of each prompt. [default: 3; with --quick up to 3]"
    ),
]
MemoryOption = Annotated[
    bool, typer.Option("--memory-analysis", help="The memory plan against what was used.")
]
CompareOption = Annotated[
    Path | None, typer.Option("--compare", metavar="OLD.json", help="Show ratios to an earlier -o json.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.png|svg", help="Draw speed by scenario, acceptance by depth."),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 1 where the arms say different things.")
]


@dataclass(frozen=True)
class BenchSampling(SamplingChoices):
    """The sampling options, where some have other defaults than in a chat: greedy, and one seed."""

    temperature: Annotated[
        float,
        typer.Option("--temperature", metavar="T", help="0 is greedy; the same seed in both arms otherwise."),
    ] = 0.0
    top_p: Annotated[
        float | None, typer.Option("--top-p", metavar="P", help="Smallest set of this mass. 1 is off.")
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same text.")] = 0
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", help="Longest answer. [default: 256; with --quick 64 at most]"
        ),
    ] = None


@with_groups
def bench_command(
    *,
    machine: shared.MachineOptions,
    tree: shared.TreeOptions,
    quick: QuickOption = False,
    output: OutputOption = "md",
    prompts: PromptsOption = None,
    turns: TurnsOption = "first",
    repetitions: RepetitionsOption = None,
    memory_analysis: MemoryOption = False,
    compare: CompareOption = None,
    plot: PlotOption = None,
    strict: StrictOption = False,
    sampling: BenchSampling,
    stop: StopOption = None,
    system: shared.SystemOption = None,
    raw: shared.RawOption = False,
    show_prompt: shared.ShowPromptOption = False,
) -> None:
    """Measure plain and tree decoding, interleaved in one run, and check that both give the same text."""
    settings = shared.run_settings(machine, tree)
    wanted = _Wanted(_formats(output), memory_analysis, compare, plot, strict, show_prompt)
    questions = _Questions(prompts, turns, quick, repetitions, system, raw, stop_strings(stop))
    raise typer.Exit(_bench(settings, sampling.resolve(SamplingParams()), questions, wanted))


@dataclass(frozen=True)
class _Questions:
    """What is asked, and how often."""

    prompts: Path | None
    turns: str
    quick: bool
    repetitions: int | None
    system: str | None
    raw: bool
    stops: tuple[str, ...]


@dataclass(frozen=True)
class _Wanted:
    """What the person wants to see of it."""

    formats: tuple[str, ...]
    memory_analysis: bool
    compare: Path | None
    plot: Path | None
    strict: bool
    show_prompt: bool


def _bench(settings: RunSettings, params: SamplingParams, questions: _Questions, wanted: _Wanted) -> int:
    """Check everything that can be checked first, measure, print. Returns the exit code."""
    from treeeagle_edge.bench.compare import read_document, with_comparison
    from treeeagle_edge.bench.plot import check_plot, draw
    from treeeagle_edge.bench.report import render
    from treeeagle_edge.bench.run import run_bench

    options = _options(settings, params, questions)
    old = read_document(wanted.compare) if wanted.compare else None
    if wanted.plot:
        check_plot(wanted.plot)
    with progress_line() as progress:

        def show_prompt(text: str) -> None:
            progress.clear()
            say(text)

        document, run = run_bench(
            options, progress=progress, show_prompt=show_prompt if wanted.show_prompt else None
        )
    if old is not None:
        document = with_comparison(document, old, str(wanted.compare))
    _print(
        document,
        [render(document, name, memory_analysis=wanted.memory_analysis) for name in wanted.formats],
        wanted,
    )
    if wanted.plot:
        draw(document, wanted.plot)
        say(f"drawn to {wanted.plot}")
    if run.interrupted:
        return EXIT_INTERRUPT
    return EXIT_DIVERGED if wanted.strict and run.divergences else EXIT_OK


def _options(settings: RunSettings, params: SamplingParams, questions: _Questions) -> BenchOptions:
    from treeeagle_edge.bench.prompts import builtin_prompts, read_prompts
    from treeeagle_edge.bench.run import BenchOptions
    from treeeagle_edge.cli.given_files import system_prompt

    if questions.turns not in ("first", "all"):
        raise UsageError(f"--turns is {questions.turns}, which is neither of its values", "use first or all")
    if questions.repetitions is not None:
        shared.check_range("--repetitions", questions.repetitions, 1, MOST_REPETITIONS)
    if params.max_tokens == 1:
        raise UsageError("--max-tokens is 1, which leaves nothing to time", "use 2 or more")
    path = questions.prompts
    return BenchOptions(
        settings=settings,
        params=params,
        prompts=read_prompts(path, turns=questions.turns)
        if path
        else builtin_prompts(1 if questions.quick else None),
        prompts_name=str(path) if path else "built-in",
        turns=questions.turns,
        quick=questions.quick,
        repetitions=questions.repetitions,
        system=system_prompt(questions.system),
        raw=questions.raw,
        stops=questions.stops,
    )


def _formats(output: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in output.split(","))
    wrong = next((name for name in names if name not in FORMATS), None)
    if wrong is not None:
        raise UsageError(f"--output {wrong!r} is not a format of the bench", f"use {', '.join(FORMATS)}")
    return names


def _print(document: Document, texts: list[str], wanted: _Wanted) -> None:
    """The result on stdout; where the table is not among the formats, the notes go to stderr."""
    typer.echo("\n\n".join(texts))
    if "md" not in wanted.formats:
        for sentence in document["notes"]:
            note(sentence)
