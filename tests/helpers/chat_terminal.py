"""The scripted chat of `chat_program.py` as a process on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from treeeagle_edge.cli.line_input import PROMPT

PROGRAM = [sys.executable, str(Path(__file__).with_name("chat_program.py"))]
READY = "\x1b[?2004h"  # the line editor asks for bracketed paste: from here on, keys are its own
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
PATIENCE_S = (
    60.0  # after which a test fails instead of waiting for ever; other programs may take most of the machine
)


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "LINES": "40", **changes}


class Terminal:
    """A process on a pseudo-terminal."""

    def __init__(self, *arguments: str, shell: str | None = None, **variables: str) -> None:
        """`shell` runs the program as `"$@"` in a bash with job control."""
        under = ["bash", "-mc", shell, "bash"] if shell else []
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.ready = re.escape(PROMPT) if variables["TERM"] in ("", "dumb") else "«ready»"
        self.process = subprocess.Popen(
            [*under, *PROGRAM, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**variables),
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.output = ""
        self.seen = 0

    def expect(self, pattern: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until `pattern` comes after what was matched before; EOFError where the program ended instead."""
        deadline = time.monotonic() + patience_s
        while True:
            clean = ESCAPE.sub("", self.output.replace(READY, "«ready»"))
            found = re.compile(pattern).search(clean, self.seen)
            if found:
                self.seen = found.end()
                return found.group()
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            missing = f"{pattern!r} did not come; so far: {clean[self.seen :]!r}"
            assert ready, missing
            chunk = b""
            with suppress(OSError):  # the other end is closed
                chunk = os.read(self.master, 65536)
            if not chunk:
                raise EOFError(missing)
            self._answer_queries(chunk)
            self.output += chunk.decode(errors="replace")

    def prompt(self) -> None:
        """Wait until the program reads what is typed."""
        self.expect(self.ready)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until this holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def leave(self) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            os.close(self.master)

    def press_until_it_leaves(self, key: str) -> int:
        """Two presses within a second end the program; a busy machine may take longer over one, so more may follow.

        The next waits for the prompt to be there again: one more, while the program ends, would break that off.
        """
        deadline = time.monotonic() + PATIENCE_S
        with suppress(EOFError):
            while time.monotonic() < deadline:
                time.sleep(
                    0.1
                )  # `input` shows its prompt just before it reads, and a press between is not noticed
                self.send(key)
                with suppress(AssertionError):
                    self.expect(self.ready, patience_s=5)
        return self.leave()

    def _answer_queries(self, chunk: bytes) -> None:
        if b"\x1b[6n" in chunk:  # where is the cursor?
            os.write(self.master, b"\x1b[30;1R")


def _take_terminal() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # ignored where the tests run in the background of a shell
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
