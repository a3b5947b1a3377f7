"""JSON objects in files: read with errors that name the file, written for a person to read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import InputError, reason_of


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for brackets without end and for half a surrogate pair, which
    no tokenizer and no file takes.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def json_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a JSONL text that are not blank, with their numbers from 1.

    Not those of str.splitlines(), which also splits at U+2028 and others that JSON strings may hold.
    """
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def json_reason(error: ValueError) -> str:
    """What `parse_json` found wrong with one line of JSON, as the end of a sentence."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} at column {error.colno}"
    return "it holds half a surrogate pair" if isinstance(error, UnicodeError) else str(error)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises InputError where the file is unreadable, not JSON, or not an object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {reason_of(error)}",
            "check the path and its permissions, or download the file again",
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path} is not valid JSON", "download the file again; it may be truncated"
        ) from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object", "download the file again")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path`, whose folder is made where it is missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
