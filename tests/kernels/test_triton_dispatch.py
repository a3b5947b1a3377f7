"""Triton as an attention backend: refused with a reason where it cannot run, imported only where it is used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton_cases import DEVICE, assert_near, needs_triton, normal, tree_view

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.kernels import dispatch, reference, trial, trial_cases
from treeeagle_edge.kernels.trial_cases import ModelShape
from treeeagle_edge.kernels.triton import availability
from treeeagle_edge.kernels.view import BatchView

SLOTS = 80


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with everything: triton, a card of compute capability 8.6, gcc, headers. Nothing is interpreted."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(availability, "_headers", lambda: tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(
        availability.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None
    )
    return monkeypatch


def reason() -> str:
    """Why triton is refused; every refusal brings a hint, leaves the backend as it was, and is not listed."""
    with pytest.raises(CannotRunError) as caught:
        dispatch.set_backend("triton")
    assert caught.value.hint and dispatch.current_backend() == "reference"
    assert dispatch.available_backends() == ("reference", "exact")
    return caught.value.message


def test_is_offered_where_everything_is_there(card: pytest.MonkeyPatch) -> None:
    assert dispatch.available_backends() == ("reference", "exact", "triton")
    with dispatch.use_backend("triton"):
        assert dispatch.current_backend() == "triton"
    assert dispatch.current_backend() == "reference"


def test_is_refused_without_cuda(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "is_available", lambda: False)
    assert "need a CUDA device" in reason()
    card.setenv("TRITON_INTERPRET", "1")
    assert "triton" in dispatch.available_backends()


def test_is_refused_without_triton(card: pytest.MonkeyPatch) -> None:
    card.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in reason()
    card.setenv("TRITON_INTERPRET", "1")
    assert "triton is not installed" in reason()


def test_is_refused_on_a_card_that_is_too_old(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "compute capability 8.0" in reason()


def test_is_refused_without_a_c_compiler(card: pytest.MonkeyPatch) -> None:
    card.setattr(availability.shutil, "which", lambda name: None)
    assert "needs a C compiler" in reason()
    card.setenv("CC", "tcc")
    assert "triton" in dispatch.available_backends()


def test_is_refused_without_the_headers_of_python(card: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on an Ubuntu, or in a WSL2, whose Python came without them: the launcher would not compile."""
    (tmp_path / "Python.h").unlink()
    assert reason() == f"triton needs Python's own headers, and there is no Python.h in {tmp_path}"
    card.setenv("CPATH", "/elsewhere")
    assert "triton" in dispatch.available_backends()


def test_headers_are_looked_for_where_triton_takes_them_from() -> None:
    """A virtual environment has none of its own: those of its base."""
    found = availability._headers()
    assert found.name.startswith("python3") and str(found).startswith((sys.base_prefix, "/usr/include"))


def test_choosing_and_refusing_it_imports_nothing_of_triton() -> None:
    code = (
        "import sys\n"
        "from treeeagle_edge.model import head; from treeeagle_edge.engine import passes; "
        "from treeeagle_edge.model import target\n"
        "from treeeagle_edge.kernels import dispatch\n"
        "dispatch.available_backends()\n"
        "try:\n    dispatch.set_backend('triton')\nexcept Exception as error:\n    print(type(error).__name__)\n"
        "print('triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@needs_triton
@pytest.mark.parametrize(("prefix", "rows"), [(0, 1), (37, 6)])
def test_reads_through_the_dispatch_point(prefix: int, rows: int) -> None:
    query = normal(rows, 4, 32, seed=1)
    keys, values = normal(SLOTS, 2, 32, seed=2), normal(SLOTS, 2, 32, seed=3)
    view = tree_view(prefix, rows, SLOTS)
    with dispatch.use_backend("triton"):
        ours = dispatch.attention(query, keys, values, view)
    assert_near(ours, reference.attention(query, keys, values, view))


@needs_triton
def test_rows_of_separate_sequences_stay_with_the_reference() -> None:
    query = normal(3, 4, 32, seed=1)
    keys, values = normal(SLOTS, 2, 32, seed=2), normal(SLOTS, 2, 32, seed=3)
    first, lengths = torch.tensor([[0, 20, 40], [3, 7, 1]], device=DEVICE).unbind(0)
    view = BatchView(first, lengths)
    with dispatch.use_backend("triton"):
        ours = dispatch.attention(query, keys, values, view)
    assert torch.equal(ours, reference.attention(query, keys, values, view))


@needs_triton
@pytest.mark.parametrize("known", [True, False])
def test_a_trial_meets_the_merge_of_several_splits(known: bool) -> None:
    from treeeagle_edge.kernels.triton import attention

    tree = trial_cases.small_tree(DEVICE)
    view = tree.view if known else replace(tree.view, length=torch.tensor([290], device=DEVICE))
    table = attention.ancestor_table(view)
    made = attention.launches(tree.query, tree.keys, tree.values, view, table, tree.query.clone())
    assert made[0].grid[2] > 2 and made[1].arguments["splits"] > 2


@needs_triton
@pytest.mark.parametrize(
    "shape",
    [
        ModelShape(packed=True, int8=True),
        ModelShape(7, 1, 16, 64, 80, dtype=torch.bfloat16, head_norm=True, packed=True, int8=True),
        ModelShape(dtype=torch.float16, stream=torch.float16),
    ],
)
def test_every_kernel_passes_its_trial(shape: ModelShape) -> None:
    assert trial.refusals("triton", DEVICE, [shape]) == {}
