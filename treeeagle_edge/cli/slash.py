"""The slash commands: one table that dispatch, `/help` and completion read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from treeeagle_edge.chat.history import load_session, save_session
from treeeagle_edge.cli.console import say
from treeeagle_edge.cli.conversation import Conversation
from treeeagle_edge.cli.given_files import first_word, path_in, read_given, system_prompt
from treeeagle_edge.cli.info_view import info_lines
from treeeagle_edge.cli.printer import harmless
from treeeagle_edge.cli.set_command import change_setting, setting_lines
from treeeagle_edge.cli.stats import totals_lines
from treeeagle_edge.cli.tree_view import draw_round
from treeeagle_edge.errors import InputError, UsageError, reason_of

KEYS = (
    ("//text", "send a message that begins with a slash"),
    ('"""', "begin and end a message of several lines"),
    ("Alt-Enter, Ctrl-J", "a new line in the message"),
    ("Ctrl-G", "write the message in $EDITOR"),
    ("Ctrl-C", "stop the answer; twice within a second leaves"),
    ("Ctrl-D", "leave, on an empty line"),
)


class LeaveChat(Exception):
    """The person wants to go."""


@dataclass(frozen=True)
class Command:
    """One slash command. `run` gets the conversation and the text after the name, stripped."""

    name: str
    argument: str
    help: str
    run: Callable[[Conversation, str], None]
    aliases: tuple[str, ...] = ()
    takes_path: bool = False

    @property
    def usage(self) -> str:
        """As `/help` shows it."""
        names = ", ".join(f"/{alias}" for alias in self.aliases)
        return f"/{self.name} {self.argument}".rstrip() + (f" ({names})" if names else "")


