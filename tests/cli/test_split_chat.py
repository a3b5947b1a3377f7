"""An answer over layers in two places, from the command line to the text: the places here are two names of the CPU."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from treeeagle_edge import runtime as runtime_module
from treeeagle_edge.cli.app import main
from treeeagle_edge.hardware.detection import Hardware, detect
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.runtime import load_runtime
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.units import GB

PLACES = ("cpu", "cpu:0")
OPTIONS = ["--kernels", "torch", "--bits", "32", "--context", "256", "--threads", "1", "--temperature", "0"]


@dataclass(frozen=True)
class Place(Gpu):
    """A card that is a name of the CPU."""

    @property
    def device(self) -> str:
        return PLACES[self.index]


def with_places(device: str | None = None) -> Hardware:
    here = detect("cpu")
    gpus = tuple(Place(i, f"place {i}", 4 * GB, 3 * GB, usable=True) for i in range(2))
    return Hardware("cpu", "for a test", here.cpu, here.ram, gpus, together=PLACES, asked_together=True)


@pytest.fixture
def two_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "detect", with_places)


def answer(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert (
        main(["chat", "--model", str(model), *OPTIONS, "-p", "one two", "--max-tokens", "16", "--json"]) == 0
    )
    out, err = capsys.readouterr()
    return json.loads(out)["token_ids"], " ".join(err.split())


def test_the_answer_is_that_of_one_place(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, talk = answer(tiny_checkpoint, capsys, monkeypatch)
    assert "split" not in talk
    monkeypatch.setattr(runtime_module, "detect", with_places)
    split, talk = answer(tiny_checkpoint, capsys, monkeypatch)
    assert split == alone
    assert talk.count("layers are split over cpu (1), cpu:0 (1), as --device asks") == 1
    assert "place 0 (4.0 GB) + place 1 (4.0 GB)" in talk


def test_what_is_loaded_lies_where_the_plan_says(tiny_checkpoint: Path, two_places: None) -> None:
    loaded = load_runtime(RunSettings(str(tiny_checkpoint), kernels="torch", bits=32, context=256, threads=1))
    target = loaded.engine.target
    assert [str(place) for place in target.layer_devices] == ["cpu", "cpu:0"]
    assert loaded.other_devices == ("cpu:0",) and loaded.device == "cpu"
    assert len(loaded.engine._passes.store.rest) == 1
    held = loaded.engine.target.nbytes
    planned = sum(loaded.plan.line(name).nbytes for name in ("weights", "embedding"))
    assert held == planned


def test_a_card_with_less_room_than_the_plan_saw_is_a_sentence(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another program was faster: said with what the plan counted on, and no traceback."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(runtime_module, "detect", with_places)
    monkeypatch.setattr(runtime_module, "load_models", full)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["chat", "--model", str(tiny_checkpoint), *OPTIONS, "-p", "one"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "the memory of cpu and cpu:0 ran out while loading; 6.0 GB were free when the plan was made" in said
    )
    assert "hint: close what else uses the card" in said and "Traceback" not in said
