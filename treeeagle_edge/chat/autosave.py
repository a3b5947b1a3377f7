"""Saves a conversation after every turn, also where two processes go on with the same one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from treeeagle_edge.chat.history import (
    SavedSession,
    forget_old_one_shots,
    is_one_shot,
    new_session_path,
    save_session,
)
from treeeagle_edge.errors import reason_of

FileState = tuple[int, int, int]


def file_state(path: Path) -> FileState | None:
    """What is another once somebody saved to `path`: inode, time in ns, bytes. None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Autosave:
    """Saves one conversation after each turn. A disk that is full or read-only is reported once; the chat goes on.

    A file that somebody else wrote to meanwhile is never replaced: from then on the conversation has another one.
    Of one-shot answers (`new_session_path`) only the newest are kept, until somebody goes on with one.
    """

    def __init__(
        self, path: Path | None, *, before: Path | None = None, state: FileState | None = None
    ) -> None:
        """`path` None saves nothing. `before`: where the conversation was saved so far. `state` of that file, taken
        before it was read; None for a conversation that has no file yet.
        """
        self.path = path
        self._before = before if before != path else None
        self._state = (
            state if self._before is None else None
        )  # one that moves expects no file at its new place
        self._failed = False

    def save(self, session: SavedSession) -> str | None:
        """Write the file. Returns what the person should know: that it failed, the first time, or that it has another
        name now; else None.
        """
        if self.path is None or not (
            session.turns or self._state or self._before
        ):  # nothing said, no file yet
            return None
        path = self.path
        try:
            with _alone_in(path.parent):  # or somebody could write between the look and the replacement
                if file_state(path) not in (None, self._state):
                    path = path.with_name(new_session_path().name)
                save_session(path, session)
                self._state = file_state(path)
        except OSError as problem:
            first, self._failed = not self._failed, True
            return f"this chat is not saved: {reason_of(problem)} ({path.parent})" if first else None
        self._failed = False
        if path != self.path:
            self.path, self._before = path, None
            return f"somebody else went on with this conversation too; from here on yours is saved in {path}"
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._before.unlink(missing_ok=True)
            self._before = None
        if is_one_shot(path):
            forget_old_one_shots()
        return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While this lasts, no other process saves in `folder`, which is made where it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
