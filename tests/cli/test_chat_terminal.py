"""The chat on a real (pseudo) terminal, its keys, paste and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import termios
import time
from contextlib import suppress

import pytest
from chat_terminal import PATIENCE_S, Terminal
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from treeeagle_edge.chat.history import last_session_path, load_session, state_dir
from treeeagle_edge.cli.line_input import EditorInput, PlainInput, choose_input


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_chat_on_a_terminal(term):
    """A chat, on a terminal with a cursor and on one without. Expectations row 44: TERM=dumb gets no escape codes."""
    terminal = Terminal("chat", TERM=term, ANSWERS='["first answer", "second answer"]')
    terminal.expect("/help for commands, Ctrl-D to leave")
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect("first answer")
    terminal.expect(r"(?s)tokens/round .* memory [\d.]+ GB")
    terminal.prompt()
    terminal.send("/nonsense\r")
    terminal.expect("error: there is no command /nonsense")
    terminal.prompt()
    terminal.send("and?\r")
    terminal.expect("second answer")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert ("\x1b" in terminal.output) == (term == "xterm")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_ctrl_c_stops_the_reply_only(term):
    """Expectations rows 35 and 42: while answering, Ctrl-C stops at the round, keeps what was shown and the chat;
    at the prompt it clears the line and hints; twice within a second it leaves with 130.
    """
    terminal = Terminal("chat", TERM=term, ANSWERS=f'["{"word " * 200}", "short answer"]', PAUSE="0.02")
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect("word word word")
    terminal.send("\x03")
    terminal.expect("interrupted")
    terminal.prompt()
    time.sleep(1.1)  # so that the next Ctrl-C is not the second within a second
    terminal.send("half a line\x03")
    terminal.expect("Ctrl-D or /exit leaves")
    terminal.prompt()
    terminal.send("again\r")
    terminal.expect("short answer")
    terminal.prompt()
    time.sleep(1.1)
    terminal.send("\x03")
    terminal.prompt()  # one alone does not leave
    assert terminal.press_until_it_leaves("\x03") == 130
    turns = load_session(last_session_path()).turns
    assert [turn.user for turn in turns] == ["hello", "again"]
    assert turns[0].finish_reason == "interrupt"
    assert (turns[0].answer or "").startswith("word word word")


def test_ctrl_c_stops_the_reading_of_a_prompt(tmp_path):
    """Which has no rounds, and takes minutes where a text is long and a model large. The chat goes on."""
    reading = tmp_path / "reading"
    terminal = Terminal("chat", TERM="xterm", ANSWERS='["an answer"]', READING="300", ASLEEP=str(reading))
    terminal.prompt()
    terminal.send("a long text\r")
    terminal.expect("long text")
    terminal.until(reading.exists)
    terminal.send("\x03")
    terminal.expect("stopped before the answer began")
    terminal.prompt()
    terminal.send("again\r")
    terminal.expect("an answer")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert [turn.user for turn in load_session(last_session_path()).turns] == ["again"]


def test_a_long_prompt_is_seen_to_be_read():
    """One line, after a second, which is gone when the answer begins; also while a pass over a part takes long."""
    terminal = Terminal("chat", TERM="xterm", ANSWERS='["an answer", "another"]', READING="1.6")
    terminal.prompt()
    terminal.send("a long text\r")
    terminal.expect("reading 3,200 tokens, 40 %")
    terminal.expect("an answer")
    terminal.prompt()
    terminal.send("a short one\r")
    terminal.expect("another")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert terminal.output.count("reading ") == 1
    assert "\r\x1b[Kreading 3,200 tokens, 40 %\r\x1b[Kan answer" in terminal.output


@pytest.mark.parametrize(("arguments", "term"), [([], "dumb"), (["--json", "-p", "x"], "xterm")])
def test_where_a_line_could_not_be_removed_none_is_shown(arguments, term):
    terminal = Terminal("chat", *arguments, TERM=term, ANSWERS='["an answer"]', READING="1.3")
    if not arguments:
        terminal.prompt()
        terminal.send("a long text\r")
    terminal.expect("an answer")
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert "reading" not in terminal.output


def test_a_message_typed_during_an_answer_is_sent_after_it():
    """Enter typed ahead stays Enter, and nothing that is typed shows up inside the answer."""
    terminal = Terminal("chat", TERM="xterm", ANSWERS=f'["{"word " * 60}end", "second answer"]', PAUSE="0.02")
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect("word word")
    terminal.send("typed ahead\r")
    assert "typed" not in terminal.expect("(?s)word.*end")
    terminal.expect("second answer")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert [turn.user for turn in load_session(last_session_path()).turns] == ["hello", "typed ahead"]


def test_ctrl_z_gives_the_shell_its_terminal_and_fg_goes_on():
    """At the prompt and while answering; what is typed afterwards is still kept for the next entry, unseen."""
    paused = 'stty -a | grep -o " icrnl"; echo stopped; fg >/dev/null'
    terminal = Terminal(
        "chat", shell=f'"$@"; {paused}; {paused}; exit $?', TERM="xterm",
        ANSWERS=f'["first answer", "{"word " * 100}end", "third answer"]', PAUSE="0.02",
    )  # fmt: skip
    terminal.prompt()
    terminal.send("hel\x1a")
    terminal.expect(r"icrnl\s+stopped")
    terminal.prompt()
    terminal.send("lo\r")
    terminal.expect("first answer")
    terminal.prompt()
    terminal.send("go on\r")
    terminal.expect("word word")
    terminal.send("\x1a")
    terminal.expect(r"icrnl\s+stopped")
    terminal.expect("word word")
    terminal.send("typed ahead\r")
    assert "typed" not in terminal.expect("(?s)word.*end")
    terminal.expect("third answer")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    turns = load_session(last_session_path()).turns
    assert [turn.user for turn in turns] == ["hello", "go on", "typed ahead"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_is_told_to_end_restores_the_terminal(number):
    """At the prompt and while answering; whoever sent the signal sees that it worked."""
    for moment in ("prompt", "answer"):
        terminal = Terminal("chat", TERM="xterm", ANSWERS=f'["{"word " * 300}"]', PAUSE="0.1")
        terminal.prompt()
        assert termios.tcgetattr(terminal.master) != terminal.before
        if moment == "answer":
            terminal.send("hello\r")
            terminal.expect("word")
        os.kill(terminal.process.pid, number)
        assert terminal.process.wait(PATIENCE_S) == -number
        assert termios.tcgetattr(terminal.master) == terminal.before
        terminal.leave()


def test_ctrl_c_twice_while_answering(tmp_path):
    """Expectations row 35: twice within a second leaves with 130."""
    # a pause that both fit in: at the prompt, nobody here would answer the line editor's question for the cursor
    pause = tmp_path / "pause"
    terminal = Terminal(
        "chat", TERM="xterm", ANSWERS=f'["{"word " * 300}"]', PAUSE="0 300", ASLEEP=str(pause)
    )
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect("wor")
    terminal.until(pause.exists)  # before the pause begins, the first would end the answer at once
    for _ in range(4):  # a busy machine may take more than a second over two
        terminal.process.send_signal(signal.SIGINT)
        time.sleep(0.3)  # on a busy machine two at once would be seen as one
        terminal.process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            terminal.process.wait(5)
    assert terminal.leave() == 130


def test_a_model_cannot_send_control_codes_to_a_terminal():
    """Escape codes, those of one byte too, bells, and what goes back over a line."""
    terminal = Terminal(
        "chat",
        TERM="dumb",
        ANSWERS='["red \\u001b[31m \\u009b31m \\u0007ring over\\rwritten\\b\\r\\n\\tnext"]',
    )
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect(r"red ␛\[31m \ufffd31m ␇ring overwritten␈\n\tnext")
    terminal.send("/exit\r")
    assert terminal.leave() == 0


def test_nor_does_the_prompt_that_is_shown():
    terminal = Terminal("chat", "--show-prompt", TERM="dumb", ANSWERS='["red \\u001b[31m", "well"]')
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect(r"red ␛\[31m")
    terminal.prompt()
    terminal.send("and?\r")
    terminal.expect(r"red ␛\[31m<\|im_end\|>")
    terminal.prompt()
    terminal.send("/exit\r")
    assert terminal.leave() == 0


PROSE = "air scatters short wavelengths of sunlight more than long ones, in all directions. " * 3


def answer_on_a_terminal(*arguments: str, **variables: str) -> list[str]:
    """The rows between what was asked and the stats, on a terminal of 100 columns."""
    terminal = Terminal("chat", *arguments, ANSWERS=json.dumps([PROSE + "end"]), **variables)
    terminal.expect("leave")
    terminal.prompt()
    terminal.send("hello\r")
    terminal.expect("end")
    terminal.prompt()
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert load_session(last_session_path()).turns[-1].answer == PROSE + "end"
    begin = terminal.output.index("air scatters")
    answer = terminal.output[begin : terminal.output.index("end", begin) + 3].replace("\r\n", "\n")
    return [row.rpartition("\r")[2].rstrip() for row in answer.split("\n")]


def test_lines_are_broken_between_words():
    rows = answer_on_a_terminal(TERM="xterm")
    assert len(rows) == 3
    assert all(60 < len(row) < 100 for row in rows[:-1])
    assert " ".join(rows) == PROSE + "end"


@pytest.mark.parametrize(("arguments", "term"), [(["--no-wrap"], "xterm"), ([], "dumb"), ([], "")])
def test_lines_are_left_to_the_terminal_where_that_is_wanted_and_where_it_has_no_cursor(arguments, term):
    assert answer_on_a_terminal(*arguments, TERM=term) == [PROSE + "end"]


def test_no_color_keeps_the_stats_line_plain():
    """Expectations row 44: NO_COLOR leaves no colour or weight in what we print."""
    for variables, styled in (({"NO_COLOR": "1"}, False), ({}, True)):
        terminal = Terminal(
            "chat", "--markdown", "-p", "x", TERM="xterm", ANSWERS='["# Sky\\n\\n**blue**"]', **variables
        )
        terminal.expect("blue" if styled else r"\*\*blue\*\*")
        terminal.expect("tok/s")
        assert terminal.leave() == 0
        assert bool(re.search(r"\x1b\[[\d;]+m", terminal.output)) == styled


# --- the line editor ---


def typed(keys: str, *, remember: bool = False, reads: int = 1) -> list[str]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        editor = EditorInput(remember=remember)
        return [editor.read("> ") for _ in range(reads)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt-Enter
        ("one\x0atwo\r", "one\ntwo"),  # Ctrl-J
        ("\x1b[200~def f():\r\n    return 1\n\x1b[201~\r", "def f():\n    return 1\n"),  # bracketed paste
    ],
)
def test_keys(keys, message):
    assert typed(keys) == [message]


def test_ctrl_d_and_ctrl_c():
    with pytest.raises(EOFError):
        typed("\x04")
    with pytest.raises(KeyboardInterrupt):
        typed("half a line\x03")


def typed_after(keys: str, expected: str, more: str) -> str:
    """Type `keys`, wait until they made the line `expected`, type `more`."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        source = EditorInput(remember=False)
        buffer = source._session.default_buffer
        waiting = [more]

        def go_on(_buffer: object) -> None:
            if buffer.text == expected and waiting:
                pipe.send_text(waiting.pop())

        buffer.on_text_changed += go_on
        pipe.send_text(keys)
        return source.read("> ")


