"""`treeeagle chat`: a chat at the terminal, or one answer for `-p` and pipes."""

from __future__ import annotations

import json
import os
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from treeeagle_edge.cli import options as shared
from treeeagle_edge.cli.console import EXIT_INTERRUPT, EXIT_OK, is_terminal, note, progress_line, say
from treeeagle_edge.cli.option_groups import with_groups
from treeeagle_edge.cli.sampling_options import SamplingChoices, StopOption, stop_strings
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.paths import typed_path
from treeeagle_edge.text_file import read_stream
from treeeagle_edge.units import counted

if TYPE_CHECKING:
    from treeeagle_edge.cli.conversation import Conversation
    from treeeagle_edge.settings import RunSettings

PATIENCE_S = 2.0  # before a person is told what is waited for

PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT|-", help="Answer this and leave; piped text follows it."),
]


@dataclass(frozen=True)
class ChatOptions:
    """The options of chat that are neither about the model nor about sampling, as the person gave them."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False
    markdown: Annotated[bool, typer.Option("--markdown", help="Render Markdown on a terminal.")] = False
    no_wrap: Annotated[
        bool, typer.Option("--no-wrap", help="Leave it to the terminal to break lines, inside words too.")
    ] = False
    resume: Annotated[bool, typer.Option("--continue", "-c", help="Go on with the last conversation.")] = (
        False
    )
    no_history: Annotated[bool, typer.Option("--no-history", help="Save nothing of this chat.")] = False
    system: shared.SystemOption = None
    raw: shared.RawOption = False
    show_prompt: shared.ShowPromptOption = False

    def __post_init__(self) -> None:
        if self.raw and self.system:
            raise UsageError(
                "--system has no place in --raw, which sends the text as it is", "leave one of them out"
            )
        if self.json and self.markdown:
            raise UsageError("--json and --markdown exclude each other", "leave one of them out")


@dataclass(frozen=True)
class _Wishes:
    """The same with its files read."""

    system: str | None  # "" asks for none
    raw: bool
    show_prompt: bool
    stops: tuple[str, ...]
    json: bool
    markdown: bool
    wrap: bool
    resume: Path | None  # the conversation to go on with
    history: bool


@with_groups
def chat_command(
    *,
    prompt: PromptOption = None,
    given: ChatOptions,
    machine: shared.MachineOptions,
    tree: shared.TreeOptions,
    choices: SamplingChoices,
    stop: StopOption = None,
) -> None:
    """Chat at the terminal, or answer once with -p or piped text. Answers go to stdout, all else to stderr."""
    settings = shared.run_settings(machine, tree)
    text = _one_shot_text(prompt, raw=given.raw)  # None: a chat
    if text is None and given.json:
        raise UsageError("--json needs a prompt", 'give one with -p "…", or pipe text in')
    wishes = _read_wishes(given, stop)
    if text is None:
        raise typer.Exit(_chat(settings, choices, wishes))
    raise typer.Exit(_answer_once(_start(settings, choices, wishes, one_shot=True), wishes, text))


def _read_wishes(given: ChatOptions, stop: list[str] | None) -> _Wishes:
    """Look at files now: what is wrong with them should not wait for a model to load."""
    from treeeagle_edge.chat.history import last_session_path, load_session
    from treeeagle_edge.cli.given_files import system_prompt
    from treeeagle_edge.cli.saved_settings import saved_choices

    resume = last_session_path() if given.resume else None
    if resume is not None:
        saved_choices(resume, load_session(resume))
    return _Wishes(
        system=None if given.system is None else system_prompt(given.system) or "",
        raw=given.raw,
        show_prompt=given.show_prompt,
        stops=stop_strings(stop),
        json=given.json,
        markdown=given.markdown,
        wrap=not given.no_wrap,
        resume=resume,
        history=not given.no_history,
    )


def _one_shot_text(prompt: str | None, *, raw: bool) -> str | None:
    """The prompt of a one-shot answer: `-p`, a blank line, what is piped in. None where a person sits at both ends and
    gave none; `-p -` asks for what is piped in, or typed.

    Raises InputError where there is nothing to answer.
    """
    typing = is_terminal(sys.stdin)
    if prompt is None and typing and is_terminal(sys.stdout):
        return None
    if prompt == "-":  # as other programs name stdin
        prompt = None
    if prompt is None and typing:
        note("reading the prompt from the terminal; Ctrl-D on an empty line ends it")
    if prompt is not None and prompt.startswith("@") and os.path.isfile(typed_path(prompt[1:])):
        note(f"-p takes its text as it is; to send the file: treeeagle chat < {prompt[1:]}")
    if not typing and not _comes_soon(sys.stdin):
        note("waiting for the text that is piped in" + ("; </dev/null gives none" if prompt else ""))
    piped = "" if typing and prompt is not None else _piped(raw=raw)
    parts = [part for part in (prompt or "", piped) if part.strip()]
    if not parts:
        raise InputError("the prompt is empty", 'give one with -p "…", or pipe text in')
    return "\n\n".join(parts)


def _comes_soon(stream: TextIO | None) -> bool:
    """False where nothing is piped in for a while: whoever started this may have left a stream open by mistake."""
    if stream is None:
        return True
    try:
        return bool(select.select([stream], [], [], PATIENCE_S)[0])
    except (OSError, ValueError):  # closed, no file, or of a kind that cannot be waited for
        return True


def _piped(*, raw: bool) -> str:
    """All of stdin. Its last line end belongs to the shell, not to the prompt, unless the text is sent raw."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    try:
        text = read_stream(sys.stdin.buffer, "the piped text")
    except UnicodeDecodeError as problem:
        raise InputError(
            "the piped text is not UTF-8", "convert it first, for example with iconv"
        ) from problem
    return text if raw else text.rstrip("\r\n")


