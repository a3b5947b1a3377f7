"""Conversations on disk: one JSON file each, written after every turn, readable by their owner only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from treeeagle_edge.chat.prompt import Turn
from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.json_file import parse_json
from treeeagle_edge.text_file import read_text

SCHEMA = 1
MOST_BYTES = 256 << 20  # of a file of ours
_Kind = TypeVar("_Kind")
_KINDS: Mapping[type, str] = {str: "text", list: "list", dict: "object"}
KEPT_ONE_SHOTS = 50  # a script may ask thousands of times
_ONE_SHOT = re.compile(r"(\d{8}-\d{6}-[0-9a-f]{6})\.once\.json")  # as we name them, and nobody else would
SESSION_HINT = "the file is left as it is; start without it, or load another one"


@dataclass(frozen=True)
class SavedSession:
    """What a file holds."""

    model: str
    turns: tuple[Turn, ...]
    system: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def turns_for(self, model: str) -> list[Turn]:
        """The turns, without ids where another model is loaded: ids mean nothing to another tokenizer."""
        if model == self.model:
            return list(self.turns)
        return [Turn(turn.user, turn.answer, (), turn.finish_reason) for turn in self.turns]


def state_dir() -> Path:
    """`treeeagle` in $XDG_STATE_HOME, else in ~/.local/state (XDG base directory specification)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "treeeagle"


def sessions_dir() -> Path:
    """The folder in which conversations are saved automatically."""
    return state_dir() / "sessions"


def new_session_path(*, one_shot: bool = False) -> Path:
    """A name that sorts by time and is not taken. Nothing is written. `one_shot`: of an answer that is only kept for a
    while, see `Autosave`.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return sessions_dir() / f"{stamp}-{secrets.token_hex(3)}{'.once' if one_shot else ''}.json"


def path_to_go_on(path: Path) -> Path:
    """Where the conversation in `path` is saved once somebody goes on with it, which makes a one-shot answer a chat."""
    found = _ONE_SHOT.fullmatch(path.name)
    return path.with_name(f"{found[1]}.json") if found else path


def path_now(path: Path) -> Path:
    """Where the conversation in `path` is now: another process may have gone on with a one-shot answer meanwhile."""
    moved = path_to_go_on(path)
    return moved if not path.exists() and moved.exists() else path


def is_one_shot(path: Path) -> bool:
    """Whether the name is one that `new_session_path` gives to an answer that is only kept for a while."""
    return bool(_ONE_SHOT.fullmatch(path.name))


def forget_old_one_shots() -> None:
    """Keep the newest of them. No other file is touched, whatever its name and place."""
    with contextlib.suppress(OSError):
        found = [path for path in sessions_dir().iterdir() if is_one_shot(path)]
        for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)[:-KEPT_ONE_SHOTS]:
            path.unlink(missing_ok=True)  # another process may be at it too


def last_session_path() -> Path:
    """The conversation that was written last. Raises InputError where there is none."""
    files: list[tuple[int, Path]] = []
    try:
        for path in sessions_dir().glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # another process has just moved or removed it
                files.append((path.stat().st_mtime_ns, path))
    except OSError as problem:
        raise InputError(f"the folder of saved sessions cannot be read: {reason_of(problem)}") from problem
    if not files:
        raise InputError("there is no earlier session to continue", "start one with: treeeagle chat")
    return max(files)[1]


def save_session(path: Path, session: SavedSession) -> None:
    """Write `session` to `path`, replacing it at once or not at all, with mode 0600. Raises OSError."""
    content = json.dumps(_as_json(session), ensure_ascii=False, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created with mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load_session(path: Path) -> SavedSession:
    """Read a file that `save_session` wrote. Raises InputError for one that is missing, damaged or of another kind."""
    try:
        content = parse_json(read_text(path, MOST_BYTES))
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {reason_of(problem)}", "check the path") from problem
    except ValueError as problem:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not a saved session: it is not valid JSON", SESSION_HINT) from problem
    if not isinstance(content, dict) or "schema" not in content:
        raise InputError(f"{path} is not a saved session: it names no schema", SESSION_HINT)
    if content["schema"] != SCHEMA:
        raise InputError(
            f"{path} is a session of schema {content['schema']!r}, and this version reads {SCHEMA}",
            SESSION_HINT,
        )
    try:
        return _from_json(content)
    except ValueError as problem:
        raise InputError(f"{path} is a damaged session: {problem}", SESSION_HINT) from problem


def _as_json(session: SavedSession) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for turn in session.turns:
        messages.append({"role": "user", "content": turn.user})
        if turn.answer is not None:
            messages.append(
                {
                    "role": "assistant",
                    "content": turn.answer,
                    "token_ids": list(turn.token_ids),
                    "finish_reason": turn.finish_reason,
                }
            )
    return {
        "schema": SCHEMA,
        "saved": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": session.model,
        "system": session.system,
        "settings": dict(session.settings),
        "messages": messages,
    }


def _from_json(content: Mapping[str, Any]) -> SavedSession:
    turns: list[Turn] = []
    for number, message in enumerate(_of_kind(list, content.get("messages"), "messages")):
        message = _of_kind(dict, message, f"message {number}")
        role, text = message.get("role"), _of_kind(str, message.get("content"), f"message {number}")
        waiting = bool(turns) and turns[-1].answer is None
        if role == "user" and not waiting:
            turns.append(Turn(text))
        elif role == "assistant" and waiting:
            turns[-1] = Turn(turns[-1].user, text, _ids_of(message, number), message.get("finish_reason"))
        else:
            raise ValueError(f"message {number} of role {role!r} is out of turn")
    if turns and turns[-1].answer is None:
        raise ValueError("the last message has no answer")
    system = content.get("system")
    return SavedSession(
        model=_of_kind(str, content.get("model"), "model"),
        turns=tuple(turns),
        system=None if system is None else _of_kind(str, system, "system"),
        settings=_of_kind(dict, content.get("settings", {}), "settings"),
    )


def _ids_of(message: Mapping[str, Any], number: int) -> tuple[int, ...]:
    ids = _of_kind(list, message.get("token_ids", []), f"token_ids of message {number}")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ValueError(f"token_ids of message {number} holds what is no token id")
    return tuple(ids)


def _of_kind(kind: type[_Kind], value: Any, name: str) -> _Kind:
    """`value` where it is of that kind. Raises ValueError, which names the kind as a person would."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {'missing' if value is None else f'no {_KINDS[kind]}'}")
    return value
