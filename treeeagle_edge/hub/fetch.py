"""Model and head repositories of the Hugging Face hub: taken from its local cache, downloaded where missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from treeeagle_edge.hub import download as hub_download
from treeeagle_edge.hub import repository as hub_repository
from treeeagle_edge.hub.errors import explained
from treeeagle_edge.progress import Progress, silent

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHE_FOLDER = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


def is_repository(name: str) -> bool:
    """True for the form org/name."""
    return _REPOSITORY.fullmatch(name) is not None


def repository_of(path: Path) -> str | None:
    """org/name of a folder inside the hub's cache, None for any other path."""
    matches = (_CACHE_FOLDER.fullmatch(part) for part in path.parts)
    return next((f"{match['org']}/{match['name']}" for match in matches if match), None)


def cached_repository(repository: str, what: str) -> Path | None:
    """Folder of a repository that is whole on this machine, None otherwise. Opens no connection.

    `what` is "model" or "head": a model needs a tokenizer beside its config and weights.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, allow_patterns=["config.json"], local_files_only=True))
    except (OSError, ValueError):  # the hub's LocalEntryNotFoundError is both
        return None
    return folder if _is_complete(folder, what) else None


def fetch_repository(repository: str, what: str, progress: Progress = silent) -> Path:
    """Folder of a repository, downloaded first where this machine lacks it. `what` is "model" or "head".

    A download that was interrupted goes on where it stopped. Raises InputError for a repository that is missing, gated,
    without usable weights or of a kind that does not run here, before weights are fetched; CannotRunError without a
    network or disk space.
    """
    cached = cached_repository(repository, what)
    if cached is not None:
        return cached
    progress(f"fetching {what} {repository} from the hub")
    with explained(repository, what):
        found = hub_repository.look_up(repository)
        config = hub_download.fetch_config(found)
        if what == "model":
            hub_repository.check_model(repository, config)
        files = hub_repository.files_of(found, what)
    with explained(repository, what, begun=True):
        return hub_download.download(found, files, progress)


def _is_complete(folder: Path, what: str) -> bool:
    """config.json and weights are there, every shard that an index names included, and a model's tokenizer."""
    if not (folder / "config.json").is_file():
        return False
    if what == "model" and not any((folder / name).is_file() for name in hub_repository.TOKENIZERS):
        return False
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return True
        index = folder / f"{single}.index.json"
        if index.is_file():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError):
                return False
            return all((folder / shard).is_file() for shard in shards)
    return False
