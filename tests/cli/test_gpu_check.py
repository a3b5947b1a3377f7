"""`treeeagle gpu-check` from end to end: in tiny shapes on the CPU, and its refusals where there is no card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_cases import interpreter_problem

from treeeagle_edge.cli.app import main
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.gpu_check.run import PLAN
from treeeagle_edge.gpu_check.sizes import SIZES

RUN = [sys.executable, "-P", "-m", "treeeagle_edge.cli.app", "gpu-check", "--size", "test", "--minutes", "30"]
NOT_HERE = "not on this device"
_REASON = interpreter_problem()
needs_the_interpreter = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def run(folder: Path, *arguments: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The document and the table of a run on the CPU that failed nowhere."""
    folder.mkdir(exist_ok=True)
    saved = folder / "found.json"
    done = subprocess.run(
        [*RUN, "--device", "cpu", "--save", str(saved), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert saved.with_suffix(".md").read_text() == done.stdout
    return json.loads(saved.read_text()), done.stdout


def run_together(folder: Path, *sections: str, **environment: str) -> list[dict[str, Any]]:
    """The documents of several runs at once, a core each: one for each of `sections`, names with commas between."""

    def part(names: str) -> dict[str, Any]:
        return run(folder / names, "--sections", names, OMP_NUM_THREADS="1", **environment)[0]

    with ThreadPoolExecutor(len(sections)) as pool:
        return list(pool.map(part, sections))


def rows_of(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return next(section["rows"] for section in document["sections"] if section["name"] == name)


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu_and_says_what_needs_a_card(tmp_path: Path) -> None:
    document, table = run(tmp_path, TRITON_INTERPRET="")
    states = {section["name"]: section["status"] for section in document["sections"]}
    needs_a_card = ("kernels", "served", "graphs", "memory")
    assert states == {plan.name: NOT_HERE if plan.name in needs_a_card else "ok" for plan in PLAN}
    assert all(section["rows"] and not section["problems"] for section in document["sections"])
    assert document["environment"]["architecture"] == "cpu" and document["card"].endswith("(cpu)")
    assert document["environment"]["versions"]["torch"] == torch.__version__
    assert "no figure counts" in table and "FAILED" not in table

    parity = rows_of(document, "parity")
    assert {row["attention"] for row in parity} == {"reference", "exact"} and len(parity) == 12
    scripted = [row for row in parity if row["drafts"] == "2 right a round"]
    assert [row["tokens/round"] for row in scripted] == [3.0] * 4
    speed = rows_of(document, "speed")
    assert [row["tokens/round"] for row in speed] == [1, 2, 3, 4]
    assert {row["source"] for row in speed} == {"measured"} and all(row["tokens/s"] > 0 for row in speed)
    products = rows_of(document, "products")
    assert {row["matrix"] for row in products} == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert all("4bit" in row["seen"] for row in products if row["matrix"] != "lm_head")
    linears = rows_of(document, "linears")
    second = rows_of(document, "linears-2")
    for row in (*linears, *second):
        assert (
            row["bitsandbytes us"] > 0 and row["share"] > 0 and row["int8 us"] > 0 and row["int8 share"] > 0
        )
        assert (row["16-bit us"] is None) == (row["matrix"] != "lm_head")
    shapes = [(row["matrix"], row["rows"]) for row in linears]
    assert shapes == [(row["matrix"], row["rows"]) for row in second] and len(set(shapes)) == 10
    assert {row["model"] for row in second} == {"a tiny Qwen2"} != {row["model"] for row in linears}
    assert rows_of(document, "memory")[0]["rounds"] > 0


@pytest.mark.slow
@needs_the_interpreter
def test_its_triton_parts_run_under_the_interpreter(tmp_path: Path) -> None:
    """Parity, attention, products and every kernel, in processes of their own as Triton's other tests.

    The interpreter takes one core, and parity half of the time.
    """
    sections = "bandwidth,kernels,served,attention,linears,passes"
    document, other = run_together(tmp_path, sections, "parity", TRITON_INTERPRET="1")
    assert [section["name"] for section in document["sections"]] == [
        plan.name for plan in PLAN if plan.name in sections.split(",")
    ]
    kernels = rows_of(document, "kernels")
    assert len(kernels) >= 20 and all(
        row["result"] == "ok" and row["error"] <= row["limit"] for row in kernels
    )
    assert all(
        row["triton us"] > 0 for row in (*rows_of(document, "attention"), *rows_of(document, "linears"))
    )
    *served, product = rows_of(document, "served")
    layers = SIZES["test"].main.config.num_layers
    assert [row["result"] for row in served] == ["ok"] * 4
    assert [row["verify"] for row in served] == [layers, 2 * layers + 1, layers, layers]
    assert [row["step"] for row in served] == [1, 4, 1, 1]
    assert product["verify"] == 0 and "bitsandbytes multiplies" in product["result"]
    parity = [row for row in rows_of(other, "parity") if row["attention"] == "triton"]
    assert len(parity) == 6 and all(row["result"].startswith("ok") for row in parity)
    eager = [row for row in rows_of(document, "passes") if row["how"] == "eager"]
    assert [row["attention"] for row in eager] == ["reference", "triton"]
    assert all(row["verify/decode"] > 0 and row["step/decode"] > 0 for row in eager)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_card_every_kernel_is_right_and_passes_can_be_captured(tmp_path: Path) -> None:
    """Part of the check in full: an 8B in random weights. All of it takes minutes."""
    saved = tmp_path / "found.json"
    assert main(["gpu-check", "--sections", "bandwidth,kernels,graphs", "--save", str(saved)]) == 0
    document = json.loads(saved.read_text())
    assert {section["status"] for section in document["sections"]} == {"ok"}
    assert document["environment"]["architecture"].startswith("sm_")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card to check")
def test_without_a_card_it_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: device cuda cannot be used: ") and " hint: " in err


@pytest.mark.parametrize("hint", ["use --device cpu", "use one of cuda:0, or --device cpu"])
def test_the_cpu_is_not_offered_in_place_of_a_card(
    hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: str) -> None:
        raise CannotRunError(f"device {device} cannot be used: no driver answered", hint)

    monkeypatch.setattr("treeeagle_edge.hardware.detection.detect", refuse)
    assert main(["gpu-check"]) == 3
    assert capsys.readouterr().err == (
        "error: device cuda cannot be used: no driver answered\n"
        " hint: this checks an NVIDIA card; treeeagle profile says what was found\n"
    )


def test_the_hint_of_a_fault_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: str) -> None:
        raise CannotRunError("the NVIDIA driver failed", "restart the computer")

    monkeypatch.setattr("treeeagle_edge.hardware.detection.detect", refuse)
    assert main(["gpu-check"]) == 3
    assert " hint: restart the computer\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "cpu"], "--device cpu is no card, and this checks one"),
        (["--sections", "kernels,speeed"], "there is no section speeed of the GPU check"),
        (["--minutes", "0"], "--minutes is 0, which is out of range"),
        (["--size", "huge"], "--size 'huge' is not a size"),
    ],
)
def test_wrong_options_are_refused_first(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu-check", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_help_says_what_it_needs_and_hides_the_test_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--help"]) == 0
    text = capsys.readouterr().out
    assert "nothing is downloaded" in " ".join(text.split()) and "--size" not in text
