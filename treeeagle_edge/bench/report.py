"""The result of a bench as one JSON document; the table and the CSV are drawn from that document."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from treeeagle_edge.bench.samples import PLAIN, TREE, BenchRun, Divergence, Sample
from treeeagle_edge.bench.stats import BenchRow, Figure, bench_row, repetition_speeds, scenario_rows
from treeeagle_edge.rounds import TreeShape

SCHEMA = "treeeagle-bench/1"
_MARGIN_OF_A_TIE = 0.25  # logits: two steps of a bf16 number between 16 and 32, where the largest logits lie

Document = dict[str, Any]


def build_document(
    run: BenchRun,
    *,
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    memory: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Document:
    """Everything the bench knows, in the form of `-o json`; see docs/measurements.md for the keys."""
    total = bench_row("all", run.samples, run.divergences)
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "settings": dict(settings),
        "scenarios": [_row_entry(row) for row in scenario_rows(run)],
        "memory": dict(memory),
        "summary": _row_entry(total),
        "notes": [*notes, *result_notes(run, total, settings)],
    }


def result_notes(run: BenchRun, total: BenchRow, settings: Mapping[str, Any]) -> list[str]:
    """Sentences about the result that a reader of the table must not miss."""
    notes: list[str] = []
    if run.interrupted:
        kept = f"{run.repetitions} complete" if run.repetitions else "part of the first"
        notes.append(f"interrupted: the figures hold {kept} of {run.limits.repetitions} repetitions")
    if run.arms == (PLAIN,):
        notes.append("only the plain arm ran, so there is no speedup and no parity to show")
    if total.speedup and total.speedup.mean < 1:
        notes.append(
            "the tree arm is slower than plain decoding here: --no-spec, or fewer --nodes, is faster"
        )
    if run.divergences:
        notes.append(divergence_note(run.divergences, settings))
    failures = sum(sample.draft_failures for sample in run.samples)
    if failures:
        notes.append(f"{failures} rounds fell back to plain decoding because the head gave non-finite scores")
    return notes


def divergence_note(divergences: Sequence[Divergence], settings: Mapping[str, Any]) -> str:
    """What a difference between the arms means at these settings."""
    count = "1 answer differs" if len(divergences) == 1 else f"{len(divergences)} answers differ"
    if settings.get("bits") == 32 or settings.get("exact"):
        return f"FAILURE: {count}, which must not happen at 32 bits or with --exact; please report it"
    margins = [item.margin for item in divergences if item.margin is not None]
    if len(margins) == len(divergences) and max(margins) <= _MARGIN_OF_A_TIE:
        return f"{count}: a tie within {max(margins):.3f} logits, which rounding decides; --bits 32 has none"
    return f"{count}: a margin near 0 is a tie that rounding decides, a large one is a defect; see --bits 32"


def _row_entry(row: BenchRow) -> dict[str, Any]:
    plain, tree = repetition_speeds(row.samples, PLAIN), repetition_speeds(row.samples, TREE)
    return {
        "name": row.name,
        "tokens": row.tokens,
        "plain_tps": _mean(row.plain_tps),
        "plain_tps_sd": _deviation(row.plain_tps),
        "tree_tps": _mean(row.tree_tps),
        "tree_tps_sd": _deviation(row.tree_tps),
        "speedup": _mean(row.speedup),
        "speedup_sd": _deviation(row.speedup),
        "tokens_per_round": row.tokens_per_round,
        "accepted_pct": row.accepted_pct,
        "acceptance_by_depth": list(row.acceptance_by_depth),
        "ttft_ms": _mean(row.ttft_ms),
        "ttft_ms_sd": _deviation(row.ttft_ms),
        "peak_bytes": row.peak_bytes,
        "parity": parity_text(row),
        "divergences": [asdict(item) for item in row.divergences],
        "repetitions": [
            {"plain_tps": plain.get(number), "tree_tps": tree.get(number)}
            for number in sorted({*plain, *tree})
        ],
        "samples": [_sample_entry(sample) for sample in row.samples],
    }


def _sample_entry(sample: Sample) -> dict[str, Any]:
    entry = asdict(sample)
    entry["token_ids"] = list(entry.pop("ids"))
    entry["offered"], entry["reached"] = list(sample.offered), list(sample.reached)
    entry["completion_tokens"] = len(sample.ids)
    entry["tps"] = sample.decoded / sample.decode_s if sample.decode_s > 0 and sample.decoded else None
    return entry


def _mean(figure: Figure | None) -> float | None:
    return figure.mean if figure else None


def _deviation(figure: Figure | None) -> float | None:
    return figure.deviation if figure else None


def parity_text(row: BenchRow) -> str | None:
    """The word same, or the earliest difference with its margin and their number; None without a tree arm."""
    if not row.pairs:
        return None
    if not row.divergences:
        return "same"
    first = min(row.divergences, key=lambda item: item.token)
    margin = f" (margin {first.margin:.3f})" if first.margin is not None else ""
    rest = f", {len(row.divergences)} of {row.pairs} answers" if row.pairs > 1 else ""
    return f"differs @ token {first.token}{margin}{rest}"


def render(document: Document, output: str, *, memory_analysis: bool = False) -> str:
    """The document as "md", "csv" or "json", without a newline at the end.

    The memory table is part of the JSON always, of the others where `memory_analysis` asks for it.
    """
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=False)
    if output == "csv":
        parts = [_csv(document)]
        return "\n\n".join([*parts, _memory_csv(document)] if memory_analysis else parts)
    parts = [_heading(document), _table(document)]
    if memory_analysis:
        parts.append(_memory_table(document))
    if "compare" in document:
        parts.append(_compare_table(document))
    parts.append("\n".join(f"- {note}" for note in document["notes"]))
    return "\n\n".join(part for part in parts if part)


def aligned_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """A Markdown table that also lines up as plain text; columns not in `left` are right-aligned."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join(
        "-" * width if column in left else "-" * (width - 1) + ":" for column, width in enumerate(widths)
    )
    return "\n".join([line(header), rule + " |", *(line(row) for row in rows)])


