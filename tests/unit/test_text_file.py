"""Text and JSON that a person hands over, and paths as they are typed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import json_reason, parse_json, read_json
from treeeagle_edge.paths import cache_dir, typed_path
from treeeagle_edge.text_file import read_stream, read_text

DEEP = "[" * 100_000


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "from-windows.txt"
    path.write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\n")
    assert read_text(path) == "naïve\r\n"


def test_what_never_ends_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert 0 <= size < 1 << 20
            return b"x" * size

    with pytest.raises(InputError, match="the pipe has more than 0 MB of text") as caught:
        read_stream(Endless(), "the pipe", 1000)  # type: ignore[arg-type]
    assert caught.value.hint
    assert read_stream(io.BytesIO(b"x" * 1000), "the pipe", 1000) == "x" * 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEEP, "it is nested too deeply"),
        ('{"a": "\\ud83d"}', "it holds half a surrogate pair"),
        ("{,", "expecting property name enclosed in double quotes at column 2"),
    ],
)
def test_json_that_python_takes_and_nothing_else_does(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_json(text)
    assert json_reason(caught.value) == reason
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "😀"


def test_a_tilde_is_the_home_folder_and_of_nobody_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert typed_path("~/models") == Path("/home/me/models")
    assert typed_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    monkeypatch.setenv("TREEEAGLE_CACHE", "~nobody-of-this-name/x")
    assert cache_dir() == Path.cwd() / "~nobody-of-this-name/x"