def _start(
    settings: RunSettings, choices: SamplingChoices, wishes: _Wishes, *, one_shot: bool = False
) -> Conversation:
    """Load the runtime, with progress on stderr, and set up the conversation."""
    from treeeagle_edge.chat.autosave import Autosave
    from treeeagle_edge.chat.history import new_session_path, path_now
    from treeeagle_edge.chat.session import Session
    from treeeagle_edge.cli.conversation import Conversation
    from treeeagle_edge.cli.saved_settings import Flags

    with progress_line() as progress:
        progress("loading …")
        from treeeagle_edge.runtime import load_runtime

        runtime = load_runtime(settings, progress=progress)
    raw = wishes.raw or not runtime.tokenizer.has_chat_template
    session = Session(
        runtime.engine, runtime.tokenizer, system=wishes.system or None, raw=raw, stops=wishes.stops
    )
    conversation = Conversation(
        runtime=runtime,
        session=session,
        choices=choices,
        autosave=Autosave(new_session_path(one_shot=one_shot) if wishes.history else None),
        flags=Flags(choices, wishes.system),
        speculate=settings.speculate,
        markdown=wishes.markdown,
        wrap=wishes.wrap,
        show_prompt=wishes.show_prompt,
        silent=wishes.json,
    )
    if wishes.resume is not None:
        conversation.load(path_now(wishes.resume), keep_file=True)
    if raw and not wishes.raw:
        note("this model has no chat template: each message is sent as it is")
    return conversation


def _chat(settings: RunSettings, choices: SamplingChoices, wishes: _Wishes) -> int:
    """A chat, whose first message may be typed while the model loads. Returns the exit code."""
    from treeeagle_edge.cli.line_input import choose_input
    from treeeagle_edge.cli.repl import run_repl

    source = choose_input(remember=wishes.history)
    with source.kept_keys():
        conversation = _start(settings, choices, wishes)
        if conversation.session.turns:
            say(f"going on after {counted(len(conversation.session.turns), 'message')}")
        return run_repl(conversation, source)


def _answer_once(conversation: Conversation, wishes: _Wishes, text: str) -> int:
    """One answer on stdout. Returns 130 where Ctrl-C cut it short, else 0."""
    from treeeagle_edge.chat.answer import answer_json

    conversation.show_header()
    answer = conversation.answer(text)
    if wishes.json:
        runtime = conversation.runtime
        content = answer_json(
            answer, model=runtime.model_name, head=runtime.head_name, device=runtime.device, bits=runtime.bits
        )
        print(json.dumps(content, ensure_ascii=False), flush=True)
    return EXIT_INTERRUPT if answer.finish_reason == "interrupt" else EXIT_OK
