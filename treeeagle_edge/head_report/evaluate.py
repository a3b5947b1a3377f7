"""Measures how good a draft head is for its target. Every question is answered once with each node budget.

The engine runs as in a chat. All trees have the same depth and branching; only their number of nodes differs. How many
nodes the target accepts is counted (`tally.py`); nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeeagle_edge.bench.prompts import BenchPrompt, builtin_prompts, check_room, read_prompts
from treeeagle_edge.chat.prompt import TextCodec, Turn, build_prompt
from treeeagle_edge.engine.protocol import TokenEngine
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.head_report.tally import Tally, tally
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings

if TYPE_CHECKING:
    from treeeagle_edge.runtime import Runtime


@dataclass(frozen=True)
class PromptSet:
    """Questions that share a row of the report: those of one file, or of one built-in scenario."""

    name: str
    prompts: tuple[BenchPrompt, ...]


@dataclass(frozen=True)
class EvalOptions:
    """What to measure, as the person asked for it."""

    settings: RunSettings  # its `nodes` is the largest budget, so that slots are reserved for every tree
    params: SamplingParams  # without stop ids, which come from the model
    prompts: tuple[PromptSet, ...]
    shapes: tuple[TreeShape, ...]  # for each budget, the smallest first; all of one depth and branching
    limit: int | None = None  # how many questions of each set are asked; None: all


@dataclass(frozen=True)
class CountedAnswer:
    """The acceptance counts of one answer."""

    prompt_set: str
    nodes: int  # the node budget of its trees
    tally: Tally


@dataclass(frozen=True)
class HeadReport:
    """All answers to the questions that were answered with every budget."""

    answers: tuple[CountedAnswer, ...]
    answered: int  # questions
    asked: int  # questions; more than `answered` where Ctrl-C ended the run

    @property
    def interrupted(self) -> bool:
        """Whether questions were left out."""
        return self.answered < self.asked

    def tallies(self, nodes: int, prompt_set: str | None = None) -> list[Tally]:
        """The tallies of one budget, for one set of prompts or for all."""
        return [
            answer.tally
            for answer in self.answers
            if answer.nodes == nodes and prompt_set in (None, answer.prompt_set)
        ]


def prompt_sets(files: Sequence[Path], *, builtin: bool, limit: int | None) -> tuple[PromptSet, ...]:
    """The questions to ask: one set for each file, then one for each built-in scenario.

    Files are in the MT-bench question format; only the first turn of a question is asked. A set has the name of its
    file, or its path where two files have the same name. The built-in scenarios come in where `builtin` is true or no
    file is given. limit: how many questions are taken of each file and scenario. Raises InputError for a file that
    cannot be read, UsageError for one that is given twice.
    """
    twice = next((path for path in files if files.count(path) > 1), None)
    if twice is not None:
        raise UsageError(f"--prompts {twice} is given twice", "give each file once")
    names = [path.name for path in files]
    sets = [
        PromptSet(name if names.count(name) == 1 else str(path), read_prompts(path, limit=limit))
        for name, path in zip(names, files, strict=True)
    ]
    if builtin or not files:
        prompts = builtin_prompts(limit)
        for scenario in dict.fromkeys(prompt.scenario for prompt in prompts):
            chosen = tuple(prompt for prompt in prompts if prompt.scenario == scenario)
            sets.append(PromptSet(f"built-in {scenario}", chosen))
    return tuple(sets)


def evaluate(options: EvalOptions, *, progress: Progress = silent) -> tuple[HeadReport, Runtime]:
    """Load the models once, with slots for the largest budget, and measure every budget.

    Raises the loader's errors, and InputError where the target has no head here or a prompt does not fit the context.
    """
    from treeeagle_edge.runtime import load_runtime  # imports torch, which takes seconds

    runtime = load_runtime(options.settings, progress=progress)
    if not runtime.engine.has_head:
        raise InputError(
            f"there is no draft head for {runtime.model_name} on this machine", "name one with --head"
        )
    params = replace(options.params, stop_ids=runtime.generation.stop_ids | runtime.tokenizer.stop_ids)
    report = measure(
        runtime.engine, runtime.tokenizer, options.prompts, options.shapes, params, progress=progress
    )
    return report, runtime


def measure(
    engine: TokenEngine,
    tokenizer: TextCodec,
    sets: Sequence[PromptSet],
    shapes: Sequence[TreeShape],
    params: SamplingParams,
    *,
    progress: Progress = silent,
) -> HeadReport:
    """Answer every question with every shape. Ctrl-C ends the run; complete questions are kept, if there are any.

    No prefix is reused, so that an answer does not depend on those before it. Raises InputError for a prompt that
    leaves no room for a round in the context, before anything is answered.
    """
    questions = [
        (item.name, prompt.name, _prompt_ids(tokenizer, prompt, engine.context))
        for item in sets
        for prompt in item.prompts
    ]
    answers: list[CountedAnswer] = []
    answered = 0
    try:
        for prompt_set, name, ids in questions:
            progress(f"question {answered + 1} of {len(questions)}: {prompt_set}, {name}")
            found = []
            for shape in shapes:
                rounds = list(engine.generate(ids, params, reuse_prefix=False, tree=shape))
                found.append(CountedAnswer(prompt_set, shape.nodes, tally(rounds, shape.depth)))
            answers += found
            answered += 1
    except KeyboardInterrupt:
        if not answers:
            raise
    return HeadReport(tuple(answers), answered, len(questions))


def _prompt_ids(tokenizer: TextCodec, prompt: BenchPrompt, context: int) -> list[int]:
    """Ids of the first turn, rendered with the model's chat template."""
    ids = list(build_prompt(tokenizer, None, [Turn(prompt.turns[0])]).ids)
    check_room(prompt, len(ids), context)
    return ids
