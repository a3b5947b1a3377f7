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
from contextlib import suppress
from pathlib import Path

from treeeagle_edge.cli.line_input import PROMPT

PROGRAM = [sys.executable, str(Path(__file__).with_name("chat_program.py"))]
READY = "\x1b[?2004h"  # the line editor asks for bracketed paste: from here on, keys are its own
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07|\r")
PATIENCE_S = 20.0


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

    def expect(self, pattern: str) -> str:
        """Wait until `pattern` comes after what was matched before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            clean = ESCAPE.sub("", self.output.replace(READY, "«ready»"))
            found = re.compile(pattern).search(clean, self.seen)
            if found:
                self.seen = found.end()
                return found.group()
            ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
            chunk = b""
            if ready:
                try:
                    chunk = os.read(self.master, 65536)
                except OSError:  # the other end is closed
                    chunk = b""
            assert chunk, f"{pattern!r} did not come; so far: {clean[self.seen :]!r}"
            self._answer_queries(chunk)
            self.output += chunk.decode(errors="replace")

    def prompt(self) -> None:
        """Wait until the program reads what is typed."""
        self.expect(self.ready)

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
        """Two presses within a second end the program; a busy machine may take longer over one, so more may follow."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.send(key)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.3)
        return self.leave()

    def _answer_queries(self, chunk: bytes) -> None:
        if b"\x1b[6n" in chunk:  # where is the cursor?
            os.write(self.master, b"\x1b[30;1R")


def _take_terminal() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # ignored where the tests run in the background of a shell
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
