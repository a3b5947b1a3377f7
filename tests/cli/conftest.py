"""What several tests of commands share."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_fakes import ScriptEngine, fake_runtime, script
from chat_typed import chatting
from hub_stand_in import Hub
from pull_cases import pull_hub

from treeeagle_edge.cli.app import main


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the models and heads that tests of `treeeagle pull` ask for."""
    with pull_hub(tmp_path, monkeypatch) as running:
        yield running


@pytest.fixture
def repl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A chat in this process. Called with the lines that are typed, it returns what was printed."""
    return chatting(capsys)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Runs `treeeagle chat …` over a scripted runtime; returns exit code, stdout and stderr."""

    def run(*arguments: str, engine=None, stdin: bytes | None = b"", codec=None, **runtime):
        loaded = fake_runtime(engine or ScriptEngine([script("The sky is blue.")]), codec, **runtime)

        def load_runtime(settings, *, progress=None):
            run.settings = settings
            progress("loading the model")
            if "raises" in runtime:
                raise runtime["raises"]
            return loaded

        fake = types.ModuleType("treeeagle_edge.runtime")
        fake.load_runtime = load_runtime
        monkeypatch.setitem(sys.modules, "treeeagle_edge.runtime", fake)
        monkeypatch.setattr(sys, "stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin)))
        run.engine = loaded.engine
        code = main(["chat", *arguments])
        return (code, *capsys.readouterr())

    return run
