"""A machine without CUDA: nothing of CUDA is imported on the way to an answer, and what needs a card says why not.

What is said of cards that are there is tested in words, on machines that are described.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from treeeagle_edge.cli.app import main
from treeeagle_edge.drafting.acceptance import Acceptance
from treeeagle_edge.drafting.costs import CostModel, CostTable
from treeeagle_edge.drafting.growth import AdaptiveGrowth, Candidate
from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.kernels import dispatch
from treeeagle_edge.kernels.triton import fallback
from treeeagle_edge.model.linear import make_linear
from treeeagle_edge.model.target import load_target
from treeeagle_edge.profiling import checks as profile_checks
from treeeagle_edge.rounds import TreeShape

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
CUDA = torch.device("cuda")
CARD = Gpu(0, "NVIDIA GeForce RTX 3080", 12 * 10**9, 6 * 10**9, (8, 6), "580.95.05", "GPU-1", usable=True)
HERE = Hardware("cuda:0", "as described", Cpu("cpu", 8, 16, ("avx2",)), Ram(10**10, 10**10, False), (CARD,))

# Answers, then says which modules and libraries of CUDA the process has. PyTorch itself imports pynvml where it is.
ASK = """
import json, sys
import torch
brought = set(sys.modules)
from treeeagle_edge.cli.app import main
code = main(sys.argv[1:])
mapped = open("/proc/self/maps").read() if sys.platform == "linux" else ""
asked = ("triton", "bitsandbytes", "pynvml", "cupy", "numba.cuda")
libraries = ("libcuda.so", "libnvidia-ml", "libbitsandbytes_cuda", "libbitsandbytes_rocm")
print(json.dumps({
    "code": code,
    "modules": [name for name in asked if name in sys.modules and name not in brought],
    "triton": "triton" in sys.modules,
    "libraries": [name for name in libraries if name in mapped],
    "cuda started": torch.cuda.is_initialized(),
}), file=sys.stderr)
"""


def one_shot(model: Path, *arguments: str) -> dict[str, object]:
    command = [
        sys.executable,
        "-P",
        "-c",
        ASK,
        "chat",
        "-p",
        "hi",
        "--model",
        str(model),
        "--max-tokens",
        "4",
    ]
    done = subprocess.run(
        [*command, "--threads", "1", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert done.stdout.strip()
    return json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("arguments", [["--bits", "32"], ["--bits", "8", "--kernels", "torch"]])
def test_an_answer_on_the_cpu_imports_nothing_of_cuda(arguments: list[str], tiny_checkpoint: Path) -> None:
    """Neither Triton nor bitsandbytes, whose CUDA library would be loaded with it, nor NVML."""
    found = one_shot(tiny_checkpoint, "--device", "cpu", *arguments)
    assert found == {"code": 0, "modules": [], "triton": False, "libraries": [], "cuda started": False}


def test_four_bits_on_the_cpu_load_the_library_of_the_cpu_alone(tiny_checkpoint: Path) -> None:
    """bitsandbytes itself is needed there; it brings Triton's module where both are installed, and no CUDA."""
    found = one_shot(tiny_checkpoint, "--device", "cpu", "--bits", "4", "--kernels", "torch")
    assert found["code"] == 0 and found["libraries"] == [] and found["cuda started"] is False
    assert "bitsandbytes" in found["modules"]  # type: ignore[operator]


@without_cuda
def test_looking_for_a_card_starts_no_cuda(tiny_checkpoint: Path) -> None:
    """Without --device a card is looked for, through NVML; that there is none is found without PyTorch's CUDA."""
    found = one_shot(tiny_checkpoint, "--bits", "32")
    assert found["code"] == 0 and found["cuda started"] is False and found["triton"] is False
    assert "bitsandbytes" not in found["modules"]  # type: ignore[operator]


