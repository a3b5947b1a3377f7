"""Slash commands that save, load and send files, as transcripts over a scripted engine."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from chat_typed import prompt_text

from treeeagle_edge.chat.history import load_session
from treeeagle_edge.cli import slash


def test_save_and_load(repl, tmp_path: Path):
    path = tmp_path / "my chat.json"
    result = repl("hello", f"/save '{path}'", "more", f"/save {path}", "/clear", f"/load {path}", "on")
    assert result.err.count(f"saved to {path}") == 2
    assert "loaded 2 messages and answers" in result.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [turn.user for turn in result.conversation.session.turns] == ["hello", "more", "on"]
    assert len(load_session(path).turns) == 2  # a loaded file is not written to without being asked
    known = result.engine.prompts[1]
    assert result.engine.prompts[2][: len(known)] == known


def test_a_loaded_chat_brings_its_settings_back(repl, tmp_path: Path):
    """What was chosen since the start is of the chat that is left, so it goes."""
    path = tmp_path / "chat.json"
    repl("/system Be brief.", "/set temperature 0.25", "/set seed 5", "hello", f"/save {path}")
    result = repl("/set top-p 0.5", f"/load {path}", "on", f"/save {path}")
    assert "brought back: temperature 0.25, seed 5, its system prompt\n" in result.err
    params = result.engine.params[-1]
    assert (params.temperature, params.seed, params.top_p) == (0.25, 5, 0.95)
    assert "Be brief." in prompt_text(result)
    assert load_session(path).settings == {"temperature": 0.25, "seed": 5}


@pytest.mark.parametrize(
    "settings",
    [{"temperature": "hot"}, {"temperature": 99}, {"seed": 1.5}, {"seed": True}, {"top_p": [1]}],
)
def test_settings_that_cannot_be_leave_the_chat_as_it_was(repl, tmp_path: Path, settings):
    path = tmp_path / "chat.json"
    repl("/set seed 5", "hello", f"/save {path}")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "settings": settings}))
    result = repl("/set top-k 7", "first", f"/load {path}", "on")
    assert f"error: {path} is a damaged session: {next(iter(settings)).replace('_', '-')}" in (
        result.err.replace("top_p", "top-p")
    )
    assert [turn.user for turn in result.conversation.session.turns] == ["first", "on"]
    assert result.engine.params[-1].top_k == 7


def test_settings_of_a_later_version_are_left_out(repl, tmp_path: Path):
    path = tmp_path / "chat.json"
    repl("hello", f"/save {path}")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "settings": {"mirostat": 2, "seed": 5}}))
    assert "brought back: seed 5\n" in repl(f"/load {path}").err


def test_save_overwrites_no_other_file(repl, tmp_path: Path):
    path = tmp_path / "thesis.txt"
    path.write_text("four years of work")
    result = repl("hello", f"/save {path}", f"/load {path}", f"/save {tmp_path / 'file' / 'x'}", "hello")
    assert f"error: {path} is there and is no saved session\n hint: choose another name" in result.err
    assert f"error: {path} is not a saved session" in result.err
    assert path.read_text() == "four years of work"
    assert len(result.conversation.session.turns) == 2


def test_save_does_not_wait_for_a_pipe(repl, tmp_path: Path, monkeypatch):
    """Nobody may ever write into one."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(slash, "load_session", lambda path: pytest.fail(f"{path} is opened"))
    result = repl("hello", f"/save {tmp_path / 'pipe'}")
    assert f"error: {tmp_path / 'pipe'} is there and is no saved session\n" in result.err


def test_save_makes_no_folder(repl, tmp_path: Path):
    result = repl("hello", f"/save {tmp_path / 'tpyo' / 'x.json'}")
    assert f"error: there is no folder {tmp_path / 'tpyo'} to save in\n hint: " in result.err
    assert not (tmp_path / "tpyo").exists()


def test_a_file_is_sent(repl, tmp_path: Path):
    path = tmp_path / "my notes.txt"
    path.write_text("line one\nline two\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\x00")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    result = repl(f'/read "{path}" sum this up', f"/read '{path}'", f"/read {binary}", f"/read {empty}")
    assert "<|im_start|>user\nsum this up\n\nline one\nline two<|im_end|>" in prompt_text(result, 0)
    assert "<|im_start|>user\nline one\nline two<|im_end|>" in prompt_text(result, 1)
    assert f"error: {binary} is not UTF-8 text" in result.err
    assert f"error: {empty} is empty" in result.err
    assert len(result.engine.prompts) == 2


def test_a_file_with_spaces_in_its_name_needs_no_quotes_where_it_is_there(repl, tmp_path: Path, monkeypatch):
    """Completion writes the name without any."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my notes.txt").write_text("line one")
    (tmp_path / "plan").write_text("a plan")
    result = repl(
        "/read my notes.txt", "/read my notes.txt sum this up", "/read plan my notes.txt", "/read my"
    )
    texts = [prompt_text(result, number).split("user\n")[-1].split("<|im_end|>")[0] for number in range(3)]
    assert texts == ["line one", "sum this up\n\nline one", "my notes.txt\n\na plan"]
    assert "error: my cannot be read: no such file or directory" in result.err


def test_loading_a_chat_of_another_model_keeps_its_text(repl, tmp_path: Path):
    path = tmp_path / "chat.json"
    repl("hello", f"/save {path}")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": "other"}))
    result = repl(f"/load {path}", "on")
    assert "note: that chat was held with other; it is read again by toy-model" in result.err
    assert "first answer" in prompt_text(result)


def test_a_saved_chat_cannot_send_control_codes_to_a_terminal(repl, tmp_path: Path):
    path = tmp_path / "chat.json"
    repl("hello", f"/save {path}")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": "\x1b[2Jother"}))
    assert "note: that chat was held with ␛[2Jother;" in repl(f"/load {path}").err
    path.write_text(json.dumps({**content, "schema": "\x1b[2J"}))
    assert "is a session of schema '\\x1b[2J', and" in repl(f"/load {path}").err
