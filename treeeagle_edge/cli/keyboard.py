"""The mode of the terminal during a chat: keys pressed while nobody reads wait for the next entry, unseen."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def kept_keys() -> Iterator[None]:
    """Keep keys as they were pressed, from the start of a chat to its end, and restore the terminal however it ends.

    A terminal in its ordinary mode would turn Enter into Ctrl-J, which adds a line to an entry instead of sending it,
    and would echo keys into an answer. The line editor has a mode of its own while it reads, and comes back to this
    one: there is no moment of the ordinary mode in between. Ctrl-C still interrupts. Ctrl-Z gives the shell its own
    mode back; the chat goes on in the one it had.

    Where stdin is no terminal, nothing changes.
    """
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = termios.tcgetattr(terminal)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)

    def change(mode: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(terminal, termios.TCSANOW, mode)

    def restore() -> None:
        change(before)

    def end(number: int, _frame: FrameType | None) -> None:
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    def pause(number: int, _frame: FrameType | None) -> None:
        now = termios.tcgetattr(terminal)
        restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # comes back when the shell lets the chat go on
        signal.signal(number, pause)
        change(now)

    # without a handler, these end a program on the spot
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {**dict.fromkeys(ending, end), signal.SIGTSTP: pause}
    caught = [number for number in handlers if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in caught:
            signal.signal(number, handlers[number])
        termios.tcsetattr(terminal, termios.TCSANOW, quiet)
        yield
    finally:
        restore()
        for number in caught:
            signal.signal(number, signal.SIG_DFL)
