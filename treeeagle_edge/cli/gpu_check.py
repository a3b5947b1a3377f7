"""`treeeagle gpu-check`: does the CUDA path do what it should on this card, and how fast? One run of a few minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from treeeagle_edge.cli.console import EXIT_OK, progress_line, say
from treeeagle_edge.errors import CannotRunError, UsageError

EXIT_FAILED = 1
_LEAST_MINUTES, _MOST_MINUTES = 0.5, 60.0
_SIZES = ("full", "test")

DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="cuda or cuda:N. [default: the card with most room]"),
]
MinutesOption = Annotated[
    float,
    typer.Option("--minutes", metavar="M", help="For all of it; sections that find no time are skipped."),
]
SectionsOption = Annotated[
    str | None,
    typer.Option(
        "--sections", metavar="NAME,NAME,...", help="Only these, such as kernels,parity. [default: all]"
    ),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE.json", help="Keep everything there, and the table in FILE.md beside it."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the document in place of the table.")]
SizeOption = Annotated[str, typer.Option("--size", hidden=True)]  # "test": tiny shapes, which run on a CPU


def gpu_check_command(
    device: DeviceOption = None,
    minutes: MinutesOption = 7.5,
    sections: SectionsOption = None,
    save: SaveOption = None,
    json_output: JsonOption = False,
    size: SizeOption = "full",
) -> None:
    """Check and measure the CUDA path on this card, with random weights: nothing is downloaded."""
    if not _LEAST_MINUTES <= minutes <= _MOST_MINUTES:
        raise UsageError(
            f"--minutes is {minutes:g}, which is out of range", f"use {_LEAST_MINUTES:g} to {_MOST_MINUTES:g}"
        )
    if size not in _SIZES:
        raise UsageError(f"--size {size!r} is not a size of the GPU check", f"use {' or '.join(_SIZES)}")
    from treeeagle_edge.gpu_check.report import render
    from treeeagle_edge.gpu_check.run import CheckOptions, has_failed, run_check

    wanted = tuple(name.strip() for name in sections.split(",")) if sections is not None else ()
    options = CheckOptions(device="", size=size, minutes=minutes, sections=wanted)
    options.plans()  # a wrong name is told before a card is looked for
    found = _find_card(device) if size == "full" else _detected(device or "cpu")
    with progress_line() as progress:
        document = run_check(CheckOptions(found, size, minutes, wanted), progress=progress, save=save)
    typer.echo(json.dumps(document, indent=1) if json_output else render(document))
    if save is not None:
        say(f"saved to {save} and {save.with_suffix('.md')}")
    raise typer.Exit(EXIT_FAILED if has_failed(document) else EXIT_OK)


def _find_card(device: str | None) -> str:
    """The card to check, "cuda:N": in full it is a card or nothing, and the reason is the person's answer."""
    try:
        found = _detected(device or "cuda")
    except CannotRunError as error:
        if error.hint is None or "--device cpu" not in error.hint:
            raise
        # the usual way out, the CPU, is none here
        raise CannotRunError(
            error.message, "this checks an NVIDIA card; treeeagle profile says what was found"
        ) from error
    if not found.startswith("cuda"):
        raise UsageError(f"--device {device} is no card, and this checks one", "use cuda or cuda:N")
    return found


def _detected(device: str) -> str:
    from treeeagle_edge.hardware.detection import detect

    return detect(device).device
