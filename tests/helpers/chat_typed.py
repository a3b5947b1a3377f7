"""A chat in which everything is typed ahead, over a scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
from chat_fakes import ByteCodec, ScriptEngine, fake_runtime, script

from treeeagle_edge.chat.autosave import Autosave
from treeeagle_edge.chat.history import new_session_path
from treeeagle_edge.chat.session import Session
from treeeagle_edge.cli.conversation import Conversation
from treeeagle_edge.cli.interrupt import Interrupts
from treeeagle_edge.cli.repl import run_repl
from treeeagle_edge.cli.sampling_options import SamplingChoices

Entry = str | type[BaseException] | Callable[[], str]


class Typed:
    """A person who types these entries and then Ctrl-D."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = iter(entries)

    def read(self, prompt: str) -> str:
        entry = next(self.entries, EOFError)
        if isinstance(entry, type):
            raise entry
        return entry() if callable(entry) else entry

    def kept_keys(self) -> contextlib.AbstractContextManager[None]:
        raise AssertionError("a chat at no terminal has no keys to keep")


def chatting(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs a chat with the entries; the result has the exit code, stdout, stderr, the engine and the conversation."""

    def run(*entries: Entry, answers=("first answer", "second answer"), engine=None, clock=None, **runtime):
        engine = engine or ScriptEngine([script(text) for text in answers])
        loaded = fake_runtime(engine, **runtime)
        conversation = Conversation(
            runtime=loaded,
            session=Session(engine, loaded.tokenizer),
            choices=SamplingChoices(),
            autosave=Autosave(new_session_path()),
            interrupts=Interrupts(clock) if clock else Interrupts(),
        )
        code = run_repl(conversation, Typed(entries))
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, engine=engine, conversation=conversation)

    return run


def prompt_text(result, number: int = -1) -> str:
    return ByteCodec().decode(result.engine.prompts[number], skip_special=False)
