"""How a message is typed: a line editor on a real terminal, plain lines on a dumb one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from treeeagle_edge.chat.history import state_dir
from treeeagle_edge.cli.keyboard import kept_keys
from treeeagle_edge.cli.set_command import NAMES
from treeeagle_edge.cli.slash import COMMANDS, by_name

if TYPE_CHECKING:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
MORE = ". "
QUOTES = '"""'


class LineInput(Protocol):
    """Reads what the person types next."""

    def read(self, prompt: str) -> str:
        """One entry. Raises EOFError for Ctrl-D on an empty line and KeyboardInterrupt for Ctrl-C."""

    def kept_keys(self) -> AbstractContextManager[None]:
        """For a whole chat: while this lasts, keys pressed between two reads are kept for the next one."""


class PlainInput:
    """`input()`: for terminals that cannot place a cursor."""

    def read(self, prompt: str) -> str:
        """One line."""
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()  # what comes next begins a line
            raise

    def kept_keys(self) -> AbstractContextManager[None]:
        """Nothing to do: the terminal keeps whole lines itself."""
        return contextlib.nullcontext()


class EditorInput:
    """A line editor: pasted text stays one entry, Alt-Enter and Ctrl-J add lines, Ctrl-G opens $EDITOR."""

    def __init__(self, *, remember: bool) -> None:
        """`remember` keeps the lines typed for the next chat."""
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            history=_line_history(remember),
            key_bindings=_key_bindings(),
            completer=_completer(),
            complete_while_typing=False,
            multiline=True,
            enable_suspend=True,
            prompt_continuation=lambda width, _number, _wrapped: " " * width,
        )

    def read(self, prompt: str) -> str:
        """One entry, which may have several lines."""
        return self._session.prompt(prompt)

    def kept_keys(self) -> AbstractContextManager[None]:
        """Keys as they were pressed, and none of them in an answer."""
        return kept_keys()


def read_message(source: LineInput) -> str:
    """The next message. What stands between two `\"\"\"` is one, however many entries it takes. Where more text
    follows, as in a Python file that was pasted, all of it is the message, as it is.
    """
    entry = source.read(PROMPT)
    if not entry.lstrip().startswith(QUOTES):
        return entry
    text = entry.lstrip()[len(QUOTES) :]
    while QUOTES not in text:
        text += "\n" + source.read(MORE)
    block, _, after = text.partition(QUOTES)
    return QUOTES + text if after.strip() else block.strip("\n")


def choose_input(*, remember: bool) -> LineInput:
    """The line editor, unless TERM says that the terminal is dumb."""
    if os.environ.get("TERM", "dumb") in ("dumb", ""):
        return PlainInput()
    return EditorInput(remember=remember)


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-g")
    def _edit(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys


def _line_history(remember: bool) -> History:
    """Lines of earlier chats, in a file of mode 0600; only in memory where that cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class LineHistory(FileHistory):
        """A disk that fills up later loses the line, not the chat."""

        def store_string(self, string: str) -> None:
            """Append one entry."""
            with contextlib.suppress(OSError):
                super().store_string(string)

    if not remember:
        return InMemoryHistory()
    path = state_dir() / "lines"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return LineHistory(path)


def _completer() -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class SlashCompleter(Completer):
        """Completes what `complete_slash` and the file system offer."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            """Names of commands and settings, and paths."""
            text = document.text_before_cursor
            name, space, argument = text[1:].partition(" ")
            command = by_name().get(name.lower()) if text.startswith("/") and space else None
            if command is not None and command.takes_path:
                yield from paths.get_completions(Document(argument, len(argument)), complete_event)
                return
            for word, typed, meaning in complete_slash(text):
                yield Completion(word, start_position=-len(typed), display_meta=meaning)

    return SlashCompleter()


def complete_slash(text: str) -> Iterator[tuple[str, str, str]]:
    """For what was typed: (completion, the part of the text it replaces, what it means)."""
    if not text.startswith("/") or "\n" in text:
        return
    name, space, argument = text[1:].partition(" ")
    if not space:
        for command in COMMANDS:
            for each in (command.name, *command.aliases):
                if each.startswith(name.lower()):
                    yield f"/{each}", text, command.help
    elif name.lower() == "set" and " " not in argument:
        for setting in NAMES:
            if setting.startswith(argument):
                yield setting, argument, ""
    elif name.lower() == "stats":
        for word in ("on", "off"):
            if word.startswith(argument):
                yield word, argument, ""
