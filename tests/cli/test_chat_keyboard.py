"""The terminal's mode during a chat: looked at, and keys pressed, in every gap where nobody reads."""

from __future__ import annotations

import array
import fcntl
import os
import pty
import signal
import sys
import termios
import time
import types
from collections.abc import Callable, Iterator

import pytest
from chat_fakes import ScriptEngine, fake_runtime, script
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_input
from prompt_toolkit.output import DummyOutput

from treeeagle_edge.chat.history import last_session_path, load_session
from treeeagle_edge.cli.app import main
from treeeagle_edge.cli.interrupt import LeaveNow
from treeeagle_edge.cli.keyboard import kept_keys
from treeeagle_edge.cli.line_input import EditorInput
from treeeagle_edge.errors import InputError

PATIENCE_S = 60  # after which a key counts as lost, and the test fails instead of waiting for ever


class Desk:
    """This process at a pseudo-terminal of its own, and the person's end of it."""

    def __init__(self) -> None:
        self.master: int | None
        self.master, slave = pty.openpty()
        self.stdin = os.fdopen(slave, "r", encoding="utf-8")
        self.stdout = os.fdopen(os.dup(slave), "w", encoding="utf-8")
        self.before = self.mode()

    def mode(self) -> list[object]:
        return termios.tcgetattr(self.stdin.fileno())

    def keeps_keys(self) -> bool:
        """Enter stays Enter, no key shows, and none waits for the end of a line."""
        now = self.mode()
        return not now[0] & termios.ICRNL and not now[3] & (termios.ECHO | termios.ICANON)

    def press(self, keys: str) -> None:
        """Returns once the terminal holds `keys` for whoever reads next."""
        os.write(self.master, keys.encode())
        waiting, deadline = array.array("i", [0]), time.monotonic() + PATIENCE_S
        while waiting[0] < len(keys):
            assert time.monotonic() < deadline
            fcntl.ioctl(self.stdin.fileno(), termios.FIONREAD, waiting)

    def leave(self) -> None:
        """Take the person's end away, as closing a window does."""
        if self.master is not None:
            os.close(self.master)
        self.master = None


@pytest.fixture
def desk(monkeypatch) -> Iterator[Desk]:
    desk = Desk()
    monkeypatch.setenv("TERM", "xterm")
    with create_app_session(input=create_input(desk.stdin), output=DummyOutput()):
        yield desk
    for end in (desk.stdin, desk.stdout):
        end.close()
    desk.leave()


@pytest.fixture
def chat(desk, monkeypatch):
    """Runs `treeeagle chat` at the desk over a scripted engine; `load` and `on_round` are called while nobody reads."""

    def run(
        load: Callable[[], object] = lambda: None, on_round: Callable[[int], object] = lambda _: None
    ) -> int:
        def load_runtime(_settings: object, *, progress: object) -> object:
            load()
            return fake_runtime(ScriptEngine([script("an answer")], on_round=on_round))

        fake = types.ModuleType("treeeagle_edge.runtime")
        fake.load_runtime = load_runtime
        monkeypatch.setitem(sys.modules, "treeeagle_edge.runtime", fake)
        monkeypatch.setattr(sys, "stdin", desk.stdin)
        monkeypatch.setattr(sys, "stdout", desk.stdout)
        monkeypatch.setattr(sys, "stderr", desk.stdout)
        signal.alarm(PATIENCE_S)
        try:
            return main(["chat"])
        finally:
            signal.alarm(0)

    before = signal.signal(signal.SIGALRM, fail(AssertionError, "a key was lost"))
    yield run
    signal.signal(signal.SIGALRM, before)


def fail(error: type[BaseException], message: str = "as the test asks") -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise error(message)

    return raise_it


def test_the_terminal_keeps_keys_in_every_gap(desk, chat, monkeypatch):
    """While loading, right before and right after the line editor reads, and during an answer."""
    gaps: list[tuple[str, bool]] = []
    read = EditorInput.read

    def watched(editor: EditorInput, prompt: str) -> str:
        gaps.append(("before a read", desk.keeps_keys()))
        desk.press("hello\r" if len(gaps) < 6 else "\x04")
        try:
            return read(editor, prompt)
        finally:
            gaps.append(("after a read", desk.keeps_keys()))

    monkeypatch.setattr(EditorInput, "read", watched)
    code = chat(
        load=lambda: gaps.append(("loading", desk.keeps_keys())),
        on_round=lambda number: number or gaps.append(("answering", desk.keeps_keys())),
    )
    assert code == 0
    assert [name for name, _ in gaps] == [
        "loading", "before a read", "after a read", "answering", "before a read", "after a read", "answering",
        "before a read", "after a read",
    ]  # fmt: skip
    assert [name for name, kept in gaps if not kept] == []
    assert desk.mode() == desk.before


def test_a_line_typed_between_an_answer_and_the_prompt_is_sent(desk, chat, monkeypatch):
    """With its Enter as an Enter: an ordinary mode would make it Ctrl-J, which adds a line and sends nothing."""
    typed = iter(["one\r", "two\r"])
    read = EditorInput.read

    def type_ahead(editor: EditorInput, prompt: str) -> str:
        keys = next(typed, None)
        if keys is None:
            raise EOFError
        desk.press(keys)
        return read(editor, prompt)

    monkeypatch.setattr(EditorInput, "read", type_ahead)
    assert chat() == 0
    assert [turn.user for turn in load_session(last_session_path()).turns] == ["one", "two"]


def test_a_first_message_may_be_typed_while_the_model_loads(desk, chat, monkeypatch):
    seen: list[bytes] = []

    def look(_editor: EditorInput, _prompt: str) -> str:
        seen.append(os.read(desk.stdin.fileno(), 100))
        raise EOFError

    monkeypatch.setattr(EditorInput, "read", look)
    assert chat(load=lambda: desk.press("early\r")) == 0
    assert seen == [b"early\r"]


@pytest.mark.parametrize(
    ("read", "code"),
    [
        (fail(EOFError), 0),
        (lambda *_: "/exit", 0),
        (fail(LeaveNow), 130),
        (fail(KeyboardInterrupt), 130),
        (fail(OSError), 1),
    ],
)
def test_the_terminal_is_restored_however_a_chat_ends(desk, chat, monkeypatch, read, code):
    monkeypatch.setattr(EditorInput, "read", read)
    assert chat() == code
    assert desk.mode() == desk.before


@pytest.mark.parametrize(("error", "code"), [(InputError, 1), (KeyboardInterrupt, 130)])
def test_the_terminal_is_restored_where_loading_ends_it(desk, chat, error, code):
    assert chat(load=fail(error)) == code
    assert desk.mode() == desk.before


def test_the_terminal_is_restored_after_an_error_of_ours(desk, chat, monkeypatch):
    monkeypatch.setattr(EditorInput, "read", lambda *_: "hello")
    with pytest.raises(ZeroDivisionError):
        chat(on_round=fail(ZeroDivisionError))
    assert desk.mode() == desk.before


def test_a_terminal_that_went_away_is_no_error(desk, monkeypatch):
    monkeypatch.setattr(sys, "stdin", desk.stdin)
    with kept_keys():
        desk.leave()


def test_without_a_terminal_nothing_happens(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        with kept_keys():
            assert not file.closed
