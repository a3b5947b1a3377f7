"""`treeeagle train`: make a draft head for a target, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeeagle_edge.cli.console import say
from treeeagle_edge.cli.option_groups import with_groups
from treeeagle_edge.cli.options import (
    BitsOption,
    DeviceOption,
    KernelsOption,
    MachineOptions,
    ThreadsOption,
    check_range,
    run_settings,
)
from treeeagle_edge.errors import UsageError
from treeeagle_edge.limits import MOST_UNROLLED

if TYPE_CHECKING:
    from treeeagle_edge.settings import RunSettings
    from treeeagle_edge.training.run import Outcome
    from treeeagle_edge.training.run_settings import TrainingRun

LAYOUTS = ("safeailab", "speculators")
LEAST_DRAFT_VOCAB = 64  # tokens; the usual 8,192 are most of what a model says
LEAST_LENGTH = 32  # tokens of a dialogue

TargetOption = Annotated[
    str,
    typer.Option(
        "--target", "-t", metavar="MODEL", help="A name, a folder, a .gguf file, or org/name of the hub."
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the head goes. Run again to go on after a stop.")
]


@dataclass(frozen=True)
class TrainingOptions:
    """What the head learns from, and how. A value out of range is refused before a model is loaded."""

    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="About so many tokens are written to learn from.")
    ] = 1_000_000
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE.jsonl", help="Your dialogues, instead of ones that the target writes."
        ),
    ] = None
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="With --data: keep the questions, let the target answer.")
    ] = False
    exclude: Annotated[
        list[Path] | None,
        typer.Option(
            "--exclude", metavar="FILE.jsonl", help="Questions that no training text may share 8 words with."
        ),
    ] = None
    dialogues: Annotated[
        int, typer.Option("--dialogues", metavar="N", help="Dialogues written side by side.")
    ] = 128
    length: Annotated[int, typer.Option("--length", metavar="N", help="Tokens of the longest dialogue.")] = (
        512
    )
    draft_vocab: Annotated[
        int, typer.Option("--draft-vocab", metavar="N", help="Tokens that the head can draft.")
    ] = 8192
    unroll: Annotated[
        int, typer.Option("--unroll", metavar="N", help="Drafting steps that are trained through.")
    ] = 5
    passes: Annotated[
        float, typer.Option("--passes", metavar="X", help="How often each dialogue is seen.")
    ] = 3.0
    minutes: Annotated[
        float | None, typer.Option("--minutes", metavar="X", help="Train for at most so long.")
    ] = None
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", metavar="N", help="Answer tokens a step.")
    ] = 2048
    learning_rate: Annotated[float, typer.Option("--learning-rate", metavar="X")] = 1e-3
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Same seed, same head.")] = 0
    init: Annotated[
        str | None,
        typer.Option(
            "--init", metavar="HEAD", help="Start from this head, not from the target's last layer."
        ),
    ] = None
    save_every: Annotated[
        float, typer.Option("--save-every", metavar="SECONDS", help="Between checkpoints.")
    ] = 180.0
    layout: Annotated[
        str, typer.Option("--format", metavar="safeailab|speculators", help="How the head is written.")
    ] = "safeailab"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(
                f"--format is {self.layout}, which is not a layout we write", f"use {' or '.join(LAYOUTS)}"
            )
        if self.regenerate and self.data is None:
            raise UsageError("--regenerate needs questions", "give them with --data FILE.jsonl")
        if self.init is not None and not self.init.strip():
            raise UsageError("--init is empty", "name a head, or leave the option out")
        check_range("--tokens", self.tokens, 1)
        check_range("--batch-tokens", self.batch_tokens, 1)
        check_range("--dialogues", self.dialogues, 2, wrong="leaves none to judge the head by")
        check_range("--draft-vocab", self.draft_vocab, LEAST_DRAFT_VOCAB, wrong="leaves too little to draft")
        check_range("--unroll", self.unroll, 1, MOST_UNROLLED)
        check_range("--length", self.length, LEAST_LENGTH, wrong="is too short for a dialogue")
        check_range("--seed", self.seed, 0, 2**63 - 1)
        amounts = {"--passes": self.passes, "--minutes": self.minutes, "--save-every": self.save_every}
        for name, amount in amounts.items():
            if amount is not None and not 0 < amount < inf:
                raise UsageError(f"{name} is {amount:g}, which is out of range", "use more than 0")
        if not 0 < self.learning_rate < 1:
            raise UsageError(
                f"--learning-rate is {self.learning_rate}, which is out of range", "use 0.0003 to 0.003"
            )


@with_groups
def train_command(
    *,
    target: TargetOption,
    out: OutOption,
    bits: BitsOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    kernels: KernelsOption = None,
    training: TrainingOptions,
) -> None:
    """Train an EAGLE-3 draft head for a model as it runs here, from dialogues that the model writes itself."""
    if not target.strip():  # an unset variable of a script, as a rule
        raise UsageError("--target is empty", "name the model to train a head for")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is no folder", "give a folder, or a name that is not taken yet")
    settings = run_settings(
        MachineOptions(model=target, bits=bits, device=device, threads=threads, kernels=kernels)
    )

    from treeeagle_edge.training.processes import find_place
    from treeeagle_edge.training.run import train

    place = find_place()
    try:
        outcome = train(_training_run(settings, out, training), place, say if place.first else _say_nothing)
    except KeyboardInterrupt:
        if place.first:
            say("stopped; the same command goes on from the last checkpoint")
        raise
    if place.first:
        _finish(outcome)


def _training_run(settings: RunSettings, out: Path, given: TrainingOptions) -> TrainingRun:
    from treeeagle_edge.training.run_settings import DataSettings, TrainingRun
    from treeeagle_edge.training.trainer import TrainSettings

    exclude = tuple(given.exclude or ())
    return TrainingRun(
        target=settings,
        out=out,
        data=DataSettings(
            given.tokens, given.dialogues, given.length, given.seed, given.data, given.regenerate, exclude
        ),
        training=TrainSettings(
            given.unroll, given.batch_tokens, given.passes, given.minutes, given.learning_rate, given.seed
        ),
        draft_vocab=given.draft_vocab,
        init=given.init,
        layout=given.layout,
        save_every=given.save_every,
    )


def _say_nothing(text: str) -> None:
    """For all processes but the first."""


def _finish(outcome: Outcome) -> None:
    last = outcome.record.held_out[-1]
    shares = ", ".join(f"{100 * share:.0f}" for share in last["hits"])
    say(f"held out, share of tokens predicted by step: {shares} %")
    say(f"the head is in {outcome.folder}")
    say(f"  try it: treeeagle chat --head {outcome.folder}")