def run_command(conversation: Conversation, line: str) -> None:
    """Run the command in `line`, which begins with one slash.

    Raises UsageError for a command that is not in the table, what the command raises, and LeaveChat.
    """
    name, argument = [*re.split(r"\s+", line[1:], maxsplit=1), ""][:2]  # a text may begin in the next line
    command = by_name().get(name.lower())
    if command is None:
        near = get_close_matches(name.lower(), list(by_name()), n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise UsageError(
            f"there is no command /{name}",
            f"{hint}/help lists the commands; // sends a message that begins with a slash",
        )
    argument = argument.strip()
    if argument and not command.argument:
        raise UsageError(f"/{command.name} takes no argument", f"type /{command.name} alone")
    command.run(conversation, argument)


def by_name() -> dict[str, Command]:
    """Every name and alias, without the slash, and its command."""
    return {name: command for command in COMMANDS for name in (command.name, *command.aliases)}


def help_lines() -> list[str]:
    """The table as text, keys included."""
    rows = [(command.usage, command.help) for command in COMMANDS] + list(KEYS)
    width = max(len(left) for left, _ in rows)
    return [f"  {left:<{width}}  {right}" for left, right in rows]


def _help(_conversation: Conversation, _argument: str) -> None:
    say("\n".join(help_lines()), wrap=True)


def _exit(_conversation: Conversation, _argument: str) -> None:
    raise LeaveChat


def _clear(conversation: Conversation, _argument: str) -> None:
    conversation.session.clear()
    conversation.save_elsewhere()
    say("the conversation is cleared; the system prompt stays")


def _retry(conversation: Conversation, _argument: str) -> None:
    conversation.retry()


def _undo(conversation: Conversation, _argument: str) -> None:
    turn = conversation.session.undo()
    if turn is None:
        raise InputError("there is nothing to take back", "write a message first")
    conversation.save()
    first = turn.user.strip().splitlines()[0]
    say(f"took back: {harmless(first if len(first) <= 60 else first[:59] + '…')}")


def _system(conversation: Conversation, argument: str) -> None:
    session = conversation.session
    if not argument:
        say(harmless(session.system or "there is no system prompt; /system TEXT sets one"))
        return
    if session.raw:
        raise UsageError("a system prompt has no place in --raw", "start without --raw to use one")
    session.system = None if argument.lower() == "off" else system_prompt(argument)
    say("the system prompt is removed" if session.system is None else "the system prompt is set")


def _set(conversation: Conversation, argument: str) -> None:
    if not argument:
        say("\n".join(setting_lines(conversation)), wrap=True)
        return
    say(change_setting(conversation, argument))


def _stats(conversation: Conversation, argument: str) -> None:
    if argument.lower() in ("on", "off"):
        conversation.show_stats = argument.lower() == "on"
        say(f"stats are {argument.lower()}")
    elif argument:
        raise UsageError(f"/stats does not know {argument!r}", "use /stats, /stats on or /stats off")
    else:
        session = conversation.session
        say("\n".join(totals_lines(session.answers, session.total_tokens, session.totals)), wrap=True)


def _save(conversation: Conversation, argument: str) -> None:
    path = path_in(argument, "/save FILE")
    try:
        if path.exists() and not _is_session(path):
            raise InputError(f"{path} is there and is no saved session", "choose another name")
        if not path.absolute().parent.is_dir():  # a slip of the keyboard makes no folders
            raise InputError(f"there is no folder {path.parent} to save in", "choose another place")
        save_session(path, conversation.saved())
    except OSError as problem:
        raise InputError(
            f"{path} cannot be written: {reason_of(problem)}", "choose another place"
        ) from problem
    say(f"saved to {path}")


def _is_session(path: Path) -> bool:
    """Whether this program may write over `path`. A pipe is not opened: it might never give anything."""
    try:
        return path.is_file() and bool(load_session(path))
    except InputError:
        return False


def _load(conversation: Conversation, argument: str) -> None:
    conversation.load(path_in(argument, "/load FILE"), keep_file=False)
    count = len(conversation.session.turns)
    say(f"loaded {count} message{'' if count == 1 else 's'} and answer{'' if count == 1 else 's'}")


def _read(conversation: Conversation, argument: str) -> None:
    name, question = first_word(argument)
    path = path_in(name, "/read FILE [TEXT]")
    content = read_given(path).rstrip("\n")
    if not content.strip():
        raise InputError(f"{path} is empty", "give a file with text in it")
    conversation.answer(f"{question}\n\n{content}" if question else content)


def _info(conversation: Conversation, _argument: str) -> None:
    say("\n".join([*info_lines(conversation), *setting_lines(conversation)]), wrap=True)


def _tree(conversation: Conversation, _argument: str) -> None:
    rounds = [step for step in conversation.session.rounds if step.kind != "prefill"]
    if not rounds:
        raise InputError("there is no round to draw yet", "write a message first")
    # an answer often ends with a round that needs no tree, and that has nothing to show
    drawn = next((i for i in reversed(range(len(rounds))) if rounds[i].tree is not None), len(rounds) - 1)
    codec = conversation.runtime.tokenizer
    width = shutil.get_terminal_size().columns
    lines = draw_round(
        rounds[drawn], drawn + 1, lambda token: codec.decode([token], skip_special=False), width
    )
    say("\n".join(lines))


COMMANDS = (
    Command("help", "", "show this", _help),
    Command("exit", "", "leave", _exit, aliases=("bye", "quit")),
    Command("clear", "", "forget the conversation, keep the system prompt", _clear),
    Command("retry", "", "ask the last message again", _retry),
    Command("undo", "", "take back the last message and its answer", _undo),
    Command("system", "[TEXT|@FILE|off]", "show, set or remove the system prompt", _system),
    Command("set", "[NAME VALUE]", "show or change a setting, such as temperature, nodes or spec", _set),
    Command("stats", "[on|off]", "totals since the start; or the line after each answer on or off", _stats),
    Command("save", "FILE", "save the conversation as JSON", _save, takes_path=True),
    Command("load", "FILE", "go on with a saved conversation", _load, takes_path=True),
    Command("read", "FILE [TEXT]", "send a file, with TEXT before it", _read, takes_path=True),
    Command("info", "", "model, device, memory plan and settings", _info),
    Command("tree", "", "draw the last tree: what was drafted, what was walked", _tree),
)
