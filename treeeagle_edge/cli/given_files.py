"""Files that a person names, in a chat or with an option: their paths as they are typed, and their text."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from treeeagle_edge.chat.session import check_utf8
from treeeagle_edge.errors import InputError, UsageError, reason_of
from treeeagle_edge.paths import typed_path
from treeeagle_edge.text_file import read_text


def system_prompt(given: str | None) -> str | None:
    """The text of `--system`, read from a file where it is @FILE. Raises InputError for a file that cannot be read."""
    if given is None or not given.startswith("@"):
        check_utf8(given or "", "system prompt")
        return given or None
    return read_given(typed_path(given[1:])).strip() or None


def read_given(path: Path) -> str:
    """A UTF-8 text file. Raises InputError that says what is wrong with it."""
    try:
        return read_text(path)
    except UnicodeDecodeError as problem:
        raise InputError(f"{path} is not UTF-8 text", "give a text file") from problem
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read: {reason_of(problem)}", "check the path") from problem


def first_word(argument: str) -> tuple[str, str]:
    """A path and the text after it. One with spaces is quoted, or is there: so completion writes it."""
    if argument[:1] in ("'", '"'):
        end = argument.find(argument[0], 1)
        if end > 0:
            return argument[: end + 1], argument[end + 1 :].strip()
    ends = [index for index, char in enumerate(argument) if char.isspace()] + [len(argument)]
    end = next((end for end in ends if os.path.isfile(typed_path(argument[:end]))), ends[0])
    return argument[:end], argument[end:].strip()


def path_in(argument: str, usage: str) -> Path:
    """The path that is the whole `argument`, which may be quoted. Raises UsageError, which names the `usage`."""
    try:
        words = shlex.split(argument) if argument[:1] in ("'", '"') else [argument]
    except ValueError as problem:
        raise UsageError("the quotes around the file name do not match", f"use {usage}") from problem
    if not words or not words[0]:
        raise UsageError("a file name is missing", f"use {usage}")
    return typed_path(words[0])
