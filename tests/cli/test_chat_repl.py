"""The chat at the prompt: messages, Ctrl-C and leaving, all as transcripts over a scripted engine."""

from __future__ import annotations

import re
import signal

import pytest
from chat_fakes import ScriptEngine, script
from chat_typed import Typed, prompt_text

from treeeagle_edge.chat.autosave import Autosave
from treeeagle_edge.chat.history import last_session_path, load_session
from treeeagle_edge.cli.line_input import read_message


def test_what_the_engine_finds_out_while_it_answers_is_told_once(repl):
    engine = ScriptEngine([script("hm")])
    engine.notes = ("the card is slow today", "known since the start")
    result = repl("a", "b", engine=engine, notes=("known since the start",))
    assert result.err.count("the card is slow today") == 1
    assert result.err.count("known since the start") == 1


def test_a_short_chat(repl):
    """A transcript. Expectations row 46: the header says which device runs it, and why."""
    result = repl("why is the sky blue?", "  ", "and at night?", "/exit")
    assert result.code == 0
    assert result.out == "first answer\nsecond answer\n"
    shown = re.sub(r"[\d,.]+ tok/s|first token [\d.]+|memory [\d.]+|seed \d+", "#", result.err)
    assert shown.splitlines() == [
        "toy-model · 8-bit · head toy-head, 8-bit · cpu (2 cores, avx2) · context 4,096 · plan 0.15 of 23.4 GB",
        "runs on cpu: no NVIDIA driver was found",
        "/help for commands, Ctrl-D to leave",
        "  13 tokens · # · 3.0 tokens/round · # s · context 31/4,096 · # GB · #",
        "  14 tokens · # · 2.6 tokens/round · # s · context 67/4,096 · # GB · #",
    ]


def test_ctrl_d_leaves(repl):
    assert repl().code == 0


@pytest.mark.parametrize("name", ["/exit", "/bye", "/quit", "/EXIT"])
def test_words_to_leave_with(repl, name):
    result = repl(name, "never sent")
    assert (result.code, result.engine.prompts) == (0, [])


def test_ctrl_c_at_the_prompt_hints_once(repl):
    """Expectations row 42: Ctrl-C does not end the chat; it clears the line and says once how to leave."""
    times = iter([10.0, 20.0])
    result = repl(KeyboardInterrupt, KeyboardInterrupt, "hello", clock=lambda: next(times))
    assert result.code == 0
    assert result.err.count("Ctrl-D or /exit leaves") == 1
    assert len(result.engine.prompts) == 1


def test_ctrl_c_twice_within_a_second_leaves(repl):
    """Expectations row 35: twice exits, with 130."""
    times = iter([10.0, 10.9])
    result = repl(KeyboardInterrupt, KeyboardInterrupt, "never sent", clock=lambda: next(times))
    assert (result.code, result.engine.prompts) == (130, [])


def test_ctrl_c_while_answering_keeps_the_answer(repl):
    """Expectations rows 35 and 42: the answer stops at the round, stays in the conversation and on disk, the stats are
    printed, the chat goes on, and the next prompt begins with what was shown.
    """
    engine = ScriptEngine(
        [script("one two three four"), script("fine")],
        on_round=lambda number: (
            signal.raise_signal(signal.SIGINT) if number == 1 and len(engine.prompts) == 1 else None
        ),
    )
    result = repl("count", lambda: str(load_session(last_session_path()).turns[0].answer), engine=engine)
    assert result.code == 0
    assert result.out == "one two\nfine\n"
    assert "· interrupted" in result.err
    assert engine.closed == 2
    known = [*engine.prompts[0], *b"one two"]
    assert engine.prompts[1][: len(known)] == known
    assert prompt_text(result).endswith("<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n")


def test_ctrl_c_twice_while_answering_leaves(repl):
    """Expectations row 35: twice exits, also where a round never ends."""

    def press(number: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = repl("count", "never sent", engine=ScriptEngine([script("one two")], on_round=press))
    assert result.code == 130
    assert len(result.engine.prompts) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_after_the_last_round_stops_nothing(repl, monkeypatch):
    """Expectations row 42: pressed while the finished answer is being saved, it ends neither save nor chat."""
    save = Autosave.save

    def pressed(self, session):
        signal.raise_signal(signal.SIGINT)
        return save(self, session)

    monkeypatch.setattr(Autosave, "save", pressed)
    result = repl("hello", "/info")
    assert result.code == 0
    assert load_session(last_session_path()).turns[0].finish_reason == "stop"
    assert "tok/s" in result.err


def test_two_slashes_send_a_slash(repl):
    result = repl("//etc/hosts is what?")
    assert "<|im_start|>user\n/etc/hosts is what?<|im_end|>" in prompt_text(result)


def test_quotes_make_one_message_of_several_lines(repl):
    result = repl('"""', "line one", "", '  line three"""', '"""in one line"""')
    assert "<|im_start|>user\nline one\n\n  line three<|im_end|>" in prompt_text(result, 0)
    assert "<|im_start|>user\nin one line<|im_end|>" in prompt_text(result, 1)


@pytest.mark.parametrize(
    "entries", [('"""Finds owls."""\nimport owls\n\nprint("""hoo""")',), ('"""', 'one """ two')]
)
def test_what_follows_quotes_is_not_lost(repl, entries):
    """A Python file begins like a message of several lines."""
    result = repl(*entries)
    assert "<|im_start|>user\n{}<|im_end|>".format("\n".join(entries)) in prompt_text(result)


def test_ctrl_c_gives_an_open_block_up():
    source = Typed(['"""', "half", KeyboardInterrupt, "whole"])
    with pytest.raises(KeyboardInterrupt):
        read_message(source)
    assert read_message(source) == "whole"


def test_a_pasted_text_of_several_lines_is_one_message(repl):
    result = repl("def f():\n    return 1\n\n# what is this?")
    assert len(result.engine.prompts) == 1
    assert "def f():\n    return 1\n\n# what is this?" in prompt_text(result)


def test_a_message_that_does_not_fit_loses_nothing(repl):
    engine = ScriptEngine([script("fine")], context=300)
    result = repl("short", "x" * 400, "short again", engine=engine)
    assert re.search(
        r"error: the message takes 4\d\d tokens as sent, and the context is 300\n hint: ", result.err
    )
    assert [turn.user for turn in result.conversation.session.turns] == ["short", "short again"]


def test_old_messages_that_no_longer_fit_are_said(repl):
    engine = ScriptEngine([script("a" * 50)], context=512)
    result = repl(*["question " * 4] * 6, engine=engine)
    assert re.search(
        r"note: the context is full: the first \d messages are no longer sent; the system prompt", result.err
    )
