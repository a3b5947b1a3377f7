"""Conversations on disk."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from treeeagle_edge.chat.history import (
    SavedSession,
    last_session_path,
    load_session,
    new_session_path,
    save_session,
)
from treeeagle_edge.chat.prompt import Turn
from treeeagle_edge.errors import InputError

SESSION = SavedSession(
    model="toy",
    turns=(Turn("hi 👋", "hello\n", (104, 105, 257), "stop"), Turn("more", "wel", (1, 2), "interrupt")),
    system="Be brief.",
    settings={"temperature": 0.5},
)


def test_what_was_saved_is_loaded():
    """Expectations row 43: the old chat is there, ids and all."""
    path = new_session_path()
    save_session(path, SESSION)
    assert load_session(path) == SESSION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["schema"] == 1
    assert content["messages"][1] == {
        "role": "assistant",
        "content": "hello\n",
        "token_ids": [104, 105, 257],
        "finish_reason": "stop",
    }


def test_the_state_folder_is_the_one_of_the_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert new_session_path().parent == tmp_path / "treeeagle" / "sessions"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new_session_path().parent == tmp_path / ".local" / "state" / "treeeagle" / "sessions"


def test_the_last_session_is_the_one_written_last():
    """Expectations row 43: `--continue` finds it; without one it says so."""
    with pytest.raises(InputError, match="no earlier session"):
        last_session_path()
    first, second = new_session_path(), new_session_path()
    assert first != second
    save_session(first, SESSION)
    save_session(second, SESSION)
    os.utime(first, ns=(2**62, 2**62))
    assert last_session_path() == first


def test_a_session_that_goes_away_meanwhile_is_not_the_last_one(monkeypatch):
    first, second = new_session_path(), new_session_path()
    for path in (first, second):
        save_session(path, SESSION)
    look = Path.stat

    def moved(path: Path, **options: bool) -> os.stat_result:
        if path == second:
            raise FileNotFoundError(2, "no such file", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", moved)
    assert last_session_path() == first


def test_ids_of_another_model_are_left_out():
    assert SESSION.turns_for("toy") == list(SESSION.turns)
    other = SESSION.turns_for("other")
    assert [turn.token_ids for turn in other] == [(), ()]
    assert [turn.answer for turn in other] == ["hello\n", "wel"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema": 99}',
        b'{"schema": "1"}',
        b'{"schema": 1}',
        b'{"schema": 1, "model": "m", "messages": [{"role": "assistant", "content": "x"}]}',
        b'{"schema": 1, "model": "m", "messages": [{"role": "user", "content": 3}]}',
        b'{"schema": 1, "model": "m", "messages": [{"role": "user", "content": "x"}]}',
        b'{"schema": 1, "model": "m", "messages": 5}',
        b'{"schema": 1, "model": "m", "messages": ["x"]}',
        b'{"schema": 1, "messages": []}',
        b'{"schema": 1, "model": "m", "messages": [], "settings": 5}',
        b"[" * 100_000,
        *(
            b'{"schema": 1, "model": "m", "messages": [{"role": "user", "content": "%s"},'
            b' {"role": "assistant", "content": "x", "token_ids": %s}]}' % parts
            for parts in (
                (b"half a pair: \\ud83d", b"[]"),
                *(
                    (b"hi", ids)
                    for ids in (b"[1e400]", b"[-1]", b"[4294967296]", b"[true]", b'"12"', b"null")
                ),
            )
        ),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content):
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_session(path)
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert path.read_bytes() == content


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"nothing.json cannot be read: no such file"):
        load_session(tmp_path / "nothing.json")
