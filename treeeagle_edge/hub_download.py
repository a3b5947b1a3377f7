"""Brings files of a repository into the hub's own cache: resumable at any byte, checked against what the hub declares.

The hub's client writes to a file of its own that it removes when it is interrupted, and compares sizes only. So what it
transfers here goes to the cache's `<checksum>.incomplete`, which stays, and gets its name when its checksum is right.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from treeeagle_edge.errors import CannotRunError, InputError
from treeeagle_edge.hub_repository import RemoteFile, Repository
from treeeagle_edge.json_file import read_json
from treeeagle_edge.plan import format_size

Progress = Callable[[str], None]

_REFRESH = 0.2  # seconds between messages where each replaces the one before
_STEPS = 20  # messages about bytes in all, where each is a line of its own
_SLOW_TO_READ = 200 * 10**6  # bytes of a file whose checksum takes long enough to be worth a word


class CacheFolder:
    """Where the hub's cache keeps a repository: blobs named by checksum, snapshots that point to them."""

    def __init__(self, repository: Repository) -> None:
        """Nothing is created or read yet."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=repository.name, repo_type="model")
        self.cache = Path(constants.HF_HUB_CACHE)
        self.snapshot = self.cache / folder / "snapshots" / repository.commit
        self._blobs = self.cache / folder / "blobs"
        self._locks = self.cache / ".locks" / folder

    def blob(self, file: RemoteFile) -> Path:
        """Where a whole file lies."""
        return self._blobs / file.checksum

    def partial(self, file: RemoteFile) -> Path:
        """Where a file lies while it comes."""
        return self._blobs / f"{file.checksum}.incomplete"

    def lock(self, file: RemoteFile) -> Path:
        """The lock that the hub's client takes too."""
        return self._locks / f"{file.checksum}.lock"

    def whole(self, file: RemoteFile) -> Path | None:
        """The file where it is here at its declared size, None otherwise."""
        places = (
            self.snapshot / file.name,
            self.blob(file),
        )  # the first holds it where links are not to be had
        return next((place for place in places if _size(place) == file.size), None)

    def bytes_here(self, file: RemoteFile) -> int:
        """Bytes of the file that need not be fetched again."""
        if self.whole(file) is not None:
            return file.size
        begun = _size(self.partial(file)) or 0
        return begun if begun <= file.size else 0

    def free(self) -> int:
        """Bytes free on the disk of the cache."""
        there = next(path for path in (self.cache, *self.cache.parents) if path.exists())
        return shutil.disk_usage(there).free


def missing_bytes(repository: Repository, files: Sequence[RemoteFile]) -> int:
    """Bytes of `files` that have yet to come."""
    folder = CacheFolder(repository)
    return sum(file.size - folder.bytes_here(file) for file in files)


def require_space(repository: Repository, files: Sequence[RemoteFile]) -> None:
    """Raise CannotRunError where the disk of the cache has no room for what is missing."""
    folder, need = CacheFolder(repository), missing_bytes(repository, files)
    if need > folder.free():
        raise CannotRunError(
            f"{repository.name} needs {format_size(need)} more in {folder.cache}, "
            f"and {format_size(folder.free())} are free",
            "free some space, or set HF_HOME to a folder on another disk",
        )


def fetch_config(repository: Repository) -> dict[str, Any]:
    """The repository's config.json, the one file that is fetched before it is clear whether the others are wanted.

    Raises InputError where there is none or it is no JSON, and what `download` raises.
    """
    from huggingface_hub import hf_hub_download

    file = repository.file("config.json")
    with _quiet_client():
        _bring(repository, file, CacheFolder(repository), _Meter(lambda _: None, file.size), verify=False)
        return read_json(Path(hf_hub_download(repository.name, file.name, revision=repository.commit)))


def download(
    repository: Repository, files: Sequence[RemoteFile], say: Progress, *, verify: bool = False
) -> Path:
    """Folder that holds all of `files`, config.json among them, each with its declared size and checksum.

    What is here already is believed by its size; with `verify` it is read and compared too. An interruption loses
    nothing. `say` gets sentences, more of them where its `in_place` says that each replaces the one before. Raises
    InputError where a file comes damaged twice, CannotRunError without space, and the errors of the hub's client.
    """
    from huggingface_hub import hf_hub_download

    require_space(repository, files)
    folder = CacheFolder(repository)
    meter = _Meter(say, sum(file.size for file in files))
    with _quiet_client():
        for file in files:
            _bring(repository, file, folder, meter, verify=verify)
            hf_hub_download(
                repository.name, file.name, revision=repository.commit
            )  # links it into the snapshot
        # Without a revision this marks the commit as the newest known, which makes the snapshot the one that is used.
        newest = Path(hf_hub_download(repository.name, "config.json")).parent
    if newest.name != repository.commit:
        raise CannotRunError(
            f"{repository.name} was changed on the hub while it was being fetched",
            "run the same command again: only what is new is fetched",
        )
    return newest


