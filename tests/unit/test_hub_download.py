"""Fetching from a hub: nothing is lost by an interruption, nothing is believed without its checksum."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hub_stand_in import CHUNK, TOKEN, Hub, checksum, running_hub, use_hub

from treeeagle_edge import hub_cache, hub_download, hub_progress, hub_repository
from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub import cached_repository, fetch_repository
from treeeagle_edge.hub_cache import CacheFolder, missing_bytes
from treeeagle_edge.hub_download import download
from treeeagle_edge.hub_repository import RemoteFile, Repository, files_of, kind_of, look_up

NAME = "org/name"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
WEIGHTS = random.Random(7).randbytes(40 * CHUNK + 123)
DEAD = [0] * 20  # answers of a line that gives nothing any more


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub that holds one model, and this process's client turned to it."""
    with running_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        files = {"config.json": CONFIG, "tokenizer.json": "{}", "model.safetensors": WEIGHTS}
        hub.add(NAME, {**files, "README.md": "hello", "original/model.safetensors": b"x" * 5000})
        yield hub


def fetched(said: list[str] | None = None) -> Path:
    return fetch_repository(NAME, "model", None if said is None else said.append)


def place(what: str = "partial") -> Path:
    """Where the weights lie in the cache, whole ("blob") or while they come ("partial")."""
    repository = look_up(NAME)
    return getattr(CacheFolder(repository), what)(repository.file("model.safetensors"))


def ranges(hub: Hub) -> list[str | None]:
    """The ranges that the storage was asked for."""
    return [seen.range for seen in hub.asked("model.safetensors") if seen.host == "localhost"]


def test_what_is_needed_comes_and_nothing_else(hub):
    folder = fetched()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not hub.asked("README.md") and len(hub.asked("config.json")) == 1
    assert cached_repository(NAME, "model") == folder


def test_a_second_fetch_opens_no_connection(hub):
    folder = fetched()
    hub.seen.clear()
    assert fetched() == folder and hub.seen == []


def test_the_token_goes_to_the_hub_and_never_to_its_storage(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.gated.add(NAME)
    fetched()
    assert {seen.token for seen in hub.seen if seen.host == "localhost"} == {None}
    assert {seen.token for seen in hub.asked("config.json")} == {TOKEN}


def test_an_interruption_loses_nothing(hub):
    """Halfway the line goes dead for good. The next run asks for the rest only, and the whole is right."""
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    with pytest.raises(
        CannotRunError, match="the connection broke while org/name was being fetched"
    ) as error:
        fetched()
    assert "run the same command again" in error.value.hint
    assert cached_repository(NAME, "model") is None
    kept = place().stat().st_size
    assert kept == 20 * CHUNK
    hub.breaks.clear()
    hub.seen.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [f"bytes={kept}-"]
    assert not place().exists()


def test_a_short_break_is_bridged_in_the_same_run(hub):
    hub.breaks["model.safetensors"] = [5 * CHUNK]
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [None, f"bytes={5 * CHUNK}-"]


def test_a_line_that_breaks_again_and_again_is_borne_as_long_as_bytes_come(hub):
    hub.breaks["model.safetensors"] = [3 * CHUNK, *[CHUNK] * 30]
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_line_that_breaks_too_often_is_given_up_and_loses_nothing(hub, monkeypatch):
    """The client's own five attempts are taken away, so that each break is one of ours."""
    from huggingface_hub import file_download

    once = file_download.http_get
    monkeypatch.setattr(file_download, "http_get", lambda *a, **options: once(*a, **options, _nb_retries=0))
    monkeypatch.setattr(hub_download, "_MOST_BREAKS", 4)
    hub.breaks["model.safetensors"] = [0, *[2 * CHUNK] * 30]
    with pytest.raises(CannotRunError, match="the connection broke"):
        fetched()
    assert place().stat().st_size == 0, "an answer without a byte is not asked for again"
    with pytest.raises(CannotRunError, match="the connection broke"):
        fetched()
    kept = place().stat().st_size
    assert kept == 4 * 2 * CHUNK
    hub.breaks.clear()
    hub.seen.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [f"bytes={kept}-"]


def test_a_server_without_ranges_costs_time_only(hub):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    with pytest.raises(CannotRunError):
        fetched()
    hub.breaks.clear()
    hub.ignores_ranges = True
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("length", [7 * CHUNK, len(WEIGHTS), len(WEIGHTS) + 5])
def test_a_damaged_part_is_found_out_and_fetched_again(hub, length):
    path = place()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"?" * length)
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_is_altered_on_its_way_is_refused_and_not_kept(hub, file):
    hub.altered.add(file)
    with pytest.raises(InputError, match=f"{file} of org/name came damaged") as error:
        fetched()
    assert "proxy or mirror" in error.value.hint
    assert cached_repository(NAME, "model") is None and not place().exists()
    hub.altered.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_cut_short_in_the_cache_is_fetched_again(hub):
    folder = fetched()
    place("blob").write_bytes(WEIGHTS[:-1])
    repository = look_up(NAME)
    download(repository, files_of(repository, "model"), print)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_verifying_finds_a_byte_that_changed_in_the_cache(hub):
    folder = fetched()
    place("blob").write_bytes(b"?" + WEIGHTS[1:])
    repository = look_up(NAME)
    files = files_of(repository, "model")
    download(repository, files, print)
    assert (folder / "model.safetensors").read_bytes() != WEIGHTS, "by its size alone it looks right"
    download(repository, files, print, verify=True)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_only_what_is_missing_has_to_come(hub):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    repository = look_up(NAME)
    files = files_of(repository, "model")
    assert missing_bytes(repository, files) == sum(file.size for file in files)
    with pytest.raises(CannotRunError):
        fetched()
    assert missing_bytes(repository, files) == len(WEIGHTS) - 20 * CHUNK
    hub.breaks.clear()
    fetched()
    assert missing_bytes(repository, files) == 0


