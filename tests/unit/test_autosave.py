"""Conversations that are saved after every turn."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from treeeagle_edge.chat import autosave as autosave_module
from treeeagle_edge.chat import history
from treeeagle_edge.chat.autosave import Autosave, file_state
from treeeagle_edge.chat.history import (
    SavedSession,
    last_session_path,
    load_session,
    new_session_path,
    path_now,
    path_to_go_on,
    save_session,
)
from treeeagle_edge.chat.prompt import Turn

SESSION = SavedSession("toy", (Turn("hi", "hello", (104, 105, 257), "stop"),))


def test_of_one_shot_answers_the_newest_are_kept():
    """Nothing else is touched: neither a chat, nor what a person saved there, nor what only looks alike."""
    folder = new_session_path().parent
    chat, own = new_session_path(), folder / "mine.json"
    alike = [folder / "x20250101-000000-abcdef.once.json", folder / "20250101-000000-abcdef.once.json.bak"]
    for path in (chat, own, *alike):
        save_session(path, SESSION)
    old = [folder / f"20250101-{number:06}-abcdef.once.json" for number in range(history.KEPT_ONE_SHOTS + 3)]
    for path in old:
        save_session(path, SESSION)
    newest = new_session_path(one_shot=True)
    assert Autosave(newest).save(SESSION) is None
    assert set(folder.iterdir()) == {chat, own, *alike, *old[4:], newest}
    assert last_session_path() == newest


def test_a_one_shot_answer_that_is_gone_on_with_becomes_a_chat():
    once, chat = new_session_path(one_shot=True), new_session_path()
    save_session(once, SESSION)
    kept = path_to_go_on(once)
    assert kept.name == once.name.replace(".once", "")
    assert path_to_go_on(chat) == chat
    autosave = Autosave(kept, before=once)
    assert once.exists()  # until there is something in its place
    assert autosave.save(SESSION) is None
    assert list(kept.parent.iterdir()) == [kept]
    assert Autosave(kept, before=kept, state=file_state(kept)).save(SESSION) is None
    assert kept.exists()


def test_a_one_shot_answer_that_another_process_went_on_with_is_found():
    once, chat = new_session_path(one_shot=True), new_session_path()
    save_session(once, SESSION)
    assert (path_now(once), path_now(chat)) == (once, chat)
    Autosave(path_to_go_on(once), before=once).save(SESSION)
    assert path_now(once) == path_to_go_on(once)


def test_a_full_disk_is_said_once_and_keeps_the_old_file(monkeypatch):
    """The chat goes on where nothing can be saved, with one warning; the file before stays whole, no scrap is left."""
    path = new_session_path()
    autosave = Autosave(path)
    assert autosave.save(SESSION) is None
    before = path.read_bytes()

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(history.os, "fsync", full)
    assert "no space left on device" in (autosave.save(SESSION) or "")
    assert autosave.save(SESSION) is None
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()


def test_a_folder_that_cannot_be_made_is_said_once(monkeypatch, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    autosave = Autosave(blocker / "sessions" / "x.json")
    assert "not saved" in (autosave.save(SESSION) or "")
    assert autosave.save(SESSION) is None


def test_nothing_is_written_without_a_path_or_a_turn():
    assert Autosave(None).save(SESSION) is None
    path = new_session_path()
    assert Autosave(path).save(SavedSession("toy", ())) is None
    assert not path.exists()


def test_a_turn_that_is_taken_back_is_not_in_the_file_either():
    path, once = new_session_path(), new_session_path(one_shot=True)
    autosave = Autosave(path)
    autosave.save(SESSION)
    save_session(once, SESSION)
    assert autosave.save(SavedSession("toy", ())) is None
    assert Autosave(path_to_go_on(once), before=once).save(SavedSession("toy", ())) is None
    assert [load_session(path).turns, load_session(path_to_go_on(once)).turns] == [(), ()]
    assert not once.exists()


def said(text: str) -> SavedSession:
    return SavedSession("toy", (*SESSION.turns, Turn(text, "yes", (1,), "stop")))


def test_of_two_chats_that_go_on_with_the_same_file_none_is_lost():
    """Expectations row 43."""
    path = new_session_path()
    save_session(path, SESSION)
    first, second = (Autosave(path, before=path, state=file_state(path)) for _ in range(2))
    assert first.save(said("one")) is None
    news = second.save(said("two"))
    assert second.path is not None
    assert (
        news
        == f"somebody else went on with this conversation too; from here on yours is saved in {second.path}"
    )
    assert second.save(said("three")) is None
    assert first.save(said("four")) is None
    assert set(path.parent.iterdir()) == {path, second.path}
    assert (load_session(path), load_session(second.path)) == (said("four"), said("three"))


def test_of_two_chats_that_go_on_with_the_same_one_shot_answer_none_is_lost():
    once = new_session_path(one_shot=True)
    save_session(once, SESSION)
    state, kept = file_state(once), path_to_go_on(once)
    first, second = (Autosave(kept, before=once, state=state) for _ in range(2))
    assert first.save(said("one")) is None
    assert "saved in" in (second.save(said("two")) or "")
    assert set(kept.parent.iterdir()) == {kept, second.path}
    assert load_session(kept) == said("one")


def test_a_file_that_somebody_removed_is_written_again():
    path = new_session_path()
    autosave = Autosave(path)
    autosave.save(SESSION)
    path.unlink()
    assert autosave.save(said("on")) is None
    assert load_session(path) == said("on")


def test_nobody_else_saves_between_the_look_at_a_file_and_its_replacement(monkeypatch):
    path = new_session_path()

    def look(at: Path, session: SavedSession) -> None:
        handle = os.open(path.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        save_session(at, session)

    monkeypatch.setattr(autosave_module, "save_session", look)
    assert Autosave(path).save(SESSION) is None
    assert load_session(path) == SESSION
    with pytest.MonkeyPatch.context() as patch:  # a file system that knows no locks
        patch.setattr(fcntl, "flock", refuses)
        patch.setattr(autosave_module, "save_session", save_session)
        assert Autosave(new_session_path()).save(SESSION) is None


def refuses(_handle: int, _operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")
