"""Windows: what is said natively, and how a card is found and a driver mended under WSL2."""

from __future__ import annotations

import types

import pytest
from hardware_fakes import (
    MIB,
    RTX_3060,
    RTX_4080,
    FakeNvml,
    FakeTorch,
)

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware import detection
from treeeagle_edge.hardware.detection import detect


def test_native_windows_is_pointed_to_wsl2(monkeypatch):
    monkeypatch.setattr(detection, "sys", types.SimpleNamespace(platform="win32"))
    with pytest.raises(CannotRunError, match="native Windows is not supported") as error:
        detect()
    assert "WSL2" in error.value.hint


def test_wsl2_is_noted(monkeypatch):
    version = "Linux version 5.15.167.4-microsoft-standard-WSL2"
    monkeypatch.setattr(detection, "_kernel_version", lambda: version)
    assert any("WSL2" in note for note in detect("cpu").notes)


@pytest.fixture
def wsl(monkeypatch):
    monkeypatch.setattr(
        detection, "_kernel_version", lambda: "Linux version 6.6.87.2-microsoft-standard-WSL2"
    )


def test_on_wsl2_a_card_is_found_as_anywhere(machine, wsl):
    """Its library may be out of NVML's sight there: PyTorch sees the card, and knows what is free of it."""
    for nvml, free in (
        (FakeNvml([RTX_4080], free=[14000]), 14000),
        (FakeNvml(error="NVML Shared Library Not Found"), 16376 - 700),
        (None, 16376 - 700),
    ):
        machine(nvml, FakeTorch([RTX_4080]))
        found = detect()
        assert found.device == "cuda:0" and found.budget == free * MIB
        assert any(note.startswith("this is WSL2") for note in found.notes) and found.hint is None


def test_on_wsl2_a_driver_is_mended_in_windows(machine, wsl):
    """Expectations row 36: WSL sees no device. The advice is the one that helps there, where Linux has no driver."""
    for nvml in (FakeNvml(error="Driver/library version mismatch"), FakeNvml([RTX_3060])):
        machine(nvml, FakeTorch([RTX_3060], available=False))
        found = detect()
        assert found.device == "cpu" and "driver" in found.why
        assert found.hint.startswith("update the NVIDIA driver in Windows")
        with pytest.raises(CannotRunError) as error:
            detect("cuda")
        assert "wsl --shutdown" in error.value.hint
    machine(FakeNvml([RTX_3060]), FakeTorch(cuda=None))
    assert "CUDA build of torch" in detect().hint, "that is no fault of the driver"
