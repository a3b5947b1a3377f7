"""What is said on stderr, wherever that leads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeeagle_edge.chat.history import last_session_path, load_session
from treeeagle_edge.cli import console
from treeeagle_edge.cli.console import ProgressLine, note, say

PROGRAM = [sys.executable, str(Path(__file__).resolve().parent.parent / "helpers" / "chat_program.py")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stderr_costs_the_talk_and_not_the_answer():
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*PROGRAM, "chat", "-p", "x"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full,
            text=True, check=False,
        )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "The sky is blue.\n")
    assert len(load_session(last_session_path()).turns) == 1


def test_progress_never_takes_a_second_row(monkeypatch, capsys):
    """What went on in a second row would stay there: only the row of the cursor is cleared."""
    monkeypatch.setattr(console, "may_style", lambda stream: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 40)))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    line = ProgressLine()
    line("fetching weights: 1.2 of 4.9 GB")
    line("19 columns are fine")
    assert capsys.readouterr().err == "\r\033[Kfetching weights: …\r\033[K19 columns are fine"


def test_progress_on_a_terminal_without_a_width(monkeypatch, capsys):
    monkeypatch.setattr(console, "may_style", lambda stream: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    ProgressLine()("x" * 79)
    assert capsys.readouterr().err == "\r\033[K" + "x" * 79


@pytest.mark.parametrize(("style", "before", "after"), [(None, "", ""), ("dim", "\033[2m", "\033[0m")])
def test_talk_is_broken_between_words_on_a_terminal(monkeypatch, capsys, style, before, after):
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "columns_of", lambda stream: 32)
    text = (
        "  20 tokens · 263 tok/s · 21 tokens/round\n"
        "  plan    1.14 of 22.80 GB, and room for more\n"
        "  saved in  /home/somebody/.local/state/treeeagle\n"
        "  a row of thirty-two letters so"
    )
    say(text, style=style, wrap=True)
    assert capsys.readouterr().err == (
        f"{before}  20 tokens · 263 tok/s ·\n  21 tokens/round\n"
        "  plan    1.14 of 22.80 GB, and\n          room for more\n"
        "  saved in  /home/somebody/.local/state/treeeagle\n"
        f"  a row of thirty-two letters so{after}\n"
    )
    say(text)
    monkeypatch.setattr(console, "columns_of", lambda stream: 0)
    say(text, wrap=True)
    monkeypatch.setattr(console, "is_terminal", lambda stream: False)
    say(text, wrap=True)
    assert capsys.readouterr().err == 3 * f"{text}\n"


def test_a_command_in_a_note_is_not_broken(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    monkeypatch.setattr(console, "columns_of", lambda stream: 30)
    monkeypatch.setenv("NO_COLOR", "1")
    note("the context is full: the first message is no longer sent")
    note("it can be sent as a file: treeeagle chat < a.txt")
    assert capsys.readouterr().err == (
        "note: the context is full: the\nfirst message is no longer\nsent\n"
        "note: it can be sent as a file: treeeagle chat < a.txt\n"
    )
