"""Machines and hubs that several unit tests pretend to have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hardware_fakes import faking
from hub_model import hub_with_model
from hub_stand_in import Hub

from treeeagle_edge.kernels.native import loader


@pytest.fixture
def native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made as for a machine with a C++ compiler, wherever the tests run."""
    monkeypatch.setattr(loader, "problem", lambda: None)
    monkeypatch.setattr(loader, "not_kept", lambda: None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with fakes of NVML and torch, it puts them in the place of the real ones."""
    return faking(monkeypatch)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one small model, to which this process's client turns."""
    with hub_with_model(tmp_path, monkeypatch) as running:
        yield running
