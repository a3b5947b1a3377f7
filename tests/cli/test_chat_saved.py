"""One-shot answers that are saved and continued: what comes back, what is kept, and what stays as it was."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

from chat_fakes import ScriptEngine, script, sent

from treeeagle_edge.chat.history import (
    SavedSession,
    last_session_path,
    load_session,
    path_to_go_on,
    save_session,
)
from treeeagle_edge.chat.prompt import Turn
from treeeagle_edge.cli.sampling_options import SamplingChoices
from treeeagle_edge.cli.saved_settings import saved_choices


def test_the_chat_is_saved_and_continued(chat):
    """Expectations row 43: a one-shot answer too can be gone on with; ids included, in a file of its owner's only."""
    chat("-p", "why?", "--system", "Be brief.")
    first = chat.engine.prompts[-1]
    path = last_session_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, _, _ = chat("-p", "and at night?", "--continue", engine=ScriptEngine([script("Dark.")]))
    assert code == 0
    assert chat.engine.prompts[-1][: len(first)] == first
    saved = load_session(last_session_path())
    assert [turn.answer for turn in saved.turns] == ["The sky is blue.", "Dark."]
    assert saved.system == "Be brief."
    assert len(list(path.parent.iterdir())) == 1


def test_one_shot_answers_do_not_pile_up(chat, monkeypatch):
    """One that somebody went on with is a conversation, and stays."""
    monkeypatch.setattr("treeeagle_edge.chat.history.KEPT_ONE_SHOTS", 2)
    chat("-p", "first")
    chat("-p", "second", "--continue")
    for number in range(4):
        chat("-p", f"question {number}")
    turns = [
        [turn.user for turn in load_session(path).turns] for path in last_session_path().parent.iterdir()
    ]
    assert len(turns) == 3
    assert ["first", "second"] in turns
    assert ["question 3"] in turns


def test_a_continued_chat_has_its_settings_below_the_flags(chat):
    chat("-p", "why?", "--system", "Be brief.", "--temperature", "0.25", "--seed", "5", "--top-k", "9")
    _, _, err = chat("-p", "on", "--continue", "--seed", "6")
    assert "brought back: temperature 0.25, top-k 9, its system prompt\n" in err
    params = chat.engine.params[-1]
    assert (params.temperature, params.seed, params.top_k) == (0.25, 6, 9)
    _, _, err = chat("-p", "and on", "--continue", "--system", "", "--temperature", "0", "--top-k", "0")
    assert "brought back: seed 6\n" in err  # what was given last is what was saved
    assert "Be brief." not in sent(chat)
    params = chat.engine.params[-1]
    assert (params.temperature, params.seed, params.top_k) == (0, 6, 0)


def test_a_chat_is_continued_where_another_process_moved_it(chat, monkeypatch):
    chat("-p", "why?")

    def moves(path: Path, session: SavedSession) -> SamplingChoices:
        """Stands for what happens while the model loads: somebody else goes on with the same one-shot answer."""
        if path.exists():
            save_session(path_to_go_on(path), session)
            path.unlink()
        return saved_choices(path, session)

    monkeypatch.setattr("treeeagle_edge.cli.saved_settings.saved_choices", moves)
    code, _, err = chat("-p", "and at night?", "--continue", engine=ScriptEngine([script("Dark.")]))
    assert (code, "error" in err) == (0, False)
    assert [turn.answer for turn in load_session(last_session_path()).turns] == ["The sky is blue.", "Dark."]


def test_an_answer_of_another_process_to_the_same_chat_is_kept(chat):
    chat("-p", "why?")
    chat("-p", "and at night?", "--continue")
    path = last_session_path()
    saved = load_session(path)
    other = replace(saved, turns=(*saved.turns, Turn("by day?", "Blue.", (), "stop")))
    engine = ScriptEngine([script("Dark.")], on_round=lambda number: number or save_session(path, other))
    code, _, err = chat("-p", "at dusk?", "--continue", engine=engine)
    assert code == 0
    assert load_session(path) == other
    (new,) = set(path.parent.iterdir()) - {path}
    assert (
        f"note: somebody else went on with this conversation too; from here on yours is saved in {new}" in err
    )
    assert [turn.user for turn in load_session(new).turns] == ["why?", "and at night?", "at dusk?"]


def test_settings_that_cannot_be_are_said_before_loading(chat):
    chat("-p", "x", "--seed", "5")
    path = last_session_path()
    path.write_text(path.read_text().replace('"seed": 5', '"seed": -5'))
    code, _, err = chat("-p", "x", "--continue")
    assert code == 1
    assert err.startswith(f"error: {path} is a damaged session: seed is -5, which is out of range\n hint: ")


def test_nothing_is_saved_without_history(chat):
    chat("-p", "x", "--no-history")
    code, _, err = chat("-p", "x", "--continue")
    assert code == 1
    assert err == "error: there is no earlier session to continue\n hint: start one with: treeeagle chat\n"


def test_a_damaged_session_is_left_alone(chat):
    chat("-p", "x")
    path = last_session_path()
    path.write_text("{ half")
    code, _, err = chat("-p", "x", "--continue")
    assert code == 1
    assert "is not a saved session" in err
    assert path.read_text() == "{ half"


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(chat, monkeypatch, tmp_path: Path):
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocker))
    code, out, err = chat("-p", "x")
    assert (code, out) == (0, "The sky is blue.\n")
    assert err.count("this chat is not saved") == 1
