"""Builds the program of `native_cases.cpp`, and reads what it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from treeeagle_edge.kernels.native import build

DRIVER = Path(__file__).with_suffix(".cpp")

Records = dict[str, np.ndarray]


def tool(variable: str, *names: str) -> str:
    """A program by its variable or one of its names; skips the test where there is none."""
    found = os.environ.get(variable) or next((name for name in names if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"needs {' or '.join(names)}, or {variable}")
    return found


def helper_program(compiler: str, source: Path, output: Path, *parts: str) -> Path:
    """A program of these tests, with `parts` of the kernels or of the command."""
    flags = ("-std=c++17", "-pthread", *build.WARNINGS, "-Werror", "-I", str(build.SOURCES))
    build.run_all([(*compiler.split(), *flags, str(source), *parts, "-o", str(output))])
    return output


def records(done: subprocess.CompletedProcess[bytes]) -> Records:
    """What the cases wrote, by name."""
    assert done.returncode == 0, done.stderr.decode()
    found, rest = {}, done.stdout
    while rest:
        line, _, rest = rest.partition(b"\n")
        name, count = line.decode().split()
        found[name] = np.frombuffer(rest, np.float32, int(count))
        rest = rest[found[name].nbytes :]
    return found