def test_a_disk_too_small_is_found_before_anything_comes(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**6, 0, 10**4)
    monkeypatch.setattr(hub_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CannotRunError, match=r"org/name needs 40 kB more in .*, and 10 kB are free") as error:
        fetched()
    assert "HF_HOME" in error.value.hint
    assert not hub.asked("model.safetensors")


def test_a_disk_that_fills_up_keeps_what_has_come(hub, monkeypatch):
    def full(descriptor):
        if os.fstat(descriptor).st_size == len(WEIGHTS):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hub_download.os, "fsync", full)
        with pytest.raises(CannotRunError, match="the disk of the hub's cache is full") as error:
            fetched()
    assert "what has come is kept" in error.value.hint
    assert place().stat().st_size == len(WEIGHTS)
    hub.seen.clear()
    fetched()
    assert ranges(hub) == []


def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch):
    cache = place().parents[2]
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where a folder should be")
    with pytest.raises(CannotRunError, match="org/name cannot be stored: ") as error:
        fetched()
    assert "HF_HOME" in error.value.hint


def test_two_at_once_fetch_each_file_once(hub):
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetched())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(folders) == 2 and folders[0] == folders[1]
    assert ranges(hub) == [None]


def test_a_repository_that_changes_meanwhile_is_asked_for_again(hub):
    repository = look_up(NAME)
    content = hub.repositories[NAME]
    hub.add(NAME, {**content, "README.md": "news"})
    with pytest.raises(CannotRunError, match="was changed on the hub while it was being fetched"):
        download(repository, files_of(repository, "model"), print)
    hub.seen.clear()
    fetched()
    assert ranges(hub) == []


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


def test_progress_is_few_lines_in_a_file_and_many_where_they_replace_each_other(hub, tmp_path, monkeypatch):
    said: list[str] = []
    fetched(said)
    assert said[0] == "fetching model org/name from the hub"
    lines = [line for line in said if line.startswith("model.safetensors: ")]
    assert 10 <= len(lines) <= 20 and lines[0].endswith(" of 40 kB")

    class InPlace(list):
        in_place = True

        def __call__(self, message):
            self.append(message)

    lively = InPlace()
    monkeypatch.setattr(hub_progress, "_REFRESH", 0.0)
    repository = look_up(NAME)
    place("blob").unlink()
    download(repository, files_of(repository, "model"), lively)
    assert len(lively) > len(lines)


def test_the_rest_of_the_way_is_told_in_time(monkeypatch):
    said: list[str] = []
    clock = iter(range(100, 200))
    monkeypatch.setattr(hub_progress.time, "monotonic", lambda: float(next(clock)))
    meter = hub_progress.Meter(said.append, 60 * 10**9)
    meter.end(10**9)
    meter.begin("a.safetensors", 10**9)
    for _ in range(5):
        meter.chunk(10**9)
    for _ in range(12):
        meter.chunk(2 * 10**9)
    assert said[-1] == "a.safetensors: 31.0 GB of 60.0 GB, 2.2 GB/s, 13 s left", "the last ten seconds count"
    assert [hub_progress.duration(seconds) for seconds in (3, 700, 4000)] == ["3 s", "12 min", "1 h 07 min"]


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
