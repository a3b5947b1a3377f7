"""Fetching from a hub: nothing is lost by an interruption, nothing is believed without its checksum."""

from __future__ import annotations

import errno
import os
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hub_model import DEAD, NAME, WEIGHTS, fetched, place, ranges
from hub_stand_in import CHUNK

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub import cache as hub_cache
from treeeagle_edge.hub import download as hub_download
from treeeagle_edge.hub.cache import missing_bytes
from treeeagle_edge.hub.download import download
from treeeagle_edge.hub.fetch import cached_repository
from treeeagle_edge.hub.repository import files_of, look_up


def test_what_is_needed_comes_and_nothing_else(hub):
    folder = fetched()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not hub.asked("README.md") and len(hub.asked("config.json")) == 1
    assert cached_repository(NAME, "model") == folder


def test_a_second_fetch_opens_no_connection(hub):
    folder = fetched()
    hub.seen.clear()
    assert fetched() == folder and hub.seen == []


def test_an_interruption_loses_nothing(hub):
    """Halfway the line goes dead for good. The next run asks for the rest only, and the whole is right."""
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    with pytest.raises(
        CannotRunError, match="the connection broke while org/name was being fetched"
    ) as error:
        fetched()
    assert "run the same command again" in error.value.hint
    assert cached_repository(NAME, "model") is None
    kept = place().stat().st_size
    assert kept == 20 * CHUNK
    hub.breaks.clear()
    hub.seen.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [f"bytes={kept}-"]
    assert not place().exists()


def test_a_short_break_is_bridged_in_the_same_run(hub):
    hub.breaks["model.safetensors"] = [5 * CHUNK]
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [None, f"bytes={5 * CHUNK}-"]


def test_a_line_that_breaks_again_and_again_is_borne_as_long_as_bytes_come(hub):
    hub.breaks["model.safetensors"] = [3 * CHUNK, *[CHUNK] * 30]
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_fetch_that_goes_on_after_the_client_gave_up_says_so(hub):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *[0] * 5]
    said: list[str] = []
    assert (fetched(said) / "model.safetensors").read_bytes() == WEIGHTS
    assert "model.safetensors: the connection broke; going on at 20 kB" in said


def test_a_line_that_breaks_too_often_is_given_up_and_loses_nothing(hub, monkeypatch):
    """The client's own five attempts are taken away, so that each break is one of ours."""
    from huggingface_hub import file_download

    once = file_download.http_get
    monkeypatch.setattr(file_download, "http_get", lambda *a, **options: once(*a, **options, _nb_retries=0))
    monkeypatch.setattr(hub_download, "_MOST_BREAKS", 4)
    hub.breaks["model.safetensors"] = [0, *[2 * CHUNK] * 30]
    with pytest.raises(CannotRunError, match="the connection broke"):
        fetched()
    assert place().stat().st_size == 0, "an answer without a byte is not asked for again"
    with pytest.raises(CannotRunError, match="the connection broke"):
        fetched()
    kept = place().stat().st_size
    assert kept == 4 * 2 * CHUNK
    hub.breaks.clear()
    hub.seen.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges(hub) == [f"bytes={kept}-"]


def test_a_server_without_ranges_costs_time_only(hub):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    with pytest.raises(CannotRunError):
        fetched()
    hub.breaks.clear()
    hub.ignores_ranges = True
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("length", [7 * CHUNK, len(WEIGHTS), len(WEIGHTS) + 5])
def test_a_damaged_part_is_found_out_and_fetched_again(hub, length):
    path = place()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"?" * length)
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_is_altered_on_its_way_is_refused_and_not_kept(hub, file):
    hub.altered.add(file)
    with pytest.raises(InputError, match=f"{file} of org/name came damaged") as error:
        fetched()
    assert "proxy or mirror" in error.value.hint
    assert cached_repository(NAME, "model") is None and not place().exists()
    hub.altered.clear()
    assert (fetched() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_cut_short_in_the_cache_is_fetched_again(hub):
    folder = fetched()
    place("blob").write_bytes(WEIGHTS[:-1])
    repository = look_up(NAME)
    download(repository, files_of(repository, "model"), print)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_verifying_finds_a_byte_that_changed_in_the_cache(hub):
    folder = fetched()
    place("blob").write_bytes(b"?" + WEIGHTS[1:])
    repository = look_up(NAME)
    files = files_of(repository, "model")
    download(repository, files, print)
    assert (folder / "model.safetensors").read_bytes() != WEIGHTS, "by its size alone it looks right"
    download(repository, files, print, verify=True)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_only_what_is_missing_has_to_come(hub):
    hub.breaks["model.safetensors"] = [20 * CHUNK, *DEAD]
    repository = look_up(NAME)
    files = files_of(repository, "model")
    assert missing_bytes(repository, files) == sum(file.size for file in files)
    with pytest.raises(CannotRunError):
        fetched()
    assert missing_bytes(repository, files) == len(WEIGHTS) - 20 * CHUNK
    hub.breaks.clear()
    fetched()
    assert missing_bytes(repository, files) == 0


def test_a_disk_too_small_is_found_before_anything_comes(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**6, 0, 10**4)
    monkeypatch.setattr(hub_cache.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CannotRunError, match=r"org/name needs 40 kB more in .*, and 10 kB are free") as error:
        fetched()
    assert "HF_HOME" in error.value.hint
    assert not hub.asked("model.safetensors")


def test_a_disk_that_fills_up_keeps_what_has_come(hub, monkeypatch):
    def full(descriptor):
        if os.fstat(descriptor).st_size == len(WEIGHTS):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hub_download.os, "fsync", full)
        with pytest.raises(CannotRunError, match="the disk of the hub's cache is full") as error:
            fetched()
    assert "what has come is kept" in error.value.hint
    assert place().stat().st_size == len(WEIGHTS)
    hub.seen.clear()
    fetched()
    assert ranges(hub) == []


def test_a_cache_that_cannot_be_written_is_named(hub, monkeypatch):
    cache = place().parents[2]
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("a file where a folder should be")
    with pytest.raises(CannotRunError, match="org/name cannot be stored: ") as error:
        fetched()
    assert "HF_HOME" in error.value.hint


def test_two_at_once_fetch_each_file_once(hub):
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetched())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(folders) == 2 and folders[0] == folders[1]
    assert ranges(hub) == [None]


def test_a_repository_that_changes_meanwhile_is_asked_for_again(hub):
    repository = look_up(NAME)
    content = hub.repositories[NAME]
    hub.add(NAME, {**content, "README.md": "news"})
    with pytest.raises(CannotRunError, match="was changed on the hub while it was being fetched"):
        download(repository, files_of(repository, "model"), print)
    hub.seen.clear()
    fetched()
    assert ranges(hub) == []
