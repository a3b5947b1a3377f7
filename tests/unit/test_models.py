"""Names to files: the demo model, folders, GGUF files, the hub's cache, and what a person reads when none fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from hub_stand_in import running_hub, use_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub import repository as hub_repository
from treeeagle_edge.hub.fetch import cached_repository, fetch_repository, is_repository, repository_of
from treeeagle_edge.sources import model_names
from treeeagle_edge.sources.demo_model import DEMO_MODEL
from treeeagle_edge.sources.model_names import BUNDLED_HEADS, model_label, resolve_head, resolve_model


def _checkpoint(folder: Path, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / weights).write_bytes(b"")
    return folder


@pytest.fixture
def demo_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stands for the demo model, so that nothing is fetched here."""
    path = tmp_path / DEMO_MODEL.filename
    monkeypatch.setattr(model_names, "fetch_demo_model", lambda progress: path)
    return path


def _no_hub(repository: str, **options: object) -> str:
    raise LocalEntryNotFoundError(f"{repository} is not in the cache")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _no_hub)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", " smollm2-135m "])
def test_the_demo_model_has_a_name(name: str, demo_path: Path) -> None:
    assert resolve_model(name) == demo_path


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "my model")
    assert resolve_model(str(folder)) == folder


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = _checkpoint(tmp_path / "m")
    assert resolve_model("~/m") == folder


def test_a_gguf_file_is_a_model_in_any_case_of_its_suffix(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    file.touch()
    assert resolve_model(str(file)) == file


def test_the_only_gguf_of_a_folder_is_taken_and_of_two_one_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InputError, match="holds 2 GGUF files") as caught:
        resolve_model(str(tmp_path))
    assert str(tmp_path / "a.gguf") in str(caught.value.hint)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))


def test_a_shard_points_to_its_folder(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "m")
    with pytest.raises(InputError, match="one file of a model") as caught:
        resolve_model(str(folder / "model.safetensors"))
    assert str(folder) in str(caught.value.hint)


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="is not a model"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("smolm2-135m", "smollm2-135m"), ("Qwen3-8B", "Qwen/Qwen3-8B"), ("qwen3-8b", "Qwen/Qwen3-8B")],
)
def test_a_misspelt_name_gets_the_closest_one(typed: str, meant: str) -> None:
    with pytest.raises(InputError, match="no model is named") as caught:
        resolve_model(typed)
    assert caught.value.hint == f"did you mean {meant}?"


@pytest.mark.parametrize("more", ["", "/", "/tree/main", "/blob/main/config.json"])
def test_an_address_of_the_hub_gets_the_name_in_it(more: str, no_hub: None) -> None:
    with pytest.raises(InputError, match="is an address of the hub") as caught:
        resolve_model("https://hub.example/Qwen/Qwen3-8B" + more)
    assert caught.value.hint == "give its name: Qwen/Qwen3-8B"


