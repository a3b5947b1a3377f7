"""The one place that talks to the person: notes, errors and progress on stderr, and who may use escape codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from treeeagle_edge.errors import TreeEagleError

EXIT_OK = 0
EXIT_INTERRUPT = 130
NARROWEST = 20  # columns: in fewer, lines would hold a word or two
_NO_BREAK = "\xa0"
_FIRST_COLUMN = re.compile(r"\s*\S.*?\s{2,}")
STYLES = {"dim": "2", "bold": "1", "red": "31", "yellow": "33", "green": "32"}


def is_terminal(stream: TextIO | None) -> bool:
    """True where a person reads or types; False for pipes, files and closed streams."""
    return stream is not None and not stream.closed and stream.isatty()


def has_cursor(stream: TextIO | None) -> bool:
    """True for a terminal that is not dumb: a line on it can be written again."""
    return is_terminal(stream) and os.environ.get("TERM", "") not in ("", "dumb")


def may_style(stream: TextIO | None) -> bool:
    """True where escape codes are welcome: a terminal that is not dumb, and NO_COLOR (no-color.org) not set."""
    return has_cursor(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """`text` in one of STYLES where `stream` may carry escape codes, else `text` itself."""
    return f"\033[{STYLES[style]}m{text}\033[0m" if may_style(stream) else text


def say(text: str = "", *, style: str | None = None, wrap: bool = False) -> None:
    """One line of talk on stderr, or several. `wrap`: on a terminal, break between words what is longer than a row; not
    for what somebody may copy, such as a command.
    """
    if wrap and is_terminal(sys.stderr):
        columns = columns_of(sys.stderr)
        text = "\n".join(_in_rows(line, columns) for line in text.split("\n"))
    _talk((styled(text, style, sys.stderr) if style else text) + "\n")


def _in_rows(line: str, columns: int) -> str:
    """`line` broken between words, or between the parts that a dot divides; below its indentation, or below the second
    column where it is a row of a table.
    """
    if columns < NARROWEST or len(line) <= columns:
        return line
    found = _FIRST_COLUMN.match(line)
    hang = found.end() if found and 2 * found.end() <= columns else len(line) - len(line.lstrip())
    parted = line.replace(" ", _NO_BREAK).replace(f"·{_NO_BREAK}", "· ") if " · " in line else line
    rows = textwrap.wrap(
        parted, columns, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )
    if max(map(len, rows)) > columns:  # a path, which somebody may copy
        return line
    return "\n".join(rows).replace(_NO_BREAK, " ")


def _talk(text: str) -> None:
    """Write to stderr. One whose reader went away, or whose disk is full, is no reason to stop answering."""
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)


def note(text: str) -> None:
    """A sentence the person should read, on stderr. A command in it is left whole, so that it can be copied."""
    say(f"note: {text}", style="yellow", wrap="treeeagle " not in text)


def print_error(error: TreeEagleError) -> None:
    """`error: …` and, where there is one, ` hint: …`, on stderr."""
    say(styled("error:", "red", sys.stderr) + f" {error.message}")
    if error.hint:
        say(f" hint: {error.hint}")


@contextlib.contextmanager
def progress_line() -> Iterator[ProgressLine]:
    """A line on stderr that is rewritten while something loads, and gone afterwards."""
    line = ProgressLine()
    try:
        yield line
    finally:
        line.clear()


class ProgressLine:
    """Shows the latest message: in place on a terminal, one line for each new message elsewhere.

    in_place: each message replaces the one before, so that there may be many.
    """

    def __init__(self) -> None:
        self.in_place = may_style(sys.stderr)
        self._shown = ""

    def __call__(self, message: str) -> None:
        """Replace the message; the same message twice is shown once."""
        if message == self._shown:
            return
        self._shown = message
        if self.in_place:
            _talk(f"\r\033[K{_one_row(message)}")
        else:
            say(message)

    def clear(self) -> None:
        """Remove the line from a terminal; what went into a file or pipe stays."""
        if self.in_place and self._shown:
            _talk("\r\033[K")
        self._shown = ""


def _one_row(message: str) -> str:
    """`message`, cut where it would go on in a second row, which nothing would clear."""
    columns = columns_of(sys.stderr) or 80
    return message if len(message) < columns else message[: max(columns - 2, 0)] + "…"


def columns_of(stream: TextIO) -> int:
    """How wide the terminal behind `stream` is now; 0 where that is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns  # some terminals do not know, and say 0
    except (OSError, ValueError):
        return 0


def give_missing_streams() -> None:
    """Where a stream was closed before the program began (`2>&-`), what is written to it goes nowhere: without one,
    Python's `print` would turn to stdout with it.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the end


def abandon_stdout() -> None:
    """After a reader such as `head` closed the pipe: send the rest nowhere, so that the exit is quiet."""
    _abandon(sys.stdout)


def _abandon(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