def _heading(document: Document) -> str:
    chosen, environment = document["settings"], document["environment"]
    head = f"head {chosen['head']}" if chosen.get("head") else "no head"
    if chosen.get("head_bits"):
        head += f", {chosen['head_bits']}-bit"
    parts = [str(chosen["model"]), f"{chosen['bits']}-bit", head, str(environment["device"])]
    if chosen.get("tree"):
        parts.append(f"tree {TreeShape(**chosen['tree']).label}")
    parts.append(f"{chosen['max_tokens']} tokens x {chosen['repetitions']}")
    return " · ".join(parts)


def _table(document: Document) -> str:
    header = (
        "scenario", "tokens", "plain tok/s", "tree tok/s", "speedup",
        "tokens/round", "accepted", "ttft", "peak memory", "parity",
    )  # fmt: skip
    rows = [_cells(entry) for entry in (*document["scenarios"], document["summary"])]
    return aligned_table(header, rows, left=(0, len(header) - 1))


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        entry["name"].replace("|", "\\|"),
        f"{entry['tokens']:,}",
        _spread(entry, "plain_tps", 1),
        _spread(entry, "tree_tps", 1),
        _spread(entry, "speedup", 2, "x"),
        _number(entry["tokens_per_round"], 2),
        _number(entry["accepted_pct"], 0, " %"),
        _number(entry["ttft_ms"], 0, " ms"),
        f"{entry['peak_bytes'] / 1e9:.2f} GB",
        entry["parity"] or "-",
    )


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _spread(entry: Mapping[str, Any], key: str, digits: int, unit: str = "") -> str:
    deviation = entry[f"{key}_sd"]
    return _number(entry[key], digits, unit) + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


_CSV_COLUMNS = (
    "name", "tokens", "plain_tps", "plain_tps_sd", "tree_tps", "tree_tps_sd", "speedup", "speedup_sd",
    "tokens_per_round", "accepted_pct", "ttft_ms", "ttft_ms_sd", "peak_bytes", "parity",
)  # fmt: skip


def _csv(document: Document) -> str:
    return _csv_text(
        ("scenario", *_CSV_COLUMNS[1:]),
        [[entry[key] for key in _CSV_COLUMNS] for entry in (*document["scenarios"], document["summary"])],
    )


def _csv_text(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return buffer.getvalue().rstrip("\n")


def _memory_csv(document: Document) -> str:
    lines = document["memory"]["lines"]
    return _csv_text(
        ("memory", "planned_bytes", "measured_bytes", "note"),
        [[line["name"], line["planned_bytes"], line["measured_bytes"], line["note"]] for line in lines],
    )


def _memory_table(document: Document) -> str:
    rows = [
        (line["name"], _megabytes(line["planned_bytes"]), _megabytes(line["measured_bytes"]), line["note"])
        for line in document["memory"]["lines"]
    ]
    return aligned_table(("memory", "planned", "measured", "note"), rows, left=(0, 3))


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:,.1f} MB"


def _compare_table(document: Document) -> str:
    compare = document["compare"]
    rows = [
        (entry["name"], *(_number(entry[key], 2, "x") for key in compare["keys"]))
        for entry in compare["ratios"]
    ]
    header = ("new / old", *(key.replace("_tps", " tok/s").replace("_", " ") for key in compare["keys"]))
    return aligned_table(header, rows)
