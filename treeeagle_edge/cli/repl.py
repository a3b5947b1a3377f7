"""The loop of a chat: read a message or a slash command, answer, and again."""

from __future__ import annotations

import gc

from treeeagle_edge.cli.console import EXIT_INTERRUPT, EXIT_OK, print_error, say
from treeeagle_edge.cli.conversation import Conversation
from treeeagle_edge.cli.interrupt import LeaveNow, StopReading
from treeeagle_edge.cli.line_input import LineInput, read_message
from treeeagle_edge.cli.slash import LeaveChat, run_command
from treeeagle_edge.errors import TreeEagleError

WELCOME = "/help for commands, Ctrl-D to leave"
STOPPED_READING = "stopped before the answer began, so the message is not part of the conversation"
INTERRUPT_HINT = "Ctrl-D or /exit leaves; Ctrl-C again within a second does too"


def run_repl(conversation: Conversation, source: LineInput) -> int:
    """Chat until the person leaves. Returns the exit code: 0, or 130 after Ctrl-C twice within a second."""
    conversation.show_header()
    say(WELCOME, wrap=True)
    gc.freeze()  # what was loaded stays: looking through it would now and then hold an answer up for 30 ms
    hinted = False
    while True:
        try:
            take(conversation, read_message(source))
        except (EOFError, LeaveChat):
            return EXIT_OK
        except TreeEagleError as error:
            print_error(error)
        except LeaveNow:
            return EXIT_INTERRUPT
        except StopReading:
            say(STOPPED_READING, wrap=True)
        except KeyboardInterrupt:
            if conversation.interrupts.press():
                return EXIT_INTERRUPT
            if not hinted:
                hinted = True
                say(INTERRUPT_HINT, wrap=True)


def take(conversation: Conversation, message: str) -> None:
    """Act on one entry: a slash command is run, anything else is sent; `//` sends a text that begins with a slash."""
    stripped = message.strip()
    if not stripped:
        return
    if stripped.startswith("//"):
        conversation.answer(stripped[1:])
    elif stripped.startswith("/"):
        run_command(conversation, stripped)
    else:
        conversation.answer(message)
