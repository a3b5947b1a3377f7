"""Where the hub's own cache keeps a repository, and how much of it is on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from treeeagle_edge.errors import CannotRunError
from treeeagle_edge.hub.repository import RemoteFile, Repository
from treeeagle_edge.units import format_size


class CacheFolder:
    """Blobs named by their checksum, and snapshots that point to them. Asking for a path creates nothing."""

    def __init__(self, repository: Repository) -> None:
        """The folder of `repository`, at its commit."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=repository.name, repo_type="model")
        self.cache = Path(constants.HF_HUB_CACHE)
        self.snapshot = self.cache / folder / "snapshots" / repository.commit
        self._blobs = self.cache / folder / "blobs"
        self._locks = self.cache / ".locks" / folder

    def blob(self, file: RemoteFile) -> Path:
        """The path of a complete file."""
        return self._blobs / file.checksum

    def partial(self, file: RemoteFile) -> Path:
        """The path of a file that is being fetched."""
        return self._blobs / f"{file.checksum}.incomplete"

    def lock(self, file: RemoteFile) -> Path:
        """The lock that the hub's client takes too."""
        return self._locks / f"{file.checksum}.lock"

    def whole(self, file: RemoteFile) -> Path | None:
        """The file, where it is on this machine with its declared size, else None."""
        # in the snapshot it is a link to the blob, or the file itself on systems without links
        places = (self.snapshot / file.name, self.blob(file))
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


def _size(path: Path) -> int | None:
    """Bytes of a file, None where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return None
