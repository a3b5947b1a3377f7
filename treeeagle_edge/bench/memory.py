"""Compares the memory plan, line by line, with the memory that was used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treeeagle_edge.planning.memory_plan import MemoryPlan


@dataclass(frozen=True)
class MemoryUse:
    """What was measured, in bytes. On CUDA all but `held` is the allocator's count, and `program` is 0."""

    # sizes of tensors: "weights" (with embedding and lm_head), "head", "KV"; and what "CUDA graphs" hold
    held: Mapping[str, int]
    program: int  # before loading: Python and its libraries
    loading_peak: int  # the highest while loading
    loaded: int  # after loading
    answering_peak: int  # the highest while answering
    source: str  # how the peaks were measured, in words


def memory_document(plan: MemoryPlan, use: MemoryUse) -> dict[str, Any]:
    """The value of the key "memory": lines with `planned_bytes` and `measured_bytes`, which is None if not measured.

    The plan has one line for weights and one for embedding and lm_head. Here they are one line, since the target counts
    them together.
    """
    lines: list[dict[str, Any]] = []
    weights = [line for line in plan.lines if line.name.startswith(("weights", "embedding"))]
    if weights:
        name = ", ".join(line.name for line in weights)
        lines.append(
            _line(name, sum(line.nbytes for line in weights), use.held.get("weights"), "tensors held")
        )
    for line in plan.lines:
        if line in weights:
            continue
        measured, note = _measured(line.name, use)
        lines.append(_line(line.name, line.nbytes, measured, note or line.note))
    lines.append(_line("total", plan.total, use.answering_peak, f"{use.source} while answering"))
    lines.append(
        _line("loading", None, use.loading_peak, "peak before the first answer; not part of the plan")
    )
    return {
        "budget_bytes": plan.budget,
        "planned_bytes": plan.total,
        "peak_bytes": max(use.answering_peak, use.loading_peak),
        "used_bytes": use.answering_peak - use.program,
        "program_bytes": use.program,
        "within_plan": use.answering_peak <= plan.total,
        "source": use.source,
        "lines": lines,
    }


def _measured(name: str, use: MemoryUse) -> tuple[int | None, str]:
    if name.startswith("head"):
        return use.held.get("head"), "tensors held"
    if name.startswith("KV"):
        return use.held.get("KV"), "tensors held"
    if name.startswith("CUDA graphs"):
        return use.held.get("CUDA graphs"), "their pool of memory; the driver's own part is not counted"
    if name.startswith("workspace"):
        growth = max(use.answering_peak - use.loaded, 0)
        return growth, "growth while answering; KV pages count when first written"
    if name.startswith("reserve") and use.program:
        return use.program, "the program before loading: Python and its libraries"
    return None, ""


def _line(name: str, planned: int | None, measured: int | None, note: str) -> dict[str, Any]:
    return {"name": name, "planned_bytes": planned, "measured_bytes": measured, "note": note}
