"""The picture of a bench."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from treeeagle_edge.bench import plot as bench_plot
from treeeagle_edge.errors import InputError, UsageError


def entry(name: str, **changes: object) -> dict[str, object]:
    values: dict[str, object] = {
        "name": name,
        "plain_tps": 100.0,
        "plain_tps_sd": None,
        "tree_tps": 210.0,
        "tree_tps_sd": 4.0,
        "speedup": 2.1,
        "acceptance_by_depth": [0.7, 0.5],
    }
    return {**values, **changes}


def document(**changes: object) -> dict[str, object]:
    settings = {"model": "m", "bits": 16}
    rows = [entry("chat", **changes), entry("maths", **changes)]
    return {
        "settings": settings,
        "environment": {"device": "cpu"},
        "scenarios": rows,
        "summary": entry("all", **changes),
    }


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_png_and_svg_are_drawn(tmp_path: Path):
    bench_plot.draw(document(), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    bench_plot.draw(document(), tmp_path / "speed.svg")
    assert "<svg" in (tmp_path / "speed.svg").read_text(encoding="utf-8")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_a_run_without_a_tree_arm_is_drawn(tmp_path: Path):
    plain = document(tree_tps=None, tree_tps_sd=None, speedup=None, acceptance_by_depth=[])
    bench_plot.draw(plain, tmp_path / "plain.png")
    assert (tmp_path / "plain.png").stat().st_size > 1000


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is optional")
def test_a_picture_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot write .*speed\.png"):
        bench_plot.draw(document(), tmp_path / "gone" / "speed.png")


def test_other_formats_and_missing_folders_are_refused_before_the_run(tmp_path: Path):
    with pytest.raises(UsageError, match=r"speed\.pdf is neither PNG nor SVG"):
        bench_plot.check_plot(tmp_path / "speed.pdf")
    with pytest.raises(InputError, match="is not a folder"):
        bench_plot.check_plot(tmp_path / "gone" / "speed.png")


def test_a_missing_matplotlib_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_plot, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs matplotlib") as caught:
        bench_plot.check_plot(tmp_path / "speed.png")
    assert "pip install" in str(caught.value.hint)
