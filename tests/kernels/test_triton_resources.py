"""Every launch of the Triton kernels compiles for the cards in mind, and fits them: no card is needed for that."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CARDS = {86: 99, 89: 99, 90: 227, 120: 99}  # KB of shared memory
KERNELS = (
    "prefix",
    "ancestors",
    "ancestor table",
    "KV write",
    "rotate",
    "RMSNorm",
    "SiLU",
    "random words",
    "int8 codes",
    "int8 sums",
    "4-bit product",
)
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What every launch takes on every card: compiled by a process that does not interpret, kept for the next run."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(request.config.cache.mkdir("triton"))
    command = [sys.executable, "-P", "-m", "treeeagle_edge.kernels.triton.resources", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_every_kernel_is_compiled_for_every_card(compiled: list[dict[str, Any]]) -> None:
    for kernel in KERNELS:
        cards = {found["capability"] for found in compiled if found["kernel"].startswith(kernel)}
        assert cards == set(CARDS), kernel


@pytest.mark.slow
def test_nothing_spills_and_shared_memory_suffices(compiled: list[dict[str, Any]]) -> None:
    from treeeagle_edge.kernels.triton.resources import Usage, table

    print(table([Usage(**found) for found in compiled]))
    too_much = [
        found for found in compiled if found["spilled"] or found["shared"] > CARDS[found["capability"]] * 1024
    ]
    assert too_much == []
    assert all(0 < found["registers"] <= 255 for found in compiled)
    assert max(found["shared"] for found in compiled) > 32 * 1024  # the figures are read, not defaults


def test_a_launch_asks_for_what_is_compiled_here() -> None:
    """Every argument has its name, and Triton's launch finds the types, constants and alignments that `resources` does:
    what is known about registers and memory is known about the code that a card would run.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    program = Path(__file__).parents[1] / "helpers" / "triton_binder.py"
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["launches"] > 50 and found["differing"] == {}


def test_what_does_not_fit_is_told_apart() -> None:
    from treeeagle_edge.kernels.triton.resources import Usage, table

    fine = Usage("some kernel", 86, 4, 100, 99 * 1024, 0)
    cases = (
        fine,
        Usage("some kernel", 89, 4, 255, 1024, 8),
        Usage("some kernel", 90, 4, 100, 100 * 1024, 0),
        Usage("some kernel", 120, 4, 100, 100 * 1024, 0),
    )
    assert [each.fits for each in cases] == [True, False, True, False]
    assert table(list(cases)).splitlines()[-1] == (
        "| some kernel | 4 | 100, 99, 0 | 255, 1, 8 | 100, 100, 0 | 100, 100, 0 |"
    )
