"""What a repository of the hub holds, which of its files are taken, and whom it is refused to."""

from __future__ import annotations

import json

import pytest
from hub_model import CONFIG, NAME, WEIGHTS, fetched
from hub_stand_in import TOKEN, checksum

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub import download as hub_download
from treeeagle_edge.hub import repository as hub_repository
from treeeagle_edge.hub.fetch import fetch_repository
from treeeagle_edge.hub.repository import RemoteFile, Repository, files_of, kind_of, look_up


def test_the_token_goes_to_the_hub_and_never_to_its_storage(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.gated.add(NAME)
    fetched()
    assert {seen.token for seen in hub.seen if seen.host == "localhost"} == {None}
    assert {seen.token for seen in hub.asked("config.json")} == {TOKEN}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"already quantised \(awq\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"already quantised \(gptq\)"),
        ({"architectures": ["MambaForCausalLM"]}, "hybrid or recurrent"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "mixture of experts"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "is a draft head"),
    ],
)
def test_what_does_not_run_here_is_refused_before_its_weights_come(hub, change, words):
    """Expectations row 37: a quantised repository is detected from config.json, and refused with advice."""
    hub.add(NAME, {**hub.repositories[NAME], "config.json": {**CONFIG, **change}})
    with pytest.raises(InputError, match=words) as error:
        fetched()
    assert error.value.hint
    assert not hub.asked("model.safetensors") and not hub.asked("tokenizer.json")


@pytest.mark.parametrize(
    ("what", "names", "taken"),
    [
        ("model", "model.safetensors pytorch_model.bin", "model.safetensors"),
        (
            "model",
            "model-1-of-2.safetensors model-2-of-2.safetensors model.safetensors.index.json "
            "consolidated.safetensors adapter_model.safetensors pytorch_model.bin",
            "model-1-of-2.safetensors model-2-of-2.safetensors model.safetensors.index.json",
        ),
        ("model", "pytorch_model.bin training_args.bin optimizer.bin", "pytorch_model.bin"),
        (
            "model",
            "pytorch_model-1-of-2.bin pytorch_model-2-of-2.bin pytorch_model.bin.index.json",
            "pytorch_model-1-of-2.bin pytorch_model-2-of-2.bin pytorch_model.bin.index.json",
        ),
        ("head", "model.safetensors pytorch_model.bin training_args.bin", "model.safetensors"),
        ("head", "pytorch_model.bin training_args.bin", "pytorch_model.bin"),
    ],
)
def test_of_several_formats_one_is_taken(what, names, taken):
    texts = ["config.json", "tokenizer.json", "README.md", "onnx/model.safetensors"]
    files = tuple(RemoteFile(name, 1, "") for name in (*texts, *names.split()))
    kept = {file.name for file in files_of(Repository(NAME, "1", files), what)}
    assert kept == {*taken.split(), "config.json"} | ({"tokenizer.json"} if what == "model" else set())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("m.Q4_0.gguf m.Q8_0.gguf", "holds GGUF files, of which one is enough"),
        ("adapter_config.json adapter_model.safetensors", "holds an adapter, not a whole model"),
        ("config.json tokenizer.json model.onnx", "holds nothing in a format that can be read"),
        ("config.json model.safetensors", "holds no tokenizer"),
        ("", "holds nothing in a format that can be read"),
    ],
)
def test_a_repository_of_another_kind_is_named(names, words):
    files = tuple(RemoteFile(name, 1, "") for name in names.split())
    with pytest.raises(InputError, match=words) as error:
        files_of(Repository(NAME, "1", files), "model")
    assert error.value.hint


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [
        (NAME, CONFIG, "model"),
        (NAME, {**CONFIG, "draft_vocab_size": 32000}, "head"),
        (NAME, {"speculators_model_type": "eagle3"}, "head"),
        (NAME, {"architectures": ["LlamaForCausalLMEagle3"]}, "head"),
        ("angelslim/qwen3-8b_eagle3", CONFIG, "head"),
    ],
)
def test_a_head_is_told_from_a_model(name, config, kind):
    assert kind_of(name, config) == kind


def test_gated_repositories_are_explained(hub, monkeypatch):
    hub.gated.add(NAME)
    with pytest.raises(InputError, match="org/name is gated") as error:
        fetched()
    assert error.value.hint == (
        f"accept it on {hub.url}/org/name, then log in with `hf auth login`, or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_stranger")
    with pytest.raises(InputError, match="org/name is gated") as error:
        fetched()
    assert "the account of your token" in error.value.hint
    assert not hub.asked("model.safetensors")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, InputError, "does not accept your token"),
        (403, InputError, "your token may not read"),
        (429, CannotRunError, "too many requests"),
        (503, CannotRunError, "the hub answered 503"),
    ],
)
def test_a_status_has_its_sentence(hub, status, kind, words):
    hub.status = status
    with pytest.raises(kind, match=words) as error:
        fetched()
    assert error.value.hint


def test_a_name_nobody_knows_gets_the_closest_one(hub):
    with pytest.raises(InputError, match="the hub has no model Qwen/Qwen3-8") as error:
        fetch_repository("Qwen/Qwen3-8", "model")
    assert error.value.hint.startswith("did you mean Qwen/Qwen3-8B?")


def test_checksums_are_those_that_git_and_its_large_files_use(tmp_path):
    """`printf hello | git hash-object --stdin`, and `printf hello | sha256sum`."""
    path = tmp_path / "hello"
    path.write_text("hello")
    assert RemoteFile("hello", 5, "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0").matches(path)
    large = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert RemoteFile("hello", 5, large).matches(path)
    path.write_text("hallo")
    assert not RemoteFile("hello", 5, large).matches(path)
    assert checksum(b"hello") == "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"


def test_the_stand_in_speaks_of_files_as_the_hub_does(hub):
    """What `look_up` makes of the answer is what was put there."""
    repository = look_up(NAME)
    assert repository.commit == hub.commit(NAME)
    body = json.dumps(CONFIG).encode()
    assert repository.file("config.json") == RemoteFile("config.json", len(body), checksum(body))
    assert repository.file("model.safetensors").size == len(WEIGHTS)
    assert hub_download.fetch_config(repository) == CONFIG
    assert hub_repository.check_model(NAME, CONFIG).hidden_size == 64
