"""Draws the result of a bench: speed in each scenario, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treeeagle_edge.bench.document import Document
from treeeagle_edge.errors import InputError, UsageError, reason_of

_PLAIN_COLOUR, _TREE_COLOUR = "#8c96a3", "#2e7d4f"


def check_plot(path: Path) -> None:
    """Raise UsageError or InputError where a picture could not be written to `path`, before anything is measured."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise UsageError(
            f"--plot {path.name} is neither PNG nor SVG", "give a name that ends in .png or .svg"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"--plot cannot write to {path.parent}, which is not a folder", "make the folder first"
        )
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "pip install matplotlib")


def draw(document: Document, path: Path) -> None:
    """Write the picture. Raises InputError where the file cannot be written."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, depth = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_speed(speed, document)
    _draw_depth(depth, document)
    chosen = document["settings"]
    figure.suptitle(
        f"{chosen['model']}, {chosen['bits']}-bit, {document['environment']['device']}", fontsize=10
    )
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file's suffix. Raises InputError where it cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"cannot write {path}: {reason_of(error)}", "give another name to --plot") from error


def _draw_speed(axes: Any, document: Document) -> None:
    entries = document["scenarios"]
    arms = [("plain", "plain_tps", -0.2, _PLAIN_COLOUR), ("tree", "tree_tps", 0.2, _TREE_COLOUR)]
    for label, key, shift, colour in arms:
        shown = [(at, entry) for at, entry in enumerate(entries) if entry[key] is not None]
        if shown:
            places, heights = [at + shift for at, _ in shown], [entry[key] for _, entry in shown]
            axes.bar(places, heights, width=0.38, color=colour, label=label)
            deviations = [entry[f"{key}_sd"] for _, entry in shown]
            if None not in deviations:
                axes.errorbar(places, heights, yerr=deviations, fmt="none", ecolor="black", capsize=3)
    for at, entry in enumerate(entries):
        if entry["speedup"] is not None:
            axes.annotate(
                f"{entry['speedup']:.2f}x",
                (at + 0.2, entry["tree_tps"]),
                ha="center",
                va="bottom",
                fontsize=8,
            )
    axes.set_xticks(range(len(entries)), [entry["name"] for entry in entries], rotation=15)
    axes.set_ylabel("tokens a second")
    axes.set_title("speed by scenario")
    axes.margins(y=0.2)  # room for the legend above the bars
    axes.legend(loc="upper left", ncols=2)


def _draw_depth(axes: Any, document: Document) -> None:
    overall: dict[str, Any] = {"color": _TREE_COLOUR, "linewidth": 2.5}
    lines = [
        (entry["name"], entry["acceptance_by_depth"], {"linewidth": 1}) for entry in document["scenarios"]
    ]
    summary = document["summary"]
    draw_acceptance(
        axes,
        [*lines, (summary["name"], summary["acceptance_by_depth"], overall)],
        share_of="trees",
        nothing="no tree arm",
    )


def draw_acceptance(
    axes: Any,
    lines: Sequence[tuple[str, Sequence[float], Mapping[str, Any]]],
    *,
    share_of: str,
    nothing: str,
) -> None:
    """Acceptance by depth: a line for each (label, shares from depth 1, style); lines without shares are left out.

    share_of: what 100 % stands for, as text of the axis. nothing: the text where there is no line at all.
    """
    for label, shares, style in lines:
        if shares:
            percents = [100 * share for share in shares]
            axes.plot(range(1, len(shares) + 1), percents, marker="o", label=label, **style)
    axes.set_ylim(0, 100)
    axes.set_xlabel("depth in the tree")
    axes.set_ylabel(f"% of {share_of} whose walk got there")
    axes.set_title("acceptance by depth")
    if axes.lines:
        axes.legend(fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.text(0.5, 50, nothing, ha="center")
