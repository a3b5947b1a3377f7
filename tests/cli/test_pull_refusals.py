"""What `treeeagle pull` says where a fetch cannot begin or does not end: a sentence, a hint, an exit code."""

from __future__ import annotations

import socket
import time
from collections import namedtuple
from pathlib import Path

import pytest
from hub_model import CONFIG
from hub_stand_in import CHUNK, TOKEN
from pull_cases import MODEL, WEIGHTS, run, snapshot

from treeeagle_edge.hub import cache as hub_cache
from treeeagle_edge.units import GB


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
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    sentence = (
        "error: org/name is not on this machine, and the hub cannot be reached\n hint: check the network"
    )
    code, _, err = run(capsys, "org/name")
    assert f"{sentence} and HF_ENDPOINT, or give" in err and code == 3
    monkeypatch.setenv("HTTPS_PROXY", "http://somebody:secret@127.0.0.1:9")
    err = run(capsys, "org/name")[2]
    assert f"{sentence}, HTTPS_PROXY and HF_ENDPOINT, or give" in err and "secret" not in err


def test_a_hub_that_takes_connections_and_never_answers_is_given_up(hub, capsys, monkeypatch):
    """As a proxy does whose own line is dead: the wait is the client's timeout, not for ever."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        code, out, err = run(capsys, "org/name")
        took = time.monotonic() - began
    assert "error: org/name is not on this machine, and the hub cannot be reached\n hint: check the" in err
    assert (code, out) == (3, "") and took < 8


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
