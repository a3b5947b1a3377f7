"""`treeeagle pull`: fetch a model or head by name, so that a chat can start without a network."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treeeagle_edge.cli.console import note, progress_line, say
from treeeagle_edge.errors import UsageError

if TYPE_CHECKING:
    from treeeagle_edge.sources.pull import Part

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A model or head: org/name of the hub, or a name of ours. Without one: what this machine would run.",
    ),
]
WithHeadOption = Annotated[bool, typer.Option("--head", help="Also fetch the head that goes with the model.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be fetched, and how large it is.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Also read what is here already, and compare its checksums.")
]


def pull_command(
    name: NameArgument = None,
    with_head: WithHeadOption = False,
    dry_run: DryRunOption = False,
    verify: VerifyOption = False,
) -> None:
    """Fetch a model or a draft head, checked, and say where it is. A fetch that was interrupted goes on."""
    if name is not None and not name.strip():
        raise UsageError(
            "the name is empty", "give a model or head, such as Qwen/Qwen3-8B, or nothing at all"
        )
    from treeeagle_edge.sources.pull import find_parts, profile_parts

    with progress_line() as progress:
        if name is None:
            profile, parts = profile_parts(progress, verify=verify)
            progress.clear()
            say(f"profile {profile.name} suits this machine: {' with '.join(part.name for part in parts)}")
        else:
            parts = find_parts(name, progress, with_head=with_head, verify=verify)
        progress.clear()
        for sentence in (sentence for part in parts for sentence in part.notes):
            note(sentence)
        if dry_run:
            _show(parts)
            return
        for part in parts:
            part.check_space()
        try:
            places = [(part, part.bring(progress)) for part in parts]
        except KeyboardInterrupt:
            progress.clear()
            say("stopped; what has come is kept: run the same command again to go on")
            raise
    for part, place in places[:-1]:
        print(f"{part.name} is in {place}")
    part, place = places[-1]
    print(f"{part.name} is in {place}; {_use(parts, default=name is None)}")


def _show(parts: tuple[Part, ...]) -> None:
    """The files of each part, their sizes, and what is here; then the sum."""
    from treeeagle_edge.units import format_size

    for part in parts:
        print(f"{part.name} ({part.kind}), in {part.folder}")
        for file in part.files:
            here = "here" if file.here == file.size else f"{format_size(file.here)} here" if file.here else ""
            print(f"{format_size(file.size):>9}  {file.name}  {here}".rstrip())
    sys.stdout.flush()
    missing = sum(part.to_fetch for part in parts)
    print(
        f"{format_size(missing) if missing else 'nothing'} would be fetched{'' if missing else ': all is here'}"
    )
    for part in parts:
        part.check_space()


def _use(parts: tuple[Part, ...], *, default: bool) -> str:
    """How to use what was fetched, as it is typed. `default`: a chat without options runs it."""
    if default:
        return "chat with it: treeeagle chat"
    model = next((part.name for part in parts if part.kind == "model"), None)
    head = next((part for part in parts if part.kind == "head"), None)
    if head is None:
        return f"chat with it: treeeagle chat --model {model}"
    target = model or head.target
    if target is None:
        return (
            f"draft with it: treeeagle chat --head {head.name}, and --model with the model it was trained for"
        )
    return f"{'chat' if model else 'draft'} with it: treeeagle chat --model {target} --head {head.name}"
