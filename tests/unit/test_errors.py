"""What the system says becomes the end of our own sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from treeeagle_edge.bench.compare import read_document
from treeeagle_edge.bench.prompts import read_prompts
from treeeagle_edge.chat.history import load_session
from treeeagle_edge.checkpoint.head_files import read_head_tensors
from treeeagle_edge.cli.given_files import read_given
from treeeagle_edge.errors import TreeEagleError, reason_of
from treeeagle_edge.gguf_file import GGUFFile, GGUFTensor, open_gguf
from treeeagle_edge.json_file import read_json
from treeeagle_edge.planning.memory_profile import load_profile
from treeeagle_edge.sources.demo_model import fetch_demo_model
from treeeagle_edge.sources.model_names import resolve_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError(13, "Permission denied", "/A/B"), "permission denied"),
        (OSError("Could not seek in /A/B."), "could not seek in /A/B"),
        (ValueError("Two\nlines"), "two"),
        (OSError(), "OSError"),
    ],
)
def test_a_reason_ends_a_lower_case_sentence(error, reason):
    """Names in it keep their capitals."""
    assert reason_of(error) == reason


def blocks_of_a_file_that_went(path: Path) -> None:
    tensor = GGUFTensor("t", (4,), GGMLQuantizationType.F32, 0, 16)
    GGUFFile(path / "gone.gguf", {}, {"t": tensor}).blocks("t")


def gguf_that_may_not_be_read(path: Path) -> None:
    (path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    open_gguf(path / "x.gguf")


READERS: list[Callable[[Path], object]] = [
    blocks_of_a_file_that_went,
    gguf_that_may_not_be_read,
    lambda path: read_json(path / "gone.json"),
    lambda path: resolve_model(str(path)),
    lambda _: fetch_demo_model(),
    lambda path: read_prompts(path / "gone.jsonl"),
    lambda path: read_document(path / "gone.json"),
    lambda path: read_given(path / "gone.txt"),
    lambda path: load_session(path / "gone.json"),
    lambda path: load_profile(str(path / "gone.yaml")),
    lambda path: read_head_tensors(path / "gone.safetensors"),
]


@pytest.mark.parametrize("read", READERS)
def test_every_reader_says_it_in_lower_case(read, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    monkeypatch.setattr(Path, "iterdir", refuse)
    blocker = tmp_path / "blocker"
    blocker.touch()
    monkeypatch.setenv("TREEEAGLE_CACHE", str(blocker))
    with pytest.raises(TreeEagleError) as caught:
        read(tmp_path)
    said = "permission denied|no such file or directory|not a directory|file exists"
    assert re.search(rf": ({said})\b", caught.value.message)


def test_no_module_puts_it_in_words_of_its_own():
    """One helper makes the reason of an error; `os.strerror` makes an error of a number."""
    folders = (ROOT / "treeeagle_edge", ROOT / "kernels")
    sources = [file for folder in folders for file in folder.rglob("*.py") if file.name != "errors.py"]
    assert len(sources) > 50
    assert [file.name for file in sources if re.search(r"(?<!\bos)\.strerror", file.read_text())] == []
