"""Machines as `treeeagle profile` would find them, and the command run on one."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable

import pytest

from treeeagle_edge.cli.app import main
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.profiling import checks as profile_checks
from treeeagle_edge.profiling import report as profile_report
from treeeagle_edge.units import GB

CPU = Cpu("Ryzen 7 5800X", 8, 16, ("avx2", "fma"))
RAM = Ram(32 * GB, 28 * GB, limited=False)
BARE = Hardware("cpu", "cpu: no NVIDIA driver answered", CPU, RAM)
RTX_3080 = Gpu(
    0, "NVIDIA GeForce RTX 3080", 12_884_901_888, 12_348_030_976, (8, 6), "580.95.05", "GPU-1", usable=True
)
RTX_3070 = Gpu(
    0, "NVIDIA GeForce RTX 3070", 8_589_934_592, 8_053_063_680, (8, 6), "580.95.05", "GPU-1", usable=True
)


def with_card(card: Gpu) -> Hardware:
    why = f"cuda:0: {card.name}, as faked"
    return Hardware("cuda:0", why, CPU, RAM, (card,), cuda_version="12.8")


def describing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hardware], None]:
    """Makes `treeeagle profile` see a described machine; nothing is downloaded, 500 GB of disk are free."""

    def describe(here: Hardware) -> None:
        def detect(device=None):
            if device is not None and device.startswith("cuda") and not here.gpus:
                reason = "device cuda cannot be used: no NVIDIA driver answered"
                raise CannotRunError(reason, "use --device cpu")
            return here if device != "cpu" else BARE

        usage = namedtuple("usage", "total used free")(GB, 0, 500 * GB)
        versions = [profile_checks.Check("versions", "ok", "python 3.11.9, torch 2.13.0, triton 3.9.0")]
        monkeypatch.setattr(profile_report, "detect", detect)
        monkeypatch.setattr(loader, "problem", lambda: None)
        monkeypatch.setattr(loader, "not_kept", lambda: None)
        monkeypatch.setattr(profile_checks, "native_isa", lambda: "avx2")
        monkeypatch.setattr(profile_checks, "check_versions", lambda: iter(versions))
        monkeypatch.setattr(profile_checks.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(profile_checks, "download_folder", lambda _: profile_checks.Path("/cache"))

    monkeypatch.setattr("treeeagle_edge.planning.model_shapes._local_model", lambda name: None)
    return describe


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["profile", *arguments])
    out, err = capsys.readouterr()
    return code, out, err
