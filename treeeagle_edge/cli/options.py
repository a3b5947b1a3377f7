"""The options that the commands share, declared once; and what they mean as `RunSettings` and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from treeeagle_edge.errors import UsageError
from treeeagle_edge.limits import SHORTEST_CONTEXT
from treeeagle_edge.rounds import tree_shape
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.widths import HEAD_BITS, LAYER_BITS, LM_HEAD_BITS, check_choice

MOST_THREADS = 256  # as many as the native kernels take; thousands would end the program without a word
KERNELS = ("native", "torch")

# What runs, and where.
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="A name, a folder, a .gguf file, or org/name of the hub."
    ),
]
HeadOption = Annotated[
    str | None,
    typer.Option("--head", metavar="HEAD", help="The EAGLE-3 head: a name, a folder, or org/name."),
]
BitsOption = Annotated[
    int | None,
    typer.Option("--bits", metavar="4|8|16|32", help="Weights: 4, 8, 16 (bf16 or fp16) or 32 (fp32)."),
]
HeadBitsOption = Annotated[
    int | None,
    typer.Option(
        "--head-bits",
        metavar="4|8|16",
        help="The draft head. [default: 16; 4 on native kernels; 32 at --bits 32]",
    ),
]
LmHeadBitsOption = Annotated[
    int | None,
    typer.Option(
        "--lm-head-bits",
        metavar="8|16",
        help="The model's output matrix. [default: 16; 8 on the CPU at --bits 4 or 8; 32 at --bits 32]",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:N, or cuda:0,cuda:1 for both. [default: auto]"
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE|NAME", help="A shipped memory profile or a YAML file."),
]
ContextOption = Annotated[
    int | None, typer.Option("--context", metavar="TOKENS", help="Context to plan memory for.")
]
ThreadsOption = Annotated[int | None, typer.Option("--threads", metavar="N", help="CPU threads.")]
KernelsOption = Annotated[
    str | None,
    typer.Option("--kernels", metavar="native|torch", help="Our C++ kernels, or PyTorch's. [default: auto]"),
]

# How it drafts.
NoSpecOption = Annotated[bool, typer.Option("--no-spec", help="Decode plainly, without the head.")]
DepthOption = Annotated[int | None, typer.Option("--depth", metavar="N", help="Levels of drafted tokens.")]
BranchingOption = Annotated[
    int | None,
    typer.Option("--branching", metavar="N", help="Nodes expanded a level, and children scored for each."),
]
NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", metavar="N", help="Nodes of the tree, root not counted. 0: chosen for you."),
]
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Same bits as plain decoding, at some cost in speed.")
]

# How a token is chosen, and when an answer ends.
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", metavar="T", help="0 is greedy. [default: the model's, else 0.7]"),
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Smallest set of this mass. [default: the model's, else 0.95]"),
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", metavar="K", help="Only the K likeliest. 0 is off.")
]
MinPOption = Annotated[
    float | None, typer.Option("--min-p", metavar="P", help="Drop below P times the likeliest. 0 is off.")
]
RepetitionOption = Annotated[
    float | None, typer.Option("--repetition-penalty", metavar="X", help="Over prompt and answer. 1 is off.")
]
PresenceOption = Annotated[
    float | None, typer.Option("--presence-penalty", metavar="X", help="Over the answer, -2 to 2. 0 is off.")
]
FrequencyOption = Annotated[
    float | None, typer.Option("--frequency-penalty", metavar="X", help="Over the answer, -2 to 2. 0 is off.")
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Same seed, same text. [default: drawn and reported]"),
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", help="Longest answer. [default: up to the context]")
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End the answer before this text. May be repeated."),
]

# What is sent.
SystemOption = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT|@FILE", help="System prompt, or @FILE to read it from a file."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Send the text as it is, without a chat template.")]
ShowPromptOption = Annotated[
    bool, typer.Option("--show-prompt", help="Show the rendered prompt, template included.")
]


@dataclass(frozen=True)
class MachineOptions:
    """What runs, and where, as the person gave it; None means "let the profile decide"."""

    model: ModelOption = None
    head: HeadOption = None
    bits: BitsOption = None
    head_bits: HeadBitsOption = None
    lm_head_bits: LmHeadBitsOption = None
    device: DeviceOption = None
    profile: ProfileOption = None
    context: ContextOption = None
    threads: ThreadsOption = None
    kernels: KernelsOption = None


@dataclass(frozen=True)
class TreeOptions:
    """How it drafts, as the person gave it; None means "let the profile decide"."""

    no_spec: NoSpecOption = False
    depth: DepthOption = None
    branching: BranchingOption = None
    nodes: NodesOption = None
    exact: ExactOption = False


def run_settings(
    *,
    model: str | None = None,
    head: str | None = None,
    bits: int | None = None,
    head_bits: int | None = None,
    lm_head_bits: int | None = None,
    device: str | None = None,
    profile: str | None = None,
    context: int | None = None,
    threads: int | None = None,
    no_spec: bool = False,
    depth: int | None = None,
    branching: int | None = None,
    nodes: int | None = None,
    exact: bool = False,
    kernels: str | None = None,
) -> RunSettings:
    """Check the options that choose model, machine and tree; None stays "let the profile decide".

    Raises UsageError, naming the allowed values, before anything heavy is imported.
    """
    check_choice("--bits", bits, LAYER_BITS)
    check_choice("--head-bits", head_bits, HEAD_BITS)
    check_choice("--lm-head-bits", lm_head_bits, LM_HEAD_BITS)
    kernels = None if kernels == "auto" else kernels
    if kernels is not None and kernels not in KERNELS:
        raise UsageError(
            f"there are no kernels named {kernels!r}", f"use {' or '.join(KERNELS)}, or leave it out"
        )
    for name, text in (("model", model), ("head", head), ("device", device), ("profile", profile)):
        if text is not None and not text.strip():  # an unset variable of a script, as a rule
            raise UsageError(f"--{name} is empty", "give a value, or leave the option out")
    if context is not None:
        check_range("--context", context, SHORTEST_CONTEXT)
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"--threads is {threads}, which is out of range", f"use 1 to {MOST_THREADS}")
    tree_shape(depth or 1, branching or 1, nodes or 0)  # checks the ranges
    for name, value in (("depth", depth), ("branching", branching)):
        if value == 0:
            raise UsageError(f"{name} is 0, which is out of range", "use 1 or more; only --nodes takes 0")
    return RunSettings(
        model=model,
        head=head,
        bits=bits,
        head_bits=head_bits,
        lm_head_bits=lm_head_bits,
        device=device,
        profile=profile,
        context=context,
        threads=threads,
        speculate=not no_spec,
        depth=depth,
        branching=branching,
        nodes=nodes,
        exact=exact,
        kernels=kernels,
    )


def check_range(
    name: str, value: int, least: int, most: int | None = None, wrong: str = "is out of range"
) -> None:
    """Raise UsageError where the whole number of option `name` is outside its range: it `wrong`."""
    if value < least or (most is not None and value > most):
        allowed = f"use {least} or more" if most is None else f"use {least} to {most}"
        raise UsageError(f"{name} is {value}, which {wrong}", allowed)


@dataclass(frozen=True)
class SamplingChoices:
    """The sampling options as the person gave them; None means "the default of the model"."""

    temperature: TemperatureOption = None
    top_p: TopPOption = None
    top_k: TopKOption = None
    min_p: MinPOption = None
    repetition_penalty: RepetitionOption = None
    presence_penalty: PresenceOption = None
    frequency_penalty: FrequencyOption = None
    seed: SeedOption = None
    max_tokens: MaxTokensOption = None

    def __post_init__(self) -> None:
        self.resolve(SamplingParams())  # a value out of range is refused before a model is loaded

    def resolve(self, defaults: SamplingParams) -> SamplingParams:
        """The given options over `defaults`; what cannot be given here (bias, bans, stop ids) comes from `defaults`.

        Raises UsageError with the allowed range.
        """
        merged = {item.name: getattr(defaults, item.name) for item in fields(defaults)}
        merged.update(
            {item.name: getattr(self, item.name) for item in fields(self) if self._given(item.name)}
        )
        return SamplingParams(**merged)

    def _given(self, name: str) -> bool:
        return getattr(self, name) is not None


def stop_strings(given: Sequence[str] | None) -> tuple[str, ...]:
    """The stop strings in the order given. Raises UsageError for an empty one, which would end every answer."""
    stops = tuple(given or ())
    if "" in stops:
        raise UsageError("--stop is empty, which would end every answer at once", "give the text to stop at")
    return stops
