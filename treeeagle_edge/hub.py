"""Model and head repositories of the Hugging Face hub: taken from its local cache, downloaded where missing."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path

from treeeagle_edge.errors import CannotRunError, InputError, TreeEagleError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHE_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
]
MODEL_FILES = [*_SMALL_FILES, "*.safetensors", "*.safetensors.index.json"]
HEAD_FILES = ["config.json", "*.safetensors", "*.bin"]
_UNWANTED = ["*/*", "consolidated*"]  # other formats' copies of the same weights


def is_repository(name: str) -> bool:
    """True for the form org/name."""
    return _REPOSITORY.fullmatch(name) is not None


def repository_of(path: Path) -> str | None:
    """org/name of a folder inside the hub's cache, None for any other path."""
    matches = (_CACHE_FOLDER.fullmatch(part) for part in path.parts)
    return next((f"{match['org']}/{match['name']}" for match in matches if match), None)


def cached_repository(repository: str, files: list[str]) -> Path | None:
    """Folder of a repository whose `files` are all on this machine, None otherwise. Opens no connection."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, allow_patterns=files, local_files_only=True))
    except (OSError, ValueError):  # the hub's LocalEntryNotFoundError is both
        return None
    return folder if _is_complete(folder) else None


def fetch_repository(
    repository: str, files: list[str], *, what: str, progress: Callable[[str], None] | None = None
) -> Path:
    """Folder of a repository, downloaded first where this machine lacks it; the hub's bars are drawn on stderr.

    `what` is "model" or "head". A download that was interrupted goes on where it stopped. Raises InputError for a
    repository that is missing, gated or without usable weights, CannotRunError without a network or disk space.
    """
    cached = cached_repository(repository, files)
    if cached is not None:
        return cached
    from huggingface_hub import snapshot_download

    if progress is not None:
        progress(f"fetching {what} {repository} from the hub")
    try:
        folder = Path(snapshot_download(repository, allow_patterns=files, ignore_patterns=_UNWANTED))
    except Exception as error:  # the hub's client passes on errors of whichever HTTP library it uses
        raise _hub_error(error, repository, what) from error
    if not _is_complete(folder):
        raise InputError(
            f"{repository} holds no {what} in a format that can be read",
            "choose a repository with config.json and .safetensors files",
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """config.json and weights are there, every shard that an index names included."""
    if not (folder / "config.json").is_file():
        return False
    for index in folder.glob("*.safetensors.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def _hub_error(error: Exception, repository: str, what: str) -> TreeEagleError:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return InputError(
            f"{repository} is gated: its owner asks you to accept a licence first",
            "accept it on the page of the repository, then log in with `hf auth login`",
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return InputError(
            f"the hub has no {what} {repository}, or it is private",
            "check the spelling; `hf auth login` opens your own",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotRunError(
            f"{repository} cannot be stored: the disk of the hub's cache is full",
            "free some space, or set HF_HOME to a folder on another disk",
        )
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return CannotRunError(
            f"the hub answered {status} when asked for {repository}", "try again in a while"
        )
    return CannotRunError(
        f"{repository} is not on this machine, and the hub cannot be reached",
        f"check the network and HF_HUB_OFFLINE, or give a folder or file that holds the {what}",
    )
