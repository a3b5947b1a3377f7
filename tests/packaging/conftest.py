"""What tests of the scripts in docs/ share."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


@pytest.fixture
def script(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Imports a module of docs/ by name."""
    monkeypatch.syspath_prepend(str(repository / "docs"))
    return importlib.import_module


@pytest.fixture
def run(script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """Runs a script in this process: its exit code and its JSON."""

    def run_it(name: str, *options: str) -> tuple[int, dict]:
        output = tmp_path / f"{name}.json"
        module = script(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, "-o", str(output)])
        code = script("measuring.runs").run(module.main)
        return code, json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}

    return run_it
