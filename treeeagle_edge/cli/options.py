"""The options that the commands share, declared once: what runs, where, how it drafts, and what is sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from treeeagle_edge.errors import UsageError
from treeeagle_edge.limits import MOST_THREADS, SHORTEST_CONTEXT
from treeeagle_edge.rounds import tree_shape
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.widths import HEAD_BITS, LAYER_BITS, LM_HEAD_BITS, check_choice

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


def run_settings(machine: MachineOptions, tree: TreeOptions | None = None) -> RunSettings:
    """The settings of a run from both groups of options; None stays "let the profile decide".

    Raises UsageError, naming the allowed values, before anything heavy is imported.
    """
    tree = tree or TreeOptions()
    if machine.kernels == "auto":
        machine = replace(machine, kernels=None)
    _check_machine(machine)
    tree_shape(tree.depth or 1, tree.branching or 1, tree.nodes or 0)  # checks the ranges
    for name, value in (("depth", tree.depth), ("branching", tree.branching)):
        if value == 0:
            raise UsageError(f"{name} is 0, which is out of range", "use 1 or more; only --nodes takes 0")
    given = vars(machine) | vars(tree)
    speculate = not given.pop("no_spec")
    return RunSettings(**given, speculate=speculate)


def _check_machine(machine: MachineOptions) -> None:
    check_choice("--bits", machine.bits, LAYER_BITS)
    check_choice("--head-bits", machine.head_bits, HEAD_BITS)
    check_choice("--lm-head-bits", machine.lm_head_bits, LM_HEAD_BITS)
    if machine.kernels is not None and machine.kernels not in KERNELS:
        raise UsageError(
            f"there are no kernels named {machine.kernels!r}", f"use {' or '.join(KERNELS)}, or leave it out"
        )
    for name in ("model", "head", "device", "profile"):
        text: str | None = getattr(machine, name)
        if text is not None and not text.strip():  # an unset variable of a script, as a rule
            raise UsageError(f"--{name} is empty", "give a value, or leave the option out")
    if machine.context is not None:
        check_range("--context", machine.context, SHORTEST_CONTEXT)
    if machine.threads is not None:
        check_range("--threads", machine.threads, 1, MOST_THREADS)


def check_range(
    name: str, value: int, least: int, most: int | None = None, wrong: str = "is out of range"
) -> None:
    """Raise UsageError where the whole number of option `name` is outside its range: it `wrong`."""
    if value < least or (most is not None and value > most):
        allowed = f"use {least} or more" if most is None else f"use {least} to {most}"
        raise UsageError(f"{name} is {value}, which {wrong}", allowed)
