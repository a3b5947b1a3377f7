"""`treeeagle gpu-check`: does the CUDA path do what it should on this card, and how fast? One run of a few minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from treeeagle_edge.cli.console import EXIT_OK, progress_line, say

EXIT_FAILED = 1

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
    from treeeagle_edge.gpu_check.choices import check_options
    from treeeagle_edge.gpu_check.report import render
    from treeeagle_edge.gpu_check.run import has_failed, run_check

    options = check_options(device, minutes, sections, size)
    with progress_line() as progress:
        document = run_check(options, progress=progress, save=save)
    typer.echo(json.dumps(document, indent=1) if json_output else render(document))
    if save is not None:
        say(f"saved to {save} and {save.with_suffix('.md')}")
    raise typer.Exit(EXIT_FAILED if has_failed(document) else EXIT_OK)
