"""Text that a person hands over as a file or through a pipe, read with a bound: a slip of the keyboard may name a model
of many gigabytes, or a device that never ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from treeeagle_edge.errors import InputError

MOST_TEXT = 16 << 20  # bytes; a context of a million tokens takes about a quarter of it


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The UTF-8 text in `path`, without a byte order mark.

    Raises InputError where it has more than `most` bytes, OSError where it cannot be read, UnicodeDecodeError where it
    is no UTF-8.
    """
    with path.open("rb") as file:
        return read_stream(file, str(path), most)


def read_stream(stream: BinaryIO, name: str, most: int = MOST_TEXT) -> str:
    """The same for all that is left of `stream`; an error calls it `name`."""
    raw = stream.read(most + 1)
    if len(raw) > most:
        raise InputError(f"{name} has more than {most >> 20} MB of text", "give a part of it")
    return raw.decode("utf-8-sig")
