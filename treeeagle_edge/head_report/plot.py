"""Draws the report on a head: a reliability diagram beside acceptance by depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeeagle_edge.bench.document import Document
from treeeagle_edge.bench.plot import draw_acceptance, save
from treeeagle_edge.markdown_table import number

_LARGEST_POINT = 220  # square points, for the bin with most nodes
_COLOUR = "#2e7d4f"


def draw(document: Document, path: Path) -> None:
    """Write the picture. `treeeagle_edge.bench.plot.check_plot` says beforehand whether that can work.

    Raises InputError where the file cannot be written.
    """
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    reliability, depth = figure.subplots(1, 2)
    draw_reliability(reliability, document)
    draw_depth(depth, document)
    chosen = document["settings"]
    figure.suptitle(f"{chosen['head']} for {chosen['model']}, {chosen['bits']}-bit", fontsize=10)
    save(figure, path)


def draw_reliability(axes: Any, document: Document) -> None:
    """One point for each bin that holds nodes, over all prompts. Its area shows the bin's share of the nodes."""
    calibration = document["summary"]["calibration"]
    bins = [item for item in calibration["bins"] if item["nodes"]]
    axes.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", label="calibrated")
    if bins:
        most = max(item["nodes"] for item in bins)
        predicted, observed = ([item[key] for item in bins] for key in ("predicted", "observed"))
        axes.plot(predicted, observed, color=_COLOUR, linewidth=1)
        axes.scatter(
            predicted,
            observed,
            s=[max(_LARGEST_POINT * item["nodes"] / most, 8) for item in bins],
            color=_COLOUR,
            alpha=0.7,
            clip_on=False,  # a share of 0 or 1 lies on the edge
            label=f"{calibration['judged']:,} nodes, calibration error {calibration['expected_calibration_error']:.3f}",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")
    axes.set_xlabel("probability the head gives a node, its parent accepted")
    axes.set_ylabel("share accepted")
    axes.set_title(f"reliability, {calibration['nodes']} nodes")
    axes.legend(loc="upper left", fontsize=8)


def draw_depth(axes: Any, document: Document) -> None:
    """One line for each budget, over all prompts."""
    lines: list[tuple[str, list[float], dict[str, Any]]] = [
        (
            f"{entry['nodes']} nodes, {number(entry['tokens_per_round'], 2)} tokens a round",
            entry["acceptance_by_depth"],
            {},
        )
        for entry in document["summary"]["budgets"]
    ]
    draw_acceptance(axes, lines, share_of="rounds", nothing="no round")