def test_a_link_to_nothing_is_not_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(InputError, match=r"model\.gguf is a link to what is not there"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_misspelt_path_gets_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-Q4_1.gguf").touch()
    with pytest.raises(InputError, match="no such file or folder") as caught:
        resolve_model(str(tmp_path / "SmolLM2-Q4.gguf"))
    assert caught.value.hint == f"did you mean {tmp_path / 'SmolLM2-Q4_1.gguf'}?"


@pytest.mark.parametrize(
    "name", ["", "   ", "x" * 5000, "a\0b", "~nobody-here/x", "a/b/c/d", "zzzzzzzz", "/", "..", "\\\\"]
)
def test_any_other_text_is_one_sentence_and_a_hint(name: str, no_hub: None) -> None:
    with pytest.raises(InputError) as caught:
        resolve_model(name)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_a_repository_is_taken_from_the_cache_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _checkpoint(tmp_path / "models--org--name" / "snapshots" / "1")
    calls: list[bool] = []

    def snapshot(repository: str, *, local_files_only: bool = False, **_: object) -> str:
        calls.append(local_files_only)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name") == folder
    assert calls == [True]


def _cached(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str = "model") -> Path | None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    return cached_repository("org/name", what)


@pytest.mark.parametrize("single", ["model.safetensors", "pytorch_model.bin"])
def test_a_cached_repository_that_lacks_a_shard_is_not_whole(
    single: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _checkpoint(tmp_path / "m", "shard-1")
    (folder / f"{single}.index.json").write_text(json.dumps({"weight_map": {"a": "shard-1", "b": "shard-2"}}))
    assert _cached(folder, monkeypatch) is None
    (folder / "shard-2").touch()
    assert _cached(folder, monkeypatch) == folder
    (folder / f"{single}.index.json").write_text("{")
    assert _cached(folder, monkeypatch) is None


def test_a_cached_repository_without_weights_or_tokenizer_is_not_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _cached(_checkpoint(tmp_path / "w", "weights.h5"), monkeypatch) is None
    folder = _checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    assert _cached(folder, monkeypatch) is None
    assert _cached(folder, monkeypatch, "head") == folder
    (folder / "config.json").unlink()
    assert _cached(folder, monkeypatch, "head") is None


def _http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("refused", response=response)  # type: ignore[arg-type]  # the hub only reads these fields


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (_http_error(GatedRepoError, 403), InputError, "is gated"),
        (_http_error(RepositoryNotFoundError, 404), InputError, "the hub has no model org/name"),
        (_http_error(HfHubHTTPError, 503), CannotRunError, "the hub answered 503"),
        (OSError(28, "No space left on device"), CannotRunError, "disk of the hub's cache is full"),
        (PermissionError(13, "Permission denied", "/c"), CannotRunError, r"stored: permission denied \(/c\)"),
        (ConnectionError("no route"), CannotRunError, "the hub cannot be reached"),
        (LocalEntryNotFoundError("gone"), CannotRunError, "the hub cannot be reached"),
        (OfflineModeIsEnabled("offline"), CannotRunError, "HF_HUB_OFFLINE forbids"),
        (RuntimeError("a client library's own"), CannotRunError, "the hub cannot be reached"),
    ],
)
def test_each_failure_of_the_hub_has_its_sentence(
    raised: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    def refuse(name: str) -> hub_repository.Repository:
        raise raised

    monkeypatch.setattr(hub_repository, "look_up", refuse)
    with pytest.raises(kind, match=words) as caught:
        fetch_repository("org/name", "model")
    assert caught.value.hint  # type: ignore[attr-defined]  # every kind above carries one


def test_the_demo_model_comes_with_its_head(demo_path: Path) -> None:
    for name in ("smollm2-135m", "SmolLM2-135M", str(demo_path)):
        assert resolve_head(None, name) == BUNDLED_HEADS / "smollm2-135m-eagle3"
    assert resolve_head("smollm2-135m-eagle3", "anything") == BUNDLED_HEADS / "smollm2-135m-eagle3"


def test_the_bundled_head_is_whole() -> None:
    folder = BUNDLED_HEADS / "smollm2-135m-eagle3"
    names = {file.name for file in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "training.json", "README.md"}
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 10_240


def test_no_head_where_none_is_wanted_or_known(no_hub: None, tmp_path: Path) -> None:
    assert resolve_head("none", "smollm2-135m") is None
    assert resolve_head(None, str(_checkpoint(tmp_path / "unheard-of"))) is None
    # known, but nobody trained an EAGLE-3 head for it
    assert resolve_head(None, "Qwen/Qwen2-7B-Instruct") is None
    assert resolve_head(None, "Qwen/Qwen3-8B") is None  # known, not on this machine, and not asked for


def test_a_known_head_is_taken_when_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _checkpoint(tmp_path / "head")
    asked: list[str] = []

    def snapshot(repository: str, *, local_files_only: bool = False, **_: object) -> str:
        assert local_files_only, "a head that nobody named must not be downloaded"
        asked.append(repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_head(None, "Qwen/Qwen3-8B") == folder
    assert resolve_head(None, str(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "1")) == folder
    assert asked == ["AngelSlim/Qwen3-8B_eagle3"] * 2


def test_a_named_head_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        use_hub(hub, tmp_path, monkeypatch)
        hub.add("org/head", {"config.json": {"draft_vocab_size": 8}, "pytorch_model.bin": b"weights"})
        folder = resolve_head("org/head", "anything")
    assert folder is not None
    assert {file.name for file in folder.iterdir()} == {"config.json", "pytorch_model.bin"}


def test_heads_are_folders_or_weight_files(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "head", "pytorch_model.bin")
    assert resolve_head(str(folder), "m") == folder
    assert resolve_head(str(folder / "pytorch_model.bin"), "m") == folder / "pytorch_model.bin"


def test_what_is_no_head_says_why(tmp_path: Path, no_hub: None) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").touch()
    (tmp_path / "h.gguf").touch()
    (tmp_path / "h.txt").touch()
    for name, words in [
        ("empty", "has no config.json"),
        ("bare", "neither .safetensors nor .bin"),
        ("h.gguf", "GGUF head"),
        ("h.txt", "is not a head"),
        ("gone", "no such file or folder"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            resolve_head(str(tmp_path / name), "m")
        assert caught.value.hint
    with pytest.raises(InputError, match="no head is named") as caught:
        resolve_head("smollm2-135m-eagle", "m")
    assert caught.value.hint == "did you mean smollm2-135m-eagle3?"


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("smollm2-135m", "smollm2-135m"),
        (f"/cache/models/{DEMO_MODEL.filename}", "smollm2-135m"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (Path("/hub/models--Qwen--Qwen3-8B/snapshots/12ab"), "Qwen/Qwen3-8B"),
        (Path("/m/Llama-3.1-8B"), "Llama-3.1-8B"),
        (Path("/m/llama.Q4_0.gguf"), "llama.Q4_0"),
        (BUNDLED_HEADS / "smollm2-135m-eagle3", "smollm2-135m-eagle3"),
        (Path("/m/my-head/pytorch_model.bin"), "my-head"),
    ],
)
def test_labels(given: str | Path, label: str) -> None:
    assert model_label(given) == label


def test_a_repository_has_one_slash() -> None:
    assert is_repository("Qwen/Qwen3-8B")
    assert not any(is_repository(name) for name in ("Qwen3", "a/b/c", "./a", "../a", "/a", "a/", "~/a"))
    assert repository_of(Path("/a/b")) is None


def test_a_local_name_imports_neither_torch_nor_the_hub() -> None:
    code = (
        "import sys; from treeeagle_edge.sources.model_names import resolve_head, resolve_model; "
        "resolve_head(None, 'smollm2-135m');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
