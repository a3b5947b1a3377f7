"""`treeeagle profile`: will this model, with this context, run here, and how fast? Asked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treeeagle_edge.cli.console import progress_line
from treeeagle_edge.cli.options import (
    BitsOption,
    ContextOption,
    DeviceOption,
    HeadBitsOption,
    HeadOption,
    KernelsOption,
    LmHeadBitsOption,
    MachineOptions,
    ModelOption,
    ProfileOption,
    run_settings,
)
from treeeagle_edge.errors import CannotRunError, InputError, UsageError, reason_of

GpuMemoryOption = Annotated[
    float | None,
    typer.Option("--gpu-memory", metavar="GB", help="Plan for a card with this much memory, here or not."),
]
FastOption = Annotated[bool, typer.Option("--fast", help="Skip what computes: layers, kernels, bandwidth.")]
SaveOption = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Also write the report as JSON.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")]
TableOption = Annotated[
    bool, typer.Option("--table", help="Print what well-known models need on 12, 16 and 24 GB, and leave.")
]


def profile_command(
    model: ModelOption = None,
    head: HeadOption = None,
    context: ContextOption = None,
    bits: BitsOption = None,
    head_bits: HeadBitsOption = None,
    lm_head_bits: LmHeadBitsOption = None,
    device: DeviceOption = None,
    profile: ProfileOption = None,
    kernels: KernelsOption = None,
    gpu_memory: GpuMemoryOption = None,
    fast: FastOption = False,
    save: SaveOption = None,
    json_output: JsonOption = False,
    table: TableOption = False,
) -> None:
    """Check this machine, plan the memory, and say what will run and how fast. Loads no model."""
    if table:
        widths = (bits, head_bits, lm_head_bits)
        others = (model, head, context, *widths, device, profile, kernels, gpu_memory, save)
        if fast or json_output or any(option is not None for option in others):
            raise UsageError(
                "--table plans for models and cards of its own",
                "leave the other options out, or leave out --table",
            )
        from treeeagle_edge.profiling.table import plan_page

        print(plan_page(), end="")
        return
    settings = run_settings(
        MachineOptions(
            model=model,
            head=head,
            bits=bits,
            head_bits=head_bits,
            lm_head_bits=lm_head_bits,
            device=device,
            profile=profile,
            context=context,
            kernels=kernels,
        )
    )
    from treeeagle_edge.profiling.output import report_json, report_lines
    from treeeagle_edge.profiling.report import build_report

    with progress_line() as progress:
        report = build_report(settings, gpu_memory=gpu_memory, fast=fast, progress=progress)
    as_json = report_json(report)
    print(as_json if json_output else "\n".join(report_lines(report)), flush=True)
    if save is not None:
        try:
            save.write_text(as_json + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"the report cannot be written to {save}: {reason_of(error)}", "choose another file"
            ) from error
    if not report.verdict.can_run:
        raise typer.Exit(CannotRunError.exit_code)
