"""The picture of a report on a head."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from treeeagle_edge.errors import InputError
from treeeagle_edge.head_report import plot as head_report_plot

pytestmark = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is optional")


def document(*, measured: bool = True) -> dict[str, Any]:
    """Two budgets; two bins that hold nodes, one of them nine times as many, and an empty one between."""
    counts = (90, 0, 10) if measured else (0, 0, 0)
    bins = [
        {"nodes": nodes, "predicted": 0.3 * at + 0.1 if nodes else None, "observed": 0.05 if nodes else None}
        for at, nodes in enumerate(counts)
    ]
    budgets = [
        {
            "nodes": nodes,
            "tokens_per_round": 1.75 if measured else None,
            "acceptance_by_depth": [0.5, share] if measured else [],
        }
        for nodes, share in ((4, 0.25), (16, 0.375))
    ]
    error = 0.1 if measured else None
    calibration = {"nodes": 16, "judged": sum(counts), "expected_calibration_error": error, "bins": bins}
    return {
        "settings": {"model": "m", "head": "h", "bits": 8},
        "summary": {"budgets": budgets, "calibration": calibration},
    }


def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure().subplots()


def test_a_bin_without_nodes_has_no_point_and_areas_follow_the_counts() -> None:
    drawn = axes()
    head_report_plot.draw_reliability(drawn, document())
    (points,) = drawn.collections
    assert points.get_offsets()[:, 0].tolist() == pytest.approx([0.1, 0.7])
    assert points.get_offsets()[:, 1].tolist() == [0.05, 0.05]
    large, small = points.get_sizes()
    assert large == pytest.approx(9 * small)
    assert [text.get_text() for text in drawn.get_legend().get_texts()] == [
        "calibrated",
        "100 nodes, calibration error 0.100",
    ]


def test_each_budget_has_its_line() -> None:
    drawn = axes()
    head_report_plot.draw_depth(drawn, document())
    assert [list(line.get_ydata()) for line in drawn.lines] == [[50, 25], [50, 37.5]]
    assert [list(line.get_xdata()) for line in drawn.lines] == [[1, 2], [1, 2]]
    assert drawn.lines[1].get_label() == "16 nodes, 1.75 tokens a round"


@pytest.mark.parametrize("measured", [True, False], ids=["measured", "nothing-measured"])
def test_png_and_svg_are_written(tmp_path: Path, measured: bool) -> None:
    head_report_plot.draw(document(measured=measured), tmp_path / "head.png")
    assert (tmp_path / "head.png").read_bytes().startswith(b"\x89PNG")
    head_report_plot.draw(document(measured=measured), tmp_path / "head.svg")
    assert "<svg" in (tmp_path / "head.svg").read_text(encoding="utf-8")


def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write .*head\.png"):
        head_report_plot.draw(document(), tmp_path / "gone" / "head.png")