def _bring(
    repository: Repository, file: RemoteFile, folder: CacheFolder, meter: _Meter, *, verify: bool
) -> None:
    """Have `file` whole in the cache."""
    from huggingface_hub.utils import WeakFileLock

    here = folder.whole(file)
    if here is not None and verify:
        meter.checking(file)
        if not file.matches(here):
            here.resolve().unlink()
            here = None
    if here is not None:
        meter.found(file.size)
        return
    folder.lock(file).parent.mkdir(parents=True, exist_ok=True)
    folder.partial(file).parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.lock(file)):
        if folder.whole(file) is not None:  # another process was first
            meter.found(file.size)
            return
        resumed = folder.bytes_here(file) > 0
        if not _transfer(repository, file, folder, meter) and not (
            resumed and _transfer(repository, file, folder, meter)  # the part that lay here was damaged
        ):
            raise InputError(
                f"{file.name} of {repository.name} came damaged: its checksum is not the one that the hub declares",
                "run the same command again; if it stays so, a proxy or mirror alters the file",
            )


def _transfer(repository: Repository, file: RemoteFile, folder: CacheFolder, meter: _Meter) -> bool:
    """Fetch what is missing of `file`; False, and nothing kept, where its checksum is wrong."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial, begun = folder.partial(file), folder.bytes_here(file)
    if begun == 0:
        partial.unlink(missing_ok=True)
    before = meter.done
    meter.found(begun)
    with partial.open("ab") as stream:
        http_get(
            hf_hub_url(repository.name, file.name, revision=repository.commit),
            stream,
            resume_size=begun,
            headers=build_hf_headers(),
            expected_size=file.size,
            displayed_filename=file.name,
            tqdm_class=_counter(lambda count: meter.fetched(count, file.name)),
        )
        stream.flush()
        os.fsync(stream.fileno())
    meter.checking(file)
    if file.matches(partial):
        partial.replace(folder.blob(file))
        return True
    partial.unlink()
    meter.done = before
    return False


def _counter(count: Callable[[int], None]) -> type[Any]:
    """A progress bar for the hub's client that draws nothing and tells `count` of every chunk."""
    from huggingface_hub.utils import tqdm

    class Counter(tqdm):
        def __init__(self, *values: Any, **options: Any) -> None:
            super().__init__(*values, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            count(int(n or 0))

    return cast(type[Any], Counter)


class _Meter:
    """Says how much has come, how fast, and how long the rest will take."""

    def __init__(self, say: Progress, total: int) -> None:
        self._say = say
        self.done = 0  # bytes, those that were here included
        self._total = total
        self._fetched, self._began = 0, 0.0  # bytes from the network, and when the first of them came
        self._in_place = bool(getattr(say, "in_place", False))
        self._said = (0.0, 0)  # time and step of the last message

    def found(self, count: int) -> None:
        """`count` further bytes were here before."""
        self.done += count
        self._said = (self._said[0], self._step)

    def fetched(self, count: int, name: str) -> None:
        """`count` further bytes of the file `name` came."""
        now = time.monotonic()
        self._began = self._began or now
        self._fetched += count
        self.done += count
        due = now - self._said[0] >= _REFRESH if self._in_place else self._step > self._said[1]
        if due and self.done < self._total:
            self._said = (now, self._step)
            self._say(f"{name}: {self._text(now - self._began)}")

    def checking(self, file: RemoteFile) -> None:
        """The checksum of `file` is about to be computed."""
        if file.size > _SLOW_TO_READ:
            self._say(f"checking {file.name}")

    @property
    def _step(self) -> int:
        return self.done * _STEPS // max(1, self._total)

    def _text(self, seconds: float) -> str:
        text = f"{format_size(self.done)} of {format_size(self._total)}"
        if seconds < 1:
            return text
        rate = self._fetched / seconds
        return f"{text}, {format_size(rate)}/s, {_duration((self._total - self.done) / rate)} left"


def _duration(seconds: float) -> str:
    """Such as "40 s", "12 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


@contextmanager
def _quiet_client() -> Iterator[None]:
    """The client's own warnings (each retry is one) are kept off the screen: what matters is said by our errors."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _size(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
