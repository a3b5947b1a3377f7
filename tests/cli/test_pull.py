"""`treeeagle pull` as a person meets it: whole transcripts against a hub on this machine."""

from __future__ import annotations

import pytest
from hub_model import CONFIG
from hub_stand_in import CHUNK
from pull_cases import HEAD, MODEL, WEIGHTS, run, snapshot

from treeeagle_edge.hardware.cpu import Cpu, Ram
from treeeagle_edge.hardware.detection import Hardware
from treeeagle_edge.hardware.nvidia import Gpu
from treeeagle_edge.sources import pull
from treeeagle_edge.sources.model_names import BUNDLED_HEADS
from treeeagle_edge.units import GB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Let the plan see a computer with `ram` GB, and a card where `card` GB are given."""

    def describe(ram: float, card: float | None = None) -> None:
        gpus = () if card is None else (Gpu(0, "a card", int(card * GB), int(card * GB), usable=True),)
        memory = Ram(int(ram * GB), int(ram * GB), limited=False)
        here = Hardware("cuda:0" if gpus else "cpu", "for a test", Cpu("cpu", 2, 2, ()), memory, gpus)
        monkeypatch.setattr(pull, "detect", lambda: here)

    return describe


def test_transcript_of_a_model(hub, capsys, tmp_path):
    code, out, err = run(capsys, "org/name")
    folder = snapshot(hub, tmp_path)
    assert out == f"org/name is in {folder}; chat with it: treeeagle chat --model org/name\n"
    assert code == 0 and (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, *rest = err.splitlines()
    assert first == "asking the hub about org/name"
    assert rest and all(line.startswith("model.safetensors: ") and " of 40 kB" in line for line in rest)
    hub.seen.clear()
    assert run(capsys, "org/name") == (0, out, "asking the hub about org/name\n")
    assert not hub.asked("model.safetensors")


def test_transcript_of_a_dry_run(hub, capsys, tmp_path):
    code, out, _ = run(capsys, "org/name", "--dry-run")
    assert out.splitlines() == [
        f"org/name (model), in {tmp_path / 'hub'}",
        "    152 B  config.json  here",
        "      2 B  tokenizer.json",
        "    40 kB  model.safetensors",
        "40 kB would be fetched",
    ]
    assert code == 0 and not hub.asked("model.safetensors")
    hub.breaks["model.safetensors"] = [20 * CHUNK, *[0] * 20]
    assert run(capsys, "org/name")[0] == 3
    hub.breaks.clear()
    lines = run(capsys, "org/name", "--dry-run")[1].splitlines()
    assert lines[3:] == ["    40 kB  model.safetensors  20 kB here", "20 kB would be fetched"]
    run(capsys, "org/name")
    assert run(capsys, "org/name", "--dry-run")[1].endswith("nothing would be fetched: all is here\n")


def test_a_model_with_the_head_that_goes_with_it(hub, machine, capsys, tmp_path):
    machine(ram=64)
    hub.add("Qwen/Qwen3-8B", MODEL)
    hub.add("AngelSlim/Qwen3-8B_eagle3", HEAD)
    code, out, _ = run(capsys, "qwen/qwen3-8b", "--head")
    model, head = (snapshot(hub, tmp_path, name) for name in ("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3"))
    assert out.splitlines() == [
        f"Qwen/Qwen3-8B is in {model}",
        f"AngelSlim/Qwen3-8B_eagle3 is in {head}; "
        "chat with it: treeeagle chat --model Qwen/Qwen3-8B --head AngelSlim/Qwen3-8B_eagle3",
    ]
    assert code == 0 and (head / "pytorch_model.bin").is_file() and (model / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "config", "use"),
    [
        (
            "AngelSlim/Qwen3-8B_eagle3",
            CONFIG,
            "draft with it: treeeagle chat --model Qwen/Qwen3-8B --head AngelSlim/Qwen3-8B_eagle3",
        ),
        (
            "org/speculator",
            {
                "speculators_model_type": "eagle3",
                "speculators_config": {"verifier": {"name_or_path": "org/big"}},
            },
            "draft with it: treeeagle chat --model org/big --head org/speculator",
        ),
        (
            "org/head",
            {"draft_vocab_size": 8},
            "draft with it: treeeagle chat --head org/head, and --model with the model it was trained for",
        ),
    ],
)
def test_a_head_by_its_own_name(hub, capsys, name, config, use):
    hub.add(name, {**HEAD, "config.json": config})
    code, out, _ = run(capsys, name)
    assert out.endswith(f"; {use}\n") and code == 0


def test_without_a_name_it_fetches_what_this_machine_would_run(hub, machine, capsys, tmp_path, monkeypatch):
    machine(ram=64, card=12)
    hub.add("Qwen/Qwen3-8B", MODEL)
    hub.add("AngelSlim/Qwen3-8B_eagle3", HEAD)
    code, out, err = run(capsys)
    assert "profile gpu-12gb suits this machine: Qwen/Qwen3-8B with AngelSlim/Qwen3-8B_eagle3\n" in err
    assert out.endswith("; chat with it: treeeagle chat\n") and code == 0

    demo = tmp_path / "demo.gguf"
    machine(ram=8)
    monkeypatch.setattr(pull, "is_cached", lambda: False)
    monkeypatch.setattr(pull, "fetch_demo_model", lambda say: say("fetching smollm2-135m") or demo)
    code, out, err = run(capsys)
    head = BUNDLED_HEADS / "smollm2-135m-eagle3"
    assert out == (
        f"smollm2-135m is in {demo}\nsmollm2-135m-eagle3 is in {head}; chat with it: treeeagle chat\n"
    )
    assert err.splitlines() == [
        "profile cpu suits this machine: smollm2-135m with smollm2-135m-eagle3",
        "note: smollm2-135m-eagle3 comes with this program",
        "fetching smollm2-135m",
    ]
    assert "    93 MB  SmolLM2" in run(capsys, "--dry-run")[1]


def test_verifying_reads_the_demo_model_too(capsys, monkeypatch, tmp_path):
    read: list[bool] = []
    monkeypatch.setattr(pull, "fetch_demo_model", lambda say: tmp_path)
    monkeypatch.setattr(pull, "verify_demo_model", lambda: read.append(True) or tmp_path)
    assert run(capsys, "smollm2-135m")[0] == 0 and not read
    assert run(capsys, "smollm2-135m", "--verify")[0] == 0 and read


def test_verifying_mends_what_was_damaged_here(hub, capsys, tmp_path):
    run(capsys, "org/name")
    file = snapshot(hub, tmp_path) / "model.safetensors"
    file.resolve().write_bytes(b"?" + WEIGHTS[1:])
    assert run(capsys, "org/name", "--verify")[0] == 0
    assert file.read_bytes() == WEIGHTS


def test_a_repository_that_bitsandbytes_quantised_is_fetched(hub, capsys):
    """Expectations row 1: it loads as it is."""
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    hub.add("org/nf4", {**MODEL, "config.json": {**CONFIG, "quantization_config": said}})
    assert run(capsys, "org/nf4")[0] == 0 and hub.asked("model.safetensors")


def test_a_model_too_large_for_this_machine_is_fetched_with_a_warning(hub, machine, capsys):
    machine(ram=0.5)
    code, _, err = run(capsys, "org/name")
    assert (
        "note: org/name at " in err and "0.50 GB are free on cpu; treeeagle profile --model org/name" in err
    )
    assert code == 0


def test_help_names_the_options(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in ("[NAME]", "--head", "--dry-run", "--verify"):
        assert option in out
