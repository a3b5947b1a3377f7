"""Shows the document of a bench as a Markdown table, as CSV, or as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from treeeagle_edge.bench.document import Document
from treeeagle_edge.markdown_table import aligned_table, number
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.units import GB


def render(document: Document, output: str, *, memory_analysis: bool = False) -> str:
    """The document as "md", "csv" or "json", without a newline at the end.

    JSON always holds the memory analysis; the other two only with `memory_analysis`.
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
        number(entry["tokens_per_round"], 2),
        number(entry["accepted_pct"], 0, " %"),
        number(entry["ttft_ms"], 0, " ms"),
        f"{entry['peak_bytes'] / GB:.2f} GB",
        entry["parity"] or "-",
    )


def _spread(entry: Mapping[str, Any], key: str, digits: int, unit: str = "") -> str:
    deviation = entry[f"{key}_sd"]
    return number(entry[key], digits, unit) + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


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
        (entry["name"], *(number(entry[key], 2, "x") for key in compare["keys"]))
        for entry in compare["ratios"]
    ]
    header = ("new / old", *(key.replace("_tps", " tok/s").replace("_", " ") for key in compare["keys"]))
    return aligned_table(header, rows)
