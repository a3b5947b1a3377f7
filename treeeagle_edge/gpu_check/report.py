"""Shows the document of the GPU check as Markdown: a table of all sections, then a table for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treeeagle_edge.markdown_table import aligned_table

Document = dict[str, Any]


def render(document: Document) -> str:
    """The document as Markdown, without tracebacks and without a newline at the end."""
    parts = [_heading(document), _summary(document["sections"])]
    parts += [_section(section) for section in document["sections"] if section["rows"] or section["notes"]]
    return "\n\n".join(part for part in parts if part)


def _heading(document: Document) -> str:
    environment = document["environment"]
    if not environment:
        return "# GPU check\n\nNo worker could be started."
    facts = [
        _amount(environment["multiprocessors"], "", " multiprocessors"),
        _amount(environment["memory_bytes"], "", " GB", 1e9),
        _amount(environment["l2_bytes"], "L2 ", " MB", 1e6),
        f"driver {environment['driver']}" if environment["driver"] else "",
        *(f"{name} {version}" for name, version in environment["versions"].items() if version),
    ]
    what = (
        "figures of this card alone"
        if document["size"] == "full"
        else "a test of the check itself: no figure counts"
    )
    return (
        f"# GPU check: {document['card']}\n\n{', '.join(fact for fact in facts if fact)}\n\n"
        f"Random weights, {what}; {document['seconds']:.0f} s of {60 * document['minutes']:.0f} s."
    )


def _amount(value: float | None, before: str, after: str, unit: float = 1.0) -> str:
    return "" if value is None else f"{before}{value / unit:,.0f}{after}"


def _summary(sections: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (section["title"], section["status"], f"{section['seconds']:.0f} s", _cell(section["reason"] or ""))
        for section in sections
    ]
    return aligned_table(("section", "result", "time", "reason"), rows, left=(0, 1, 3)) if rows else ""


def _section(section: Mapping[str, Any]) -> str:
    parts = [f"## {section['title']} ({section['card']})"]
    if section["rows"]:
        columns = list(dict.fromkeys(key for row in section["rows"] for key in row if key != "result"))
        columns = [key for key in columns if any(row.get(key) is not None for row in section["rows"])]
        cells = [(*(_cell(row.get(key)) for key in columns), _cell(row["result"])) for row in section["rows"]]
        words = [
            index
            for index, key in enumerate(columns)
            if any(isinstance(row.get(key), str) for row in section["rows"])
        ]
        parts.append(aligned_table((*columns, "result"), cells, left=(*words, len(columns))))
    parts += ["\n".join(f"- {note}" for note in section["notes"])] if section["notes"] else []
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else str(value).replace("|", "\\|")
    )
