"""A hub that holds one model, and what is asked of it and of the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_stand_in import CHUNK, Hub, running_hub, use_hub

from treeeagle_edge.hub.cache import CacheFolder
from treeeagle_edge.hub.fetch import fetch_repository
from treeeagle_edge.hub.repository import look_up
from treeeagle_edge.progress import silent

NAME = "org/name"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
WEIGHTS = random.Random(7).randbytes(40 * CHUNK + 123)
DEAD = [0] * 20  # answers of a line that gives nothing any more


@contextmanager
def hub_with_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that holds one model, and this process's client turned to it."""
    with running_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        files = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": WEIGHTS}
        hub.add(NAME, {**files, "README.md": "hello", "original/model.safetensors": b"x" * 5000})
        yield hub


def fetched(said: list[str] | None = None) -> Path:
    return fetch_repository(NAME, "model", silent if said is None else said.append)


def place(what: str = "partial") -> Path:
    """Where the weights lie in the cache, whole ("blob") or while they come ("partial")."""
    repository = look_up(NAME)
    return getattr(CacheFolder(repository), what)(repository.file("model.safetensors"))


def ranges(hub: Hub) -> list[str | None]:
    """The ranges that the storage was asked for."""
    return [seen.range for seen in hub.asked("model.safetensors") if seen.host == "localhost"]
