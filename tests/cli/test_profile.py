"""`treeeagle profile` as a person meets it: whole transcripts on described machines, plans and verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from textwrap import dedent

import pytest
from profile_fakes import BARE, RTX_3070, RTX_3080, describing, run, with_card


@pytest.fixture
def machine(monkeypatch):
    return describing(monkeypatch)


def test_transcript_of_a_card_that_fits(machine, capsys):
    """Expectations row 45: memory need unknown before loading. The plan and the verdict come first."""
    machine(with_card(RTX_3080))
    code, out, err = run(capsys, "--fast")
    assert out == dedent(
        """\
        ok    python 3.11.9, torch 2.13.0, triton 3.9.0
        ok    cuda:0: NVIDIA GeForce RTX 3080, as faked
        ok    cuda:0 NVIDIA GeForce RTX 3080, compute capability 8.6, driver 580.95.05, FREE
        ok    Ryzen 7 5800X, 8 cores (16 threads), avx2, fma
        ok    28.0 GB of 32.0 GB of memory available
        ok    500.0 GB free in /cache; 17.2 GB still to be fetched
        plan  Qwen/Qwen3-8B, 4-bit, AngelSlim/Qwen3-8B_eagle3, on cuda:0 by profile gpu-12gb
              weights (NF4)         3.9 GB   36 layers
              embedding, lm_head    2.5 GB   151,936 tokens
              head (16-bit)        0.80 GB   32,000 draft tokens
              KV, 8,473 slots       1.3 GB   context 8,192 and a tree of 24 nodes
              workspace            0.33 GB   chunks of 256 rows
              CUDA graphs          0.20 GB   rounds on the device, greedy and sampled
              reserve              0.80 GB   desktop and driver
              total               9.8 of 12.3 GB, fits; the longest context that fits is 23,149
        speed ceiling 177 tok/s plain at 912 GB/s (data sheet); expect 85-125 plain, 89-210 with the tree
        verdict  fits. next: treeeagle pull && treeeagle chat (fetches 17.2 GB first)
        """
    ).replace("FREE", "torch for CUDA 12.8, 12.3 GB free of 12.9 GB")
    assert (code, err) == (0, "")


def test_transcript_of_an_8_gb_card(machine, capsys):
    machine(with_card(RTX_3070))
    code, out, _ = run(capsys, "--fast")
    lines = out.splitlines()
    assert "      total               9.8 of 8.1 GB, does not fit; no context fits" in lines
    assert lines[-1] == (
        "verdict  cannot run: NVIDIA GeForce RTX 3070 has 8.6 GB, and the smallest profile for a card, gpu-12gb, needs "
        "12.0 GB; what fits: --model openbmb/MiniCPM4-8B --bits 4; --model Qwen/Qwen3-4B --bits 4; --device cpu"
    )
    assert code == 3


@pytest.mark.parametrize("choice", ["--model Qwen/Qwen3-4B --bits 4", "--device cpu"])
def test_what_is_said_to_fit_does(machine, capsys, choice):
    machine(with_card(RTX_3070))
    code, out, _ = run(capsys, "--fast", *choice.split())
    assert code == 0 and "verdict  fits" in out


def test_a_card_that_is_not_here_can_be_planned_for(machine, capsys):
    machine(BARE)
    code, out, _ = run(capsys, "--fast", "--gpu-memory", "12", "--model", "meta-llama/Llama-3.1-8B-Instruct")
    assert (
        "warn  planning for a card with 12.0 GB, whether or not it is here\n      hint: run this without"
        in out
    )
    assert "speed ceiling 72 tok/s plain at 360 GB/s (data sheet of an RTX 3060)" in out
    assert "speed ceiling 183 tok/s plain at 912 GB/s (data sheet of an RTX 3080 with 12 GB)" in out
    assert out.splitlines()[-1] == (
        "verdict  fits. next on the machine with the card: treeeagle pull meta-llama/Llama-3.1-8B-Instruct --head && "
        "treeeagle chat --model meta-llama/Llama-3.1-8B-Instruct (fetches 16.9 GB first)"
    )
    assert code == 0


@pytest.mark.parametrize("here", [BARE, with_card(RTX_3080)], ids=["no card", "one card"])
def test_the_card_that_is_named_is_the_one_that_is_planned_for(machine, capsys, here):
    machine(here)
    asked = ["--fast", "--gpu-memory", "16", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--device"]
    code, out, _ = run(capsys, *asked, "cuda:1")
    assert code == 0 and ", on cuda:1 by profile gpu-16gb" in out and "cuda:0" not in out
    assert out.splitlines()[-1].split(" (")[0].endswith("Llama-3.1-8B-Instruct --device cuda:1")


def test_cards_that_are_named_together_are_planned_for_together(machine, capsys):
    machine(BARE)
    asked = ["--fast", "--gpu-memory", "12", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--bits", "16"]
    code, out, _ = run(capsys, *asked, "--device", "cuda:0,cuda:1")
    assert code == 0 and "planning for 2 cards with 12.0 GB each, whether or not they are here" in out
    assert "of 12.0 GB, layers 0-" in out and "-31\n" in out
    assert "at 360 GB/s (data sheet of an RTX 3060, cards in turn)" in out
    assert out.splitlines()[-1].split(" (")[0].endswith("--bits 16 --device cuda:0,cuda:1")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            "--model Qwen/Qwen3-8B",
            "treeeagle pull Qwen/Qwen3-8B --head && treeeagle chat --model Qwen/Qwen3-8B",
        ),
        (
            "--model Qwen/Qwen2-7B-Instruct --context 4096",
            "treeeagle pull Qwen/Qwen2-7B-Instruct && treeeagle chat --model Qwen/Qwen2-7B-Instruct --context 4096",
        ),
        (
            "--model Qwen/Qwen3-8B --head-bits 8 --lm-head-bits 8",
            "treeeagle pull Qwen/Qwen3-8B --head && "
            "treeeagle chat --model Qwen/Qwen3-8B --head-bits 8 --lm-head-bits 8",
        ),
        ("--device cuda:0", "treeeagle pull Qwen/Qwen3-8B --head && treeeagle chat --device cuda:0"),
        (
            "--model meta-llama/Llama-3.1-8B-Instruct --head yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
            "treeeagle pull meta-llama/Llama-3.1-8B-Instruct && "
            "treeeagle pull yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B && treeeagle chat "
            "--model meta-llama/Llama-3.1-8B-Instruct --head yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
        ),
    ],
)
def test_what_to_type_next_fetches_what_is_missing(machine, capsys, arguments, command):
    machine(with_card(RTX_3080))
    data = json.loads(run(capsys, "--fast", "--json", *arguments.split())[1])
    assert data["verdict"]["next_command"] == command
    narrow = 8 if "--head-bits" in arguments else 16
    assert data["plan"]["widths"] == {"layers": 4, "lm_head": narrow, "head": narrow}


def test_transcript_of_a_cpu_with_native_kernels(machine, capsys, tmp_path):
    machine(BARE)
    profile = tmp_path / "small.yaml"
    profile.write_text(
        "{name: small, device: cpu, memory_gb: 2, model: smollm2-135m, bits: 4, context: 4096, "
        "tree: {depth: 5, branching: 4, nodes: 15}, reserve_gb: 0.8}"
    )
    code, out, err = run(capsys, "--fast", "--profile", str(profile))
    assert out == dedent(
        """\
        ok    python 3.11.9, torch 2.13.0, triton 3.9.0
        ok    cpu: no NVIDIA driver answered
        ok    Ryzen 7 5800X, 8 cores (16 threads), avx2, fma
        ok    28.0 GB of 32.0 GB of memory available
        ok    native kernels are there and use avx2
        ok    500.0 GB free in /cache; 0.19 GB still to be fetched
        plan  smollm2-135m, 4-bit, smollm2-135m-eagle3, on cpu by profile small
              weights (4-bit blocks)   0.07 GB   30 layers
              embedding, lm_head       0.03 GB   49,152 tokens
              head (4-bit blocks)      0.01 GB   10,240 draft tokens
              KV, 4,240 slots          0.10 GB   context 4,096 and a tree of 15 nodes
              workspace                0.04 GB   chunks of 256 rows
              reserve                  0.80 GB   the program and the desktop
              total                   1.0 of 28.0 GB, fits; the longest context that fits is 8,192, all the model has
        speed ceiling 413 tok/s plain at 40 GB/s (assumed, not measured); expect 231-360 plain, 153-397 with the tree
        verdict  fits. next: treeeagle chat --profile FILE (fetches 0.19 GB first)
        """
    ).replace("FILE", str(profile))
    assert (code, err) == (0, "")


def test_too_long_a_context_names_what_fits(machine, capsys):
    machine(BARE)
    model = "meta-llama/Llama-3.1-8B-Instruct"
    code, out, _ = run(
        capsys, "--fast", "--gpu-memory", "12", "--model", model, "--bits", "8", "--context", "32768"
    )
    assert (
        "warn  8-bit weights on CUDA (LLM.int8) buy room, not speed\n      hint: use --bits 4 for speed"
        in out
    )
    verdict = out.splitlines()[-1]
    assert verdict.startswith("verdict  does not fit, 4.3 GB too much; what fits: --context ") and code == 3
    for option in verdict.partition("what fits: ")[2].split("; ")[:2]:
        given = {"--bits": "8", "--context": "32768"}
        words = option.split()
        given.update(zip(words[::2], words[1::2], strict=True))
        arguments = [word for pair in given.items() for word in pair]
        assert run(capsys, "--fast", "--gpu-memory", "12", "--model", model, *arguments)[0] == 0, option


def test_json_and_save_carry_the_same_report(machine, capsys, tmp_path):
    machine(with_card(RTX_3080))
    file = tmp_path / "report.json"
    code, out, _ = run(capsys, "--fast", "--json", "--save", str(file))
    data = json.loads(out)
    assert json.loads(file.read_text()) == data and code == 0
    assert set(data) == {"schema", "checks", "hardware", "plan", "speed", "verdict"}
    assert data["hardware"]["device"] == "cuda:0" and data["hardware"]["gpus"][0]["total"] == RTX_3080.total
    plan = data["plan"]
    assert plan["total"] == sum(line["nbytes"] for line in plan["lines"]) <= plan["budget"] == RTX_3080.free
    assert plan["fits"] and plan["context"] == 8192 and plan["tree"]["nodes"] == 24
    assert data["speed"][0]["source"] == "data sheet" and data["speed"][0]["bandwidth"] == 912
    assert data["verdict"] == {
        "can_run": True,
        "text": "fits. next: treeeagle pull && treeeagle chat (fetches 17.2 GB first)",
        "next_command": "treeeagle pull && treeeagle chat",
        "alternatives": [],
    }


def test_a_report_that_cannot_be_saved(machine, capsys, tmp_path):
    machine(BARE)
    code, out, err = run(capsys, "--fast", "--save", str(tmp_path / "no" / "such.json"))
    assert "verdict" in out  # what was measured is not lost
    assert code == 1 and "cannot be written" in err and "no such file" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--bits", "3"], 2, "error: --bits is 3"),
        (
            ["--kernels", "triton"],
            2,
            "error: there are no kernels named 'triton'\n hint: use native or torch",
        ),
        (["--device", "tpu"], 2, "error: device 'tpu' is unknown"),
        (
            ["--context", "9000"],
            2,
            "error: context is 9,000, which is out of range for this model\n hint: use 2 to 8,192",
        ),
        (["--gpu-memory", "0"], 2, "error: gpu-memory is 0, which is out of range"),
        (["--gpu-memory", "12", "--device", "cpu"], 2, "error: --gpu-memory plans for a card"),
        (["--profile", "gpu-12bg"], 1, "error: profile 'gpu-12bg' is unknown\n hint: did you mean gpu-12gb?"),
        (["--model", "Qwen/Qwen3-8"], 1, "did you mean Qwen/Qwen3-8B?"),
        (["--model", "qwen3-8b"], 1, "did you mean Qwen/Qwen3-8B?"),
        (["--head", __file__], 1, "is not a head\n hint: "),
        (["--contxt", "1"], 2, "error: there is no option --contxt"),
    ],
)
def test_wrong_input_is_one_sentence_and_a_hint(capsys, arguments, code, message):
    got, out, err = run(capsys, "--fast", *arguments)
    assert (got, out) == (code, "")
    assert message in err and "Traceback" not in err and err.count("\n") == 2


def test_slow_is_told_from_slower(machine, capsys):
    machine(BARE)
    out = run(capsys, "--fast", "--bits", "32", "--model", "Qwen/Qwen3-8B")[1]
    assert "speed ceiling 1.3 tok/s plain" in out


def test_fast_json_imports_no_torch_and_loads_nothing():
    code = (
        "import sys; from treeeagle_edge.cli.app import main;"
        "code = main(['profile', '--fast', '--json', '--device', 'cpu']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'bitsandbytes')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["plan"]["model"] == "smollm2-135m" and data["verdict"]["can_run"]
