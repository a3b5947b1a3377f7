"""What several tests of commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_typed import chatting
from hub_stand_in import Hub
from pull_cases import pull_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the models and heads that tests of `treeeagle pull` ask for."""
    with pull_hub(tmp_path, monkeypatch) as running:
        yield running


@pytest.fixture
def repl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A chat in this process. Called with the lines that are typed, it returns what was printed."""
    return chatting(capsys)
