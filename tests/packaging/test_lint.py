"""The style of the project holds: ruff's rules, ruff's format and mypy's types, as pyproject.toml sets them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("ruff", ("-m", "ruff", "check")),
        ("ruff", ("-m", "ruff", "format", "--check")),
        ("mypy", ("tests/packaging/run_mypy.py",)),
    ],
    ids=["ruff-check", "ruff-format", "mypy"],
)
def test_style(tool: str, arguments: tuple[str, ...], repository: Path) -> None:
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed")
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
