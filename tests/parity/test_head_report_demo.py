"""The demo model and its head on the native kernels: the report agrees with the bench and with itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from treeeagle_edge.cli.app import main
from treeeagle_edge.kernels.native.loader import problem

pytestmark = pytest.mark.skipif(problem() is not None, reason=f"no native kernels: {problem()}")

ANSWERS = (
    *("--model", "smollm2-135m", "--head", "smollm2-135m-eagle3", "--bits", "8", "--device", "cpu"),
    *("--context", "1024", "--threads", "1", "--max-tokens", "20", "--depth", "4", "-o", "json"),
)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    turns = ["Why is the sky blue?", "Name three rivers of Europe."]
    path.write_text("\n".join(json.dumps({"turns": [turn]}) for turn in turns), encoding="utf-8")
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_agrees_with_the_bench(
    demo_gguf: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two programs over one engine: 8 nodes in both must give the same rounds, whatever budgets stand beside them."""
    asked = ("--prompts", str(questions), "--branching", "4")
    report = printed(capsys, "eval-head", *ANSWERS, *asked, "--budgets", "2,8")
    bench = printed(capsys, "bench", *ANSWERS, *asked, "--nodes", "8", "--repetitions", "1")["summary"]
    (row,) = report["rows"]
    assert row["budgets"] == report["summary"]["budgets"]
    small, large = row["budgets"]
    samples = [sample for sample in bench["samples"] if sample["arm"] == "tree"]
    assert large["tokens_per_round"] == bench["tokens_per_round"]
    assert large["rounds"] == sum(sample["rounds"] for sample in samples)
    assert large["tokens"] == small["tokens"] == bench["tokens"]  # the text is that of plain decoding
    assert large["tokens_per_round"] > 1.2  # the head is the demo model's own
    assert large["tokens_per_round"] >= small["tokens_per_round"]
    for entry in row["budgets"]:
        shares = entry["acceptance_by_depth"]
        assert sum(shares) == pytest.approx(entry["tokens_per_round"] - 1)
        assert shares == sorted(shares, reverse=True)
        assert 0 < entry["first_token_acceptance"] < 1
    calibration = row["calibration"]
    # a walked node is a judged one, so the bins hold every accepted token
    walked = sum(item["nodes"] * (item["observed"] or 0) for item in calibration["bins"])
    assert walked == pytest.approx(large["accepted"])
    assert calibration["judged"] == sum(item["nodes"] for item in calibration["bins"])
    for item in calibration["bins"]:
        assert item["predicted"] is None or item["from"] <= item["predicted"] <= item["to"]
