"""The report of `treeeagle profile` as lines for a person and as JSON for a program."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from treeeagle_edge.planning.memory_plan import PlanLine
from treeeagle_edge.planning.run_plan import RunPlan
from treeeagle_edge.profiling.report import ProfileReport
from treeeagle_edge.profiling.speed import Speed
from treeeagle_edge.units import GB, format_gb

SCHEMA = 1


def report_lines(report: ProfileReport) -> list[str]:
    """The whole report as lines of plain text, the verdict last."""
    lines: list[str] = []
    for check in report.checks:
        lines.append(f"{check.status:<5} {check.text}")
        if check.hint:
            lines.append(f"      hint: {check.hint}")
    if report.plan is not None:
        lines += _plan_lines(report.plan)
    lines += [_speed_line(speed) for speed in report.speeds]
    if any(s.estimate.tree is not None and s.estimate.tree[1] <= s.estimate.plain[1] for s in report.speeds):
        lines.append(
            "      hint: at these bits a pass over the tree costs more than it gives; --no-spec may be faster"
        )
    return [*lines, f"verdict  {report.verdict.text}"]


def _plan_lines(run: RunPlan) -> list[str]:
    without = "no head, decoding plainly" if run.tree is None else "no head, drafting what the text repeats"
    memory, head = run.memory, run.model.head_name or without
    lines = [f"plan  {run.model.name}, {run.bits}-bit, {head}, on {run.device} by profile {run.profile.name}"]
    width = max(len(line.name) for line in memory.lines)
    lines += [_plan_line(line, width) for line in memory.lines]
    verdict = "fits" if memory.fits else "does not fit"
    longest = f"the longest context that fits is {memory.longest_context:,}"
    if memory.longest_context == 0:
        longest = "no context fits"
    elif memory.longest_context == run.model.config.max_position:
        longest += ", all the model has"
    total = f"{memory.total / GB:.2f}" if memory.total < GB else f"{memory.total / GB:.1f}"
    lines.append(f"      {'total':<{width}}  {total} of {format_gb(memory.budget)}, {verdict}; {longest}")
    for card in memory.cards:
        held = f"{card.nbytes / GB:.1f} of {format_gb(card.free)}"
        lines.append(f"      {card.device:<{width}}  {held}, {card.contents}")
    return lines


def _plan_line(line: PlanLine, width: int) -> str:
    return f"      {line.name:<{width}}  {format_gb(line.nbytes):>8}   {line.note}".rstrip()


def _speed_line(speed: Speed) -> str:
    estimate = speed.estimate
    low, high = estimate.plain
    text = (
        f"speed ceiling {_rate(estimate.ceiling)} tok/s plain at {estimate.bandwidth:.0f} GB/s ({speed.source}); "
        f"expect {_rate(low)}-{_rate(high)} plain"
    )
    return (
        text
        if estimate.tree is None
        else text + f", {_rate(estimate.tree[0])}-{_rate(estimate.tree[1])} with the tree"
    )


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.1f}"


def report_json(report: ProfileReport) -> str:
    """One JSON object: `schema`, `checks`, `hardware`, `plan`, `speed`, `verdict`. Sizes are bytes."""
    hardware = None
    if report.hardware is not None:
        hardware = asdict(report.hardware)
        hardware["label"] = report.hardware.label
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "checks": [asdict(check) for check in report.checks],
        "hardware": hardware,
        "plan": None if report.plan is None else _plan_json(report.plan),
        "speed": [{"source": speed.source, **asdict(speed.estimate)} for speed in report.speeds],
        "verdict": asdict(report.verdict),
    }
    return json.dumps(data, indent=2)


def _plan_json(run: RunPlan) -> dict[str, Any]:
    memory = run.memory
    return {
        "profile": run.profile.name,
        "model": run.model.name,
        "model_on_disk": run.model.on_disk,
        "head": run.model.head_name,
        "device": run.device,
        "bits": run.bits,
        "widths": asdict(run.widths),
        "context": run.context,
        "tree": None if run.tree is None else asdict(run.tree),
        "lines": [asdict(line) for line in memory.lines],
        "total": memory.total,
        "budget": memory.budget,
        "fits": memory.fits,
        "slots": memory.slots,
        "longest_context": memory.longest_context,
        "cards": [asdict(card) for card in memory.cards],
    }
