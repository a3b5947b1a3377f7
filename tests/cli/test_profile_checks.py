"""What `treeeagle profile` says of the machine: devices, versions, disk, compiler, with a hint where one lacks."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
from profile_fakes import BARE, CPU, RAM, describing, run, with_card

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.kernels.native import loader
from treeeagle_edge.profiling import checks as profile_checks
from treeeagle_edge.profiling import report as profile_report
from treeeagle_edge.units import GB


@pytest.fixture
def machine(monkeypatch):
    return describing(monkeypatch)


def test_says_which_device_and_why(machine, capsys):
    """Expectations row 46: it runs on the CPU and nobody says why. A line of the report says which device and why."""
    machine(BARE)
    code, out, _ = run(capsys, "--fast")
    assert "ok    cpu: no NVIDIA driver answered" in out.splitlines() and code == 0
    card = Gpu(0, "NVIDIA GeForce RTX 3080", 12 * GB, 11 * GB, (8, 6), "580.95.05")
    why, hint = (
        "cpu: torch is a CPU build, so NVIDIA GeForce RTX 3080 stays unused",
        "install the CUDA build of torch",
    )
    machine(Hardware("cpu", why, CPU, RAM, (card,), hint))
    _, out, _ = run(capsys, "--fast")
    assert f"warn  {why}\n      hint: {hint}\n" in out
    assert "ok    unused NVIDIA GeForce RTX 3080" in out


def test_a_cpu_without_a_compiler_plans_8_bits_and_a_small_tree_and_says_why(machine, capsys, monkeypatch):
    machine(BARE)
    found = loader.Problem("no C++ compiler is installed", "install g++ or clang++")
    monkeypatch.setattr(loader, "problem", lambda: found)
    code, out, _ = run(capsys, "--fast")
    assert (
        "warn  runs on PyTorch's kernels, which are slower, with 8 bits and a small tree in place of profile cpu's "
        "4 bits: no C++ compiler is installed\n      hint: install g++ or clang++\n"
    ) in out
    assert "plan  smollm2-135m, 8-bit" in out and "a tree of 3 nodes" in out and code == 0
    code, out, _ = run(capsys, "--fast", "--kernels", "native")
    assert out.splitlines()[-1] == (
        "verdict  cannot run: native kernels cannot run this: no C++ compiler is installed; what fits: --kernels torch"
    )
    assert code == 3
    code, out, _ = run(capsys, "--fast", "--kernels", "torch")
    assert (
        out.splitlines()[-1].startswith("verdict  fits. next: treeeagle chat --kernels torch") and code == 0
    )


def test_kernels_that_the_cache_cannot_keep_are_named_with_what_to_do(machine, capsys, monkeypatch):
    machine(BARE)
    reason = "the native kernels cannot be kept: permission denied (/cache/native)"
    kept = loader.Problem(reason, "set TREEEAGLE_CACHE to a folder you can write to")
    monkeypatch.setattr(loader, "not_kept", lambda: kept)
    code, out, _ = run(capsys, "--fast")
    assert "ok    native kernels are there and use avx2\n" in out
    assert (
        f"warn  {reason}; they were compiled for this run alone\n"
        "      hint: set TREEEAGLE_CACHE to a folder you can write to\n"
    ) in out
    assert "plan  smollm2-135m, 4-bit" in out and code == 0


def test_a_missing_cuda_is_no_crash(machine, capsys):
    machine(BARE)
    code, out, _ = run(capsys, "--fast", "--device", "cuda")
    assert (
        "fail  device cuda cannot be used: no NVIDIA driver answered\n      hint: use --device cpu\n" in out
    )
    assert out.splitlines()[-1] == (
        "verdict  cannot run: device cuda cannot be used: no NVIDIA driver answered; what fits: --device cpu"
    )
    assert code == 3


def test_native_windows_is_no_crash(machine, capsys, monkeypatch):
    def detect(device=None):
        raise CannotRunError("native Windows is not supported", "install WSL2")

    machine(BARE)
    monkeypatch.setattr(profile_report, "detect", detect)
    code, out, _ = run(capsys, "--fast")
    assert out.splitlines()[-3:] == [
        "fail  native Windows is not supported",
        "      hint: install WSL2",
        "verdict  cannot run: native Windows is not supported",
    ]
    assert code == 3
    assert json.loads(run(capsys, "--fast", "--json")[1])["plan"] is None


def test_a_profile_for_another_device_is_warned_about(machine, capsys):
    machine(BARE)
    _, out, _ = run(capsys, "--fast", "--profile", "gpu-12gb")
    assert "warn  profile gpu-12gb is made for cuda, and this runs on cpu\n" in out


def test_a_busy_or_old_card_is_warned_about(machine, capsys):
    old = Gpu(0, "NVIDIA GeForce RTX 2080 Ti", 13 * GB, 9 * GB, (7, 5), "580.95.05", "GPU-1", usable=True)
    machine(with_card(old))
    _, out, _ = run(capsys, "--fast")
    assert "hint: cards before compute capability 8.0 have no bf16" in out
    assert "warn  4.0 GB of NVIDIA GeForce RTX 2080 Ti is taken by other programs\n" in out


def test_a_full_disk_stops_a_download_before_it_starts(machine, capsys, monkeypatch):
    machine(BARE)
    usage = namedtuple("usage", "total used free")(GB, 0, GB)
    monkeypatch.setattr(profile_checks.shutil, "disk_usage", lambda _: usage)
    code, out, _ = run(capsys, "--fast", "--model", "Qwen/Qwen3-1.7B")
    assert "fail  1.0 GB free in /cache, and Qwen/Qwen3-1.7B needs 3.7 GB\n      hint: free some space" in out
    assert code == 3 and out.splitlines()[-1].startswith("verdict  cannot run: 1.0 GB free")
    code, out, _ = run(capsys, "--fast", "--model", "Qwen/Qwen3-1.7B", "--gpu-memory", "12")
    assert "warn  1.0 GB free in /cache" in out  # a card that is elsewhere has another disk beside it
    assert code == 0 and out.splitlines()[-1].startswith("verdict  fits. next on the machine with the card: ")


def test_native_kernels_on_a_card_are_answered_with_those_that_run_there(machine, capsys):
    machine(BARE)
    code, out, _ = run(
        capsys, "--fast", "--model", "Qwen/Qwen3-1.7B", "--gpu-memory", "24", "--kernels", "native"
    )
    assert code == 3 and out.splitlines()[-1].endswith("cuda:0; what fits: --kernels torch")


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("3.14.0", ">=3.11,<3.14", False),
        ("3.13.5", ">=3.11,<3.14", True),
        ("5.0.0rc1", ">=5.0", True),
        ("1.2", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, wanted, fits):
    assert profile_checks.in_range(version, wanted) is fits


def test_versions_out_of_range_or_missing_are_named(monkeypatch):
    found = {"torch": "2.1.0", "transformers": None, "bitsandbytes": "0.45", "triton": "3.9"}
    ranges = {"python": ">=3.99", "torch": ">=2.11", "bitsandbytes": ">=0.50"}
    monkeypatch.setattr(profile_checks, "_version", found.get)
    monkeypatch.setattr(profile_checks, "_declared_ranges", lambda: ranges)
    checks = {check.name: check for check in profile_checks.check_versions()}
    assert checks["python"].status == "fail" and "outside >=3.99" in checks["python"].text
    assert checks["torch"].status == "fail" and checks["torch"].text == "torch 2.1.0 is outside >=2.11"
    assert checks["transformers"].status == "fail" and "is not installed" in checks["transformers"].text
    assert (
        checks["bitsandbytes"].status == "warn"
        and "pip install 'bitsandbytes>=0.50'" in checks["bitsandbytes"].hint
    )
    assert "triton" not in checks


def test_our_own_ranges_are_found():
    ranges = profile_checks._declared_ranges()
    assert ">=3.11" in ranges["python"] and ranges["torch"].startswith(">=2.")
    assert "matplotlib" not in ranges, "an extra is not asked for"
