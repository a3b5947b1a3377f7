"""A picture of a training run: its loss, and how well each step predicts the held-out dialogues."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treeeagle_edge.training.trainer import Record


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_training(record: Record, title: str, path: Path) -> None:
    """Write the picture of `record` to `path` (PNG or SVG)."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, hits, depth = figure.subplots(1, 3)
    if record.loss:
        loss.plot(*zip(*record.loss, strict=True), color="#2e7d4f", label="training, smoothed")
    _label(loss, "step", "cross-entropy over all unrolled steps, nats", "loss")
    judged = [entry["step"] for entry in record.held_out]
    steps = len(record.held_out[-1]["hits"])
    for step in range(steps):
        shares = [100 * entry["hits"][step] for entry in record.held_out]
        hits.plot(judged, shares, marker=".", label=f"step {step + 1}")
    hits.legend(fontsize=8)
    _label(hits, "step", "% of tokens predicted", "held-out dialogues")
    last = record.held_out[-1]["accepted"]
    depth.plot(range(1, steps + 1), [100 * share for share in last], marker="o", color="#2e7d4f")
    depth.set_ylim(0, 100)
    depth.xaxis.get_major_locator().set_params(integer=True)
    _label(depth, "depth", "% of chains that are right so far", "held out, at the end")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