@without_cuda
@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-p", "hi"],
        ["bench", "--quick"],
        ["eval-head"],
        ["train", "--target", "smollm2-135m", "--out", "OUT"],
        ["gpu-check"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_every_command_refuses_a_card_that_is_not_there(
    arguments: list[str],
    device: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 3, the reason and what to do; nothing on stdout, no traceback."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    words = [str(tmp_path / "head") if word == "OUT" else word for word in arguments]
    assert main([*words, "--device", device]) == 3
    out, err = capsys.readouterr()
    assert out == "" and f"error: device {device} cannot be used: " in err and " hint: " in err
    assert "Traceback" not in err


@without_cuda
def test_every_way_into_cuda_refuses_with_a_reason(tiny_checkpoint: Path) -> None:
    """Below the commands: weights, targets, attention, and the rule of a library that is not asked without CUDA."""
    from treeeagle_edge.checkpoint.opening import open_checkpoint
    from treeeagle_edge.gpu_check.models import RandomModel
    from treeeagle_edge.gpu_check.sizes import SIZES
    from treeeagle_edge.gpu_check.timing import as_graph

    checkpoint, tiny = open_checkpoint(tiny_checkpoint), SIZES["test"].main.config
    refused = (
        *(lambda bits=bits: make_linear(torch.zeros(64, 64), None, bits=bits, device=CUDA, dtype=torch.float16)
          for bits in (4, 8, 16, 32)),
        lambda: load_target(checkpoint, bits=8, context=64, device=CUDA),
        lambda: RandomModel.load(tiny, bits=4, device=CUDA),
        lambda: dispatch.set_backend("triton"),
        lambda: as_graph(lambda: None, torch.device("cpu")),
    )  # fmt: skip
    for call in refused:
        with pytest.raises(CannotRunError) as caught:
            call()
        assert "CUDA" in caught.value.message and caught.value.hint
    assert dispatch.current_backend() == "reference" and fallback.installed_rule() is None


def test_profile_names_all_that_runs_on_a_card_with_a_line_of_advice_each() -> None:
    """Expectations row 36: GPU, compute capability, driver, torch CUDA, free memory; versions beside our ranges."""
    here = replace(HERE, cuda_version="12.8")
    lines = {check.name: check for check in profile_checks.check_device(here)}
    for words in (
        "RTX 3080",
        "compute capability 8.6",
        "driver 580.95.05",
        "torch for CUDA 12.8",
        "6.0 GB free",
    ):
        assert words in lines["gpu"].text
    assert lines["gpu memory"].status == "warn" and "nvidia-smi" in str(lines["gpu memory"].hint)
    old = replace(CARD, capability=(7, 5))
    (warned,) = [c for c in profile_checks.check_device(replace(here, gpus=(old,))) if c.name == "gpu"]
    assert warned.status == "warn" and "bf16" in str(warned.hint)


@pytest.mark.parametrize("missing", ["bitsandbytes", "triton"])
def test_profile_advises_where_a_package_of_the_card_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expectations row 36, bitsandbytes and triton: what does not work without them, and how to get them."""
    found = profile_checks._version
    monkeypatch.setattr(profile_checks, "_version", lambda name: None if name == missing else found(name))
    monkeypatch.setattr(profile_checks.sys, "platform", "linux")
    (line,) = [check for check in profile_checks.check_versions() if check.name == missing]
    assert f"{missing} is not installed" in line.text and f"pip install '{missing}" in str(line.hint)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_eight_bits_on_a_card_are_said_to_buy_room_not_speed(
    bits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expectations row 38: LLM.int8 is slower than fp16 on CUDA."""
    assert main(["profile", "--fast", "--gpu-memory", "16", "--model", "Qwen/Qwen3-4B", "--bits", bits]) == 0
    said = "8-bit weights on CUDA (LLM.int8) buy room, not speed\n      hint: use --bits 4 for speed"
    assert (said in capsys.readouterr().out) is (bits == "8")


@pytest.mark.parametrize(("step", "levels"), [(0.001, 5), (0.012, 1)])
def test_where_a_level_is_dear_beside_the_target_drafts_are_shallow(step: float, levels: int) -> None:
    """Expectations row 39: depth comes from measured times. A 16-bit head costs little beside a 16-bit target, and a
    good part of a step beside one of 4 bits, which is faster.
    """
    table = CostTable((1, 16, 32), (0.02, 0.02, 0.021), extend=step, step=step)
    costs = CostModel(table)
    growth = AdaptiveGrowth(TreeShape(5, 4, 32, adaptive=True), costs, Acceptance(), 1 / costs.verify(1))
    candidates: list[Candidate] = []
    parent: Candidate | None = None
    scored = 0
    for depth in range(1, 6):
        scored += 1
        newest = Candidate(depth, parent, depth, -0.3 * depth, growth.score(parent, -0.3))
        candidates.append(newest)
        if depth == 5 or not growth.expand([newest], candidates):
            break
        parent = newest
    assert scored == levels
