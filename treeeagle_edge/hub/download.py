"""Downloads files of a repository into the hub's own cache, resumable at any byte and checked by checksum.

The hub's client alone would write to a temporary file that it removes when interrupted, and would compare sizes only.
Here it writes to the cache's `<checksum>.incomplete`. That file stays after an interruption, and gets its final name
once its checksum is the one that the hub declares.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub.cache import CacheFolder, require_space
from treeeagle_edge.hub.progress import CountedFile, Meter
from treeeagle_edge.hub.repository import RemoteFile, Repository
from treeeagle_edge.json_file import read_json
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.units import format_size

_CLIENT_BARS = "huggingface_hub.http_get"
_MOST_BREAKS = 100  # how often the connection may break while one file comes, if each time some bytes came
_SLOW_TO_READ = 200 * 10**6  # bytes; before the checksum of a larger file is computed, a message says so


def fetch_config(repository: Repository) -> dict[str, Any]:
    """The repository's config.json, the one file that is fetched before it is clear whether the others are wanted.

    Raises InputError where there is none or it is no JSON, and what `download` raises.
    """
    from huggingface_hub import hf_hub_download

    file = repository.file("config.json")
    with _quiet_client():
        _bring(repository, file, Meter(silent, file.size), verify=False)
        return read_json(Path(hf_hub_download(repository.name, file.name, revision=repository.commit)))


def download(
    repository: Repository, files: Sequence[RemoteFile], say: Progress, *, verify: bool = False
) -> Path:
    """Folder that holds all of `files`, config.json among them, each with its declared size and checksum.

    Files that are here already are accepted by their size; with `verify` they are read and compared too. An
    interruption loses nothing. Raises InputError where a file comes damaged, CannotRunError without space, and the
    errors of the hub's client.
    """
    from huggingface_hub import hf_hub_download

    require_space(repository, files)
    meter = Meter(say, sum(file.size for file in files))
    with _quiet_client():
        for file in files:
            _bring(repository, file, meter, verify=verify)
            hf_hub_download(repository.name, file.name, revision=repository.commit)  # links to it
        # Without a revision this marks the commit as the newest known, which makes its snapshot the one that is used.
        newest = Path(hf_hub_download(repository.name, "config.json")).parent
    if newest.name != repository.commit:
        raise CannotRunError(
            f"{repository.name} was changed on the hub while it was being fetched",
            "run the same command again: only what is new is fetched",
        )
    return newest


def _bring(repository: Repository, file: RemoteFile, meter: Meter, *, verify: bool) -> None:
    """Make sure that `file` is whole in the cache."""
    from huggingface_hub.utils import WeakFileLock

    folder = CacheFolder(repository)
    here = folder.whole(file)
    if here is not None and verify and not _matches(file, here, meter):
        here.resolve().unlink()
    if folder.whole(file) is None:
        folder.lock(file).parent.mkdir(parents=True, exist_ok=True)
        folder.partial(file).parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(folder.lock(file)):
            if folder.whole(file) is None:  # no other process was first
                _fetch(repository, file, folder, meter)
    meter.end(file.size)


def _fetch(repository: Repository, file: RemoteFile, folder: CacheFolder, meter: Meter) -> None:
    """Fetch what is missing of `file`, and compare. A part that lay here and was damaged is fetched again."""
    partial = folder.partial(file)
    for anew in (folder.bytes_here(file) == 0, True):
        if anew:
            partial.unlink(missing_ok=True)
        _transfer(repository, file, folder, meter)
        if _matches(file, partial, meter):
            partial.replace(folder.blob(file))
            return
        partial.unlink()
        if anew:
            break
    raise InputError(
        f"{file.name} of {repository.name} came damaged: its checksum is not the one that the hub declares",
        "run the same command again; if it stays so, a proxy or mirror alters the file",
    )


def _transfer(repository: Repository, file: RemoteFile, folder: CacheFolder, meter: Meter) -> None:
    """Fetch what is missing of `file`. Where the connection breaks, try again, as long as some bytes come each time."""
    for breaks in range(1, _MOST_BREAKS + 1):
        begun = folder.bytes_here(file)
        try:
            _transfer_once(repository, file, folder.partial(file), begun, meter)
            return
        except Exception as error:  # of whichever HTTP library the client uses
            of_the_disk = isinstance(error, OSError) and error.errno is not None
            here = folder.bytes_here(file)
            if of_the_disk or here == begun or breaks == _MOST_BREAKS:
                raise
            meter.say(f"{file.name}: the connection broke; going on at {format_size(here)}")


def _transfer_once(repository: Repository, file: RemoteFile, partial: Path, begun: int, meter: Meter) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    if begun == 0:
        partial.unlink(missing_ok=True)  # longer than the file, so it is no part of it
    meter.begin(file.name, begun)
    with CountedFile(partial, meter.chunk) as stream:
        http_get(
            hf_hub_url(repository.name, file.name, revision=repository.commit),
            stream,
            resume_size=begun,
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.name,
        )
        stream.flush()
        os.fsync(stream.fileno())


def _matches(file: RemoteFile, path: Path, meter: Meter) -> bool:
    if file.size > _SLOW_TO_READ:
        meter.say(f"checking {file.name}")
    return file.matches(path)


@contextmanager
def _quiet_client() -> Iterator[None]:
    """Hide the client's progress bars and warnings (one for each retry): this program reports progress itself."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )

    verbosity = logging.get_verbosity()
    hide = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled(_CLIENT_BARS)
    logging.set_verbosity_error()
    if hide:
        disable_progress_bars(_CLIENT_BARS)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if hide:
            enable_progress_bars(_CLIENT_BARS)
