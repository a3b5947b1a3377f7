"""The `treeeagle` program: its commands, and how every way of ending becomes an exit code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from treeeagle_edge import __version__
from treeeagle_edge.cli.bench import bench_command
from treeeagle_edge.cli.chat import chat_command
from treeeagle_edge.cli.console import (
    EXIT_INTERRUPT,
    EXIT_OK,
    abandon_stdout,
    give_missing_streams,
    print_error,
)
from treeeagle_edge.cli.eval_head import eval_head_command
from treeeagle_edge.cli.gpu_check import gpu_check_command
from treeeagle_edge.cli.profile import profile_command
from treeeagle_edge.cli.pull import pull_command
from treeeagle_edge.cli.train import train_command
from treeeagle_edge.errors import CannotRunError, InputError, TreeEagleError, UsageError, reason_of

# Base of every complaint about the command line, by way of one that typer exports: it lies in click, or in the copy of
# click that newer versions of typer bring.
_BadParameter: type[Exception] = typer.BadParameter
_OptionError: Any = _BadParameter.__mro__[2]
_NOT_A_NUMBER = re.compile(r"for '(--[a-z-]+)'.*valid (integer|number|float)")


class Commands(TyperGroup):
    """Says which command was meant where there is none of that name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command named first in `args`. Raises UsageError where there is none."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            names = self.list_commands(ctx)
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
            raise UsageError(f"there is no command {name}", hint)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Of an option that lacks its argument, the parser does not say whose it is: we do."""
        try:
            return super().invoke(ctx)
        except _OptionError as error:
            name = ctx.invoked_subcommand
            command: Any = self.get_command(ctx, name) if name else None
            if error.ctx is None and command is not None:
                error.ctx = typer.Context(command, parent=ctx, info_name=name)
            raise


app = typer.Typer(
    name="treeeagle",
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"treeeagle {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Chat with a local model, answered sooner by tree speculative decoding, in exactly the words of plain decoding."""
    if context.invoked_subcommand is None:
        print(context.get_help())


for name, command, summary in (  # what fits a line of 80 columns; the rest is said by the command's own help
    ("chat", chat_command, "Chat at the terminal, or answer once with -p or piped text."),
    ("pull", pull_command, "Fetch a model or a draft head from the hub."),
    ("profile", profile_command, "Say what runs on this machine, in what memory, how fast."),
    ("bench", bench_command, "Measure decoding with the tree against plain decoding."),
    ("eval-head", eval_head_command, "Measure how well a draft head predicts its model."),
    ("train", train_command, "Train a draft head for a model, from text it writes."),
    ("gpu-check", gpu_check_command, "Check and measure the CUDA path on a card."),
):
    app.command(name, short_help=summary)(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments` (default: those of the process). Returns the exit code: 0 fine, 1 the person's
    input, 2 usage, 3 this machine cannot run it, 130 interrupted.
    """
    give_missing_streams()
    if not _has_folder():
        print_error(CannotRunError("the folder this was started in is gone", "change to one that is there"))
        return CannotRunError.exit_code
    with contextlib.suppress(AttributeError):  # a stream that is no text file has nothing to set
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a person's locale may lack a character
    try:
        code = app(
            args=None if arguments is None else list(arguments), prog_name="treeeagle", standalone_mode=False
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_OK
    except TreeEagleError as error:
        print_error(error)
        return error.exit_code
    except _OptionError as error:
        complaint = _as_usage_error(error)
        print_error(complaint)
        return complaint.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPT
    except BrokenPipeError:
        abandon_stdout()
        return EXIT_OK
    except OSError as problem:  # a full disk behind stdout, for one
        abandon_stdout()
        place = f" ({problem.filename})" if problem.filename else ""
        refusal = InputError(
            f"the system says: {reason_of(problem)}{place}", "make room or check permissions"
        )
        print_error(refusal)
        return refusal.exit_code


def _has_folder() -> bool:
    """False where the current folder was removed, in which PyTorch's libraries end the program with a riddle."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _as_usage_error(error: Any) -> UsageError:
    """A complaint of the option parser in our own words: lower case, one sentence, and a hint."""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "treeeagle"
    option = getattr(error, "option_name", None)
    near = getattr(error, "possibilities", None)
    hint = f"{command} --help lists the options"
    if near:
        return UsageError(f"there is no option {option}", f"did you mean {' or '.join(sorted(near))}? {hint}")
    message = " ".join(error.format_message().split()).rstrip(".")
    number = _NOT_A_NUMBER.search(message)
    if number:
        kind = "a whole number" if number[2] == "integer" else "a number"
        return UsageError(f"{number[1]} takes {kind}, which this is not", hint)
    if message.startswith("No such option"):
        return UsageError(f"there is no option {option}", hint)
    if message.startswith("Got unexpected extra argument") and command.endswith("chat"):
        return UsageError(message[0].lower() + message[1:], 'a prompt goes behind -p: treeeagle chat -p "…"')
    return UsageError(message[0].lower() + message[1:], hint)


if __name__ == "__main__":
    sys.exit(main())
