"""Markdown tables that also line up as plain text in a terminal."""

from __future__ import annotations

from collections.abc import Sequence


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


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A cell: `value` with so many digits after the point and its unit, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
