"""`treeeagle pull` as a person meets it: whole transcripts against a hub on this machine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from hub_stand_in import CHUNK, TOKEN, Hub, running_hub, use_hub

from treeeagle_edge import hub_cache, pull
from treeeagle_edge.cli.app import main
from treeeagle_edge.hardware import Hardware
from treeeagle_edge.hardware_cpu import Cpu, Ram
from treeeagle_edge.hardware_nvidia import Gpu
from treeeagle_edge.models import BUNDLED_HEADS

GB = 10**9
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
WEIGHTS = random.Random(11).randbytes(40 * CHUNK)
MODEL = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": WEIGHTS}
HEAD = {"config.json": {"draft_vocab_size": 8}, "pytorch_model.bin": WEIGHTS[: 9 * CHUNK]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with running_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        hub.add("org/name", MODEL)
        yield hub


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Let the plan see a computer with `ram` GB, and a card where `card` GB are given."""

    def describe(ram: float, card: float | None = None) -> None:
        gpus = () if card is None else (Gpu(0, "a card", int(card * GB), int(card * GB), usable=True),)
        memory = Ram(int(ram * GB), int(ram * GB), limited=False)
        here = Hardware("cuda:0" if gpus else "cpu", "for a test", Cpu("cpu", 2, 2, ()), memory, gpus)
        monkeypatch.setattr(pull, "detect", lambda: here)

    return describe


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["pull", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def snapshot(hub: Hub, tmp_path: Path, name: str = "org/name") -> Path:
    return tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / hub.commit(name)


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


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_quantised_repository_is_refused_before_its_weights_come(hub, capsys, method):
    """Expectations row 37: load_in_4bit on an AWQ repository. config.json tells, and the refusal comes with advice."""
    hub.add(
        "org/quant", {**MODEL, "config.json": {**CONFIG, "quantization_config": {"quant_method": method}}}
    )
    code, out, err = run(capsys, "org/quant")
    assert err.splitlines()[1:] == [
        f"error: org/quant is already quantised ({method}), and such weights are not read",
        " hint: use the unquantised repository of the model and --bits 4 or 8, or a GGUF file of it",
    ]
    assert (code, out) == (1, "") and not hub.asked("model.safetensors")


def test_a_repository_that_bitsandbytes_quantised_is_fetched(hub, capsys):
    """Expectations row 1: it loads as it is."""
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    hub.add("org/nf4", {**MODEL, "config.json": {**CONFIG, "quantization_config": said}})
    assert run(capsys, "org/nf4")[0] == 0 and hub.asked("model.safetensors")


def test_an_architecture_that_does_not_run_is_refused_by_name(hub, capsys):
    hub.add("org/mamba", {**MODEL, "config.json": {**CONFIG, "architectures": ["MambaForCausalLM"]}})
    code, _, err = run(capsys, "org/mamba")
    assert "error: MambaForCausalLM is a hybrid or recurrent model" in err and code == 1
    assert not hub.asked("model.safetensors")


def test_a_gguf_repository_says_how_to_fetch_one_file(hub, capsys):
    hub.add("org/gguf", {"m.Q4_0.gguf": WEIGHTS, "m.Q8_0.gguf": WEIGHTS})
    code, _, err = run(capsys, "org/gguf")
    assert "such as `hf download org/gguf m.Q4_0.gguf`" in err and code == 1


def test_a_licence_that_was_not_accepted_is_explained(hub, capsys, monkeypatch):
    hub.gated.add("org/name")
    code, out, err = run(capsys, "org/name")
    assert err.splitlines()[1:] == [
        "error: org/name is gated: its owner asks you to accept a licence first",
        f" hint: accept it on {hub.url}/org/name, then log in with `hf auth login`, or set HF_TOKEN",
    ]
    assert (code, out) == (1, "")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert run(capsys, "org/name")[0] == 0


def test_an_interrupted_fetch_is_kept_and_goes_on(hub, capsys, tmp_path):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *[0] * 20]
    code, out, err = run(capsys, "org/name")
    assert err.splitlines()[-2:] == [
        "error: the connection broke while org/name was being fetched",
        " hint: what has come is kept: run the same command again to go on",
    ]
    assert (code, out) == (3, "")
    hub.breaks.clear()
    hub.seen.clear()
    assert run(capsys, "org/name")[0] == 0
    assert [seen.range for seen in hub.asked("model.safetensors") if seen.host == "localhost"] == [
        f"bytes={20 * CHUNK}-"
    ]
    assert (snapshot(hub, tmp_path) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_damaged_download_is_not_taken(hub, capsys):
    hub.altered.add("model.safetensors")
    code, out, err = run(capsys, "org/name")
    assert "error: model.safetensors of org/name came damaged" in err and (code, out) == (1, "")


def test_a_full_disk_is_known_before_it_is_full(hub, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")(GB, 0, 30_000)
    monkeypatch.setattr(hub_cache.shutil, "disk_usage", lambda _: usage)
    for arguments in (["org/name"], ["org/name", "--dry-run"]):
        code, _, err = run(capsys, *arguments)
        assert "error: org/name needs 40 kB more in " in err and "and 30 kB are free" in err and code == 3
    assert not hub.asked("model.safetensors")


def test_offline_says_what_is_here_and_fetches_nothing(hub, capsys, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "org/name")
    assert err.splitlines()[1:] == [
        "error: HF_HUB_OFFLINE is set, so nothing is fetched of org/name",
        " hint: nothing of it is here; unset HF_HUB_OFFLINE to fetch it",
    ]
    assert (code, out, hub.seen) == (3, "", [])

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.breaks["model.safetensors"] = [20 * CHUNK, *[0] * 20]
    run(capsys, "org/name")
    hub.breaks.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (
        " hint: 20 kB of it are here; unset HF_HUB_OFFLINE to fetch the rest\n" in run(capsys, "org/name")[2]
    )

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    run(capsys, "org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.seen.clear()
    code, out, err = run(capsys, "org/name")
    assert out == (
        f"org/name is in {snapshot(hub, tmp_path)}; chat with it: treeeagle chat --model org/name\n"
    )
    assert "note: HF_HUB_OFFLINE is set: org/name is taken as it lies here, whole" in err
    assert (code, hub.seen) == (0, [])


def test_a_hub_that_does_not_answer(hub, capsys, monkeypatch):
    run(capsys, "org/name")
    hub.add("org/other", MODEL)
    hub.status = 503
    assert "note: the hub does not answer: org/name is taken as it lies here" in run(capsys, "org/name")[2]
    assert run(capsys, "org/name", "--verify")[0] == 3, "checksums are the hub's to tell"
    code, _, err = run(capsys, "org/other")
    assert "error: the hub answered 503 when asked for org/other" in err and code == 3


def test_without_a_network(hub, capsys, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, _, err = run(capsys, "org/name")
    assert (
        "error: org/name is not on this machine, and the hub cannot be reached\n hint: check the network"
        in err
    )
    assert code == 3


def test_a_model_too_large_for_this_machine_is_fetched_with_a_warning(hub, machine, capsys):
    machine(ram=0.5)
    code, _, err = run(capsys, "org/name")
    assert (
        "note: org/name at " in err and "0.50 GB are free on cpu; treeeagle profile --model org/name" in err
    )
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["qwen3-8b"], 1, "no model is named 'qwen3-8b'", "did you mean Qwen/Qwen3-8B?"),
        (["smollm2"], 1, "no model is named 'smollm2'", "did you mean smollm2-135m?"),
        ([str(Path(__file__).parent)], 1, "is on this machine already", "treeeagle chat --model"),
        (["org/nothing"], 1, "the hub has no model org/nothing, or it is private", "check the spelling"),
        (["org/name", "--head"], 1, "no EAGLE-3 head is known for org/name", "leave --head out"),
        (["smollm2-135m-eagle3", "--head"], 2, "smollm2-135m-eagle3 is a head itself", "leave --head out"),
        (["--head-only"], 2, "there is no option --head-only", "--head"),
        ([" "], 2, "the name is empty", "Qwen/Qwen3-8B"),
        (["a", "b"], 2, "got unexpected extra argument", "treeeagle pull --help"),
    ],
)
def test_wrong_input_is_one_sentence_and_a_hint(hub, capsys, arguments, code, message, hint):
    got, out, err = run(capsys, *arguments)
    sentence, advice = err.splitlines()[-2:]
    assert (got, out) == (code, "")
    assert sentence.startswith("error: ") and message in sentence
    assert advice.startswith(" hint: ") and hint in advice


def test_help_names_the_options(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for option in ("[NAME]", "--head", "--dry-run", "--verify"):
        assert option in out


def program(hub: Hub, home: Path, *arguments: str, **changes: str) -> subprocess.Popen[str]:
    """The program itself, turned to `hub` by the variables that people set."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HF_") and key != "HUGGING_FACE_HUB_TOKEN"
    }
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **changes}
    command = [sys.executable, "-m", "treeeagle_edge.cli.app", "pull", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, preexec_fn=_heed_ctrl_c, **pipes)  # type: ignore[call-overload]


def _heed_ctrl_c() -> None:
    """SIGINT is ignored where the tests run in the background of a shell, and a program inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_keeps_what_came_and_the_next_run_goes_on(tmp_path):
    """The real program against a line that goes dead halfway: SIGINT ends it at once, and nothing is lost."""
    large = random.Random(3).randbytes(25_000_000)
    with running_hub() as hub:
        hub.add("org/name", {**MODEL, "model.safetensors": large})
        hub.breaks["model.safetensors"] = [22_000_000]
        hub.stalls = True
        running = program(hub, tmp_path, "org/name")
        deadline = time.monotonic() + 60
        partial = None
        while time.monotonic() < deadline and (partial is None or partial.stat().st_size < 20_000_000):
            time.sleep(0.05)
            partial = next(tmp_path.rglob("*.incomplete"), None)
        assert partial is not None and running.poll() is None
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert running.returncode == 130 and out == ""
        assert err.splitlines()[-1] == "stopped; what has come is kept: run the same command again to go on"
        assert "Traceback" not in err
        kept = partial.stat().st_size
        hub.stalls = False
        hub.seen.clear()
        again = program(hub, tmp_path, "org/name")
        out, err = again.communicate(timeout=60)
        assert again.returncode == 0, err
        assert [seen.range for seen in hub.asked("model.safetensors") if seen.host == "localhost"] == [
            f"bytes={kept}-"
        ]
        folder = Path(out.removeprefix("org/name is in ").partition(";")[0])
        assert (folder / "model.safetensors").read_bytes() == large


def test_the_variables_of_the_hub_are_obeyed(tmp_path):
    with running_hub() as hub:
        hub.add("org/name", MODEL)
        hub.gated.add("org/name")
        done = program(hub, tmp_path, "org/name", HF_TOKEN=TOKEN)
        out, err = done.communicate(timeout=60)
        assert done.returncode == 0 and str(tmp_path / "hub") in out, err
        hub.seen.clear()
        offline = program(hub, tmp_path, "org/name", HF_HUB_OFFLINE="1")
        assert offline.communicate(timeout=60)[0] == out and offline.returncode == 0
        assert hub.seen == []
