"""What `treeeagle pull` is tried with: a hub, a model, a head, and where they land."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_model import CONFIG
from hub_stand_in import CHUNK, Hub, running_hub, use_hub

from treeeagle_edge.cli.app import main

WEIGHTS = random.Random(11).randbytes(40 * CHUNK)
MODEL = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": WEIGHTS}
HEAD = {"config.json": {"draft_vocab_size": 8}, "pytorch_model.bin": WEIGHTS[: 9 * CHUNK]}


@contextmanager
def pull_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and this process's client turned to it."""
    with running_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        hub.add("org/name", MODEL)
        yield hub


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["pull", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def snapshot(hub: Hub, tmp_path: Path, name: str = "org/name") -> Path:
    return tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / hub.commit(name)
