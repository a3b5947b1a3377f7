"""Errors that a person can act on: one sentence, a hint, and the exit code the command line ends with."""

from __future__ import annotations


class TreeEagleError(Exception):
    """Base of every error shown to a person as one sentence and a hint, never as a traceback."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        """`message` is one lower-case sentence without a full stop; `hint` says what to do next."""
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(TreeEagleError):
    """The person's input is at fault: a file, a configuration, a prompt that is too long. Exit code 1."""


class UsageError(TreeEagleError):
    """An option or argument is unknown or out of range. Exit code 2."""

    exit_code = 2


class CannotRunError(TreeEagleError):
    """This machine cannot run what was asked. Exit code 3."""

    exit_code = 3


def reason_of(error: Exception) -> str:
    """What the system or a library says of `error`, as the end of a lower-case sentence: its first line, or the kind of
    error where it says nothing.
    """
    said = str(getattr(error, "strerror", None) or error).strip()
    if not said:
        return type(error).__name__
    line = said.splitlines()[0].rstrip(".")
    return line if line[1:2].isupper() else line[0].lower() + line[1:]  # an abbreviation keeps its capitals