def test_tab_completes_commands_settings_and_paths(tmp_path):
    assert typed_after("/sys\t", "/system", " Be brief.\r") == "/system Be brief."
    assert typed_after("/set temp\t", "/set temperature", " 1\r") == "/set temperature 1"
    (tmp_path / "notes.txt").write_text("")
    assert (
        typed_after(f"/read {tmp_path}/no\t", f"/read {tmp_path}/notes.txt", "\r")
        == f"/read {tmp_path}/notes.txt"
    )


def test_ctrl_g_opens_the_editor(monkeypatch, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "written\\nelsewhere" > "$1"\n')
    editor.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))
    assert typed_after("draft\x07", "written\nelsewhere", "\r") == "written\nelsewhere"


def test_lines_are_remembered_privately():
    typed("first line\r", remember=True)
    assert typed("\x1b[A\r", remember=True) == ["first line"]
    path = state_dir() / "lines"
    assert path.stat().st_mode & 0o777 == 0o600
    typed("secret\r", remember=False)
    assert "secret" not in path.read_text()


def test_lines_that_cannot_be_kept_are_no_reason_to_stop(monkeypatch, tmp_path):
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocker))
    assert typed("hello\r", remember=True) == ["hello"]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_input(remember=False), PlainInput)


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_after_ctrl_c_and_ctrl_d_a_plain_line_is_ended(key, monkeypatch, capsys):
    """What is said next, or the shell's prompt, begins a line of its own."""

    def pressed(prompt: str) -> str:
        print(prompt, end="")
        raise key

    monkeypatch.setattr("builtins.input", pressed)
    with pytest.raises(key):
        PlainInput().read("> ")
    assert capsys.readouterr().out == "> \n"
