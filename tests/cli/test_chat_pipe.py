"""The program as others call it: pipes, closed streams, full disks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chat_terminal import PROGRAM, environment

from treeeagle_edge.chat.history import last_session_path, load_session


def test_a_reader_that_has_enough_ends_it_quietly():
    """`| head -1` closes stdout early: no traceback, no complaint."""
    code = f"{sys.executable} {PROGRAM[1]} chat -p x | head -1"
    lines = "\\n".join(["line"] * 5000)
    run = subprocess.run(
        code, shell=True, capture_output=True, text=True, env=environment(ANSWERS=f'["{lines}"]'), check=False
    )
    assert (run.returncode, run.stdout) == (0, "line\n")
    assert "Traceback" not in run.stderr
    assert "Exception" not in run.stderr
    assert "Broken" not in run.stderr


def test_the_program_in_a_pipe():
    """Expectations row 44: whatever TERM says, nothing but the answer goes into a pipe."""
    run = subprocess.run(
        [*PROGRAM, "chat"],
        input=b"why?\n",
        capture_output=True,
        env=environment(TERM="xterm-256color"),
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, b"The sky is blue.\n")
    assert b"\x1b" not in run.stderr


def test_a_long_prompt_is_read_silently_in_a_pipe():
    run = subprocess.run(
        [*PROGRAM, "chat", "-p", "x"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=environment(TERM="xterm", READING="1.2"), check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, "The sky is blue.\n")
    assert "reading" not in run.stderr


def test_a_pipe_that_stays_open_is_no_silent_wait():
    """Where a program that starts this forgot to close stdin, the text would seem to hang."""
    with subprocess.Popen(
        [*PROGRAM, "chat", "-p", "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(), text=True,
    ) as process:  # fmt: skip
        first = process.stderr.readline()
        out, _ = process.communicate("more")
    assert first == "note: waiting for the text that is piped in; </dev/null gives none\n"
    assert (process.returncode, out) == (0, "The sky is blue.\n")


def test_ctrl_c_while_loading_is_quiet():
    code = (
        "import sys, types, signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # may be ignored where tests run in the background
        "fake = types.ModuleType('treeeagle_edge.runtime')\n"
        "fake.load_runtime = lambda *a, **k: signal.raise_signal(signal.SIGINT)\n"
        "sys.modules['treeeagle_edge.runtime'] = fake\n"
        "from treeeagle_edge.cli.app import main\n"
        "sys.exit(main(['chat', '-p', 'x']))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert run.returncode == 130
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("closed", "out"), [("2>&-", "The sky is blue.\n"), (">&-", "")])
def test_a_stream_closed_by_the_caller(closed, out):
    """Neither a traceback nor talk on stdout."""
    run = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, "chat", "-p", "x"], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (0, out)
    assert "Traceback" not in run.stderr
    assert len(load_session(last_session_path()).turns) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout():
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*PROGRAM, "chat", "-p", "x"], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE,
            text=True, env=environment(), check=False,
        )  # fmt: skip
    assert run.returncode == 1
    assert "error: the system says: no space left on device\n hint: " in run.stderr
    assert "Traceback" not in run.stderr
    assert "Exception" not in run.stderr
    assert len(load_session(last_session_path()).turns) == 1  # what was answered so far is kept
