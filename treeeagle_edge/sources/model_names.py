"""From the name of a target or head, as a person types it, to its files; and from files to a short name to show."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from treeeagle_edge.errors import InputError, reason_of
from treeeagle_edge.hub.fetch import cached_repository, fetch_repository, is_repository, repository_of
from treeeagle_edge.paths import typed_path
from treeeagle_edge.planning.known_models import KNOWN_MODELS, find_known, known_heads
from treeeagle_edge.progress import Progress, silent
from treeeagle_edge.sources.demo_model import DEMO_MODEL, fetch_demo_model

BUNDLED_HEADS = Path(__file__).parents[1] / "heads"  # shipped with the package: a folder for each head
_HEAD_SUFFIXES = (".safetensors", ".bin")
_REPOSITORY_URL = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)/?(?:(?:tree|blob|resolve)/.*)?$")
_LISTED = 200  # a suggestion is looked for among this many entries of a folder
_SHOWN = 120  # an error repeats at most this many characters of an unknown name


def resolve_model(name: str, progress: Progress = silent) -> Path:
    """Path of a target: a Hugging Face directory or a .gguf file.

    `name` is the demo model's name, a directory, a .gguf file, or org/name of the hub, tried in this order; what is
    missing is downloaded. Raises InputError for a name that is none of them, CannotRunError where a download fails.
    """
    name = name.strip()
    if name.lower() == DEMO_MODEL.name:
        return fetch_demo_model(progress)
    path = typed_path(name)
    if name and os.path.isdir(path):  # False for a name that no file system allows, where Path.is_dir raises
        return _model_in(path)
    if name and os.path.exists(path):
        return _model_file(path)
    if is_repository(name) and path.suffix.lower() != ".gguf":
        return fetch_repository(name, "model", progress)
    raise unknown_name(name, "model", (*KNOWN_MODELS, *_nearby(path, (".gguf",))))


def resolve_head(name: str | None, model_name: str, progress: Progress = silent) -> Path | None:
    """Path of a draft head: a directory, or a .safetensors or .bin file beside its config.json; None for no head.

    `name` is a bundled head, a directory or file, org/name of the hub, or "none". Where it is None, the head known for
    `model_name` is taken if it is on this machine; it is not downloaded, since nobody asked for it. Raises InputError
    and CannotRunError as `resolve_model` does.
    """
    if name is None:
        return _known_head(model_name)
    name = name.strip()
    if name.lower() == "none":
        return None
    bundled = BUNDLED_HEADS / name.lower()
    if name.lower() in bundled_heads():
        return bundled
    path = typed_path(name)
    if name and os.path.isdir(path):
        return _head_in(path)
    if name and os.path.exists(path):
        return _head_file(path)
    if is_repository(name) and path.suffix.lower() not in _HEAD_SUFFIXES:
        return fetch_repository(name, "head", progress)
    raise unknown_name(name, "head", (*bundled_heads(), *known_heads(), *_nearby(path, _HEAD_SUFFIXES)))


def model_label(name: str | Path) -> str:
    """A short name for a target or head, from the name a person typed or the path it was resolved to."""
    path = Path(name)
    if path == DEMO_MODEL.path or path.name == DEMO_MODEL.filename or str(name).lower() == DEMO_MODEL.name:
        return DEMO_MODEL.name
    repository = repository_of(path)
    if repository is not None:
        return repository
    if isinstance(name, str) and is_repository(name) and not os.path.exists(path):
        return name
    if path.suffix.lower() in _HEAD_SUFFIXES:
        return path.absolute().parent.name
    return path.stem if path.suffix.lower() == ".gguf" else path.absolute().name


def _known_head(model_name: str) -> Path | None:
    known = find_known(model_label(model_name))
    if known is None or known.head_name is None:
        return None
    if known.head_name in bundled_heads():
        return BUNDLED_HEADS / known.head_name
    return cached_repository(known.head_name, "head")


def bundled_heads() -> list[str]:
    """Names of the heads that are shipped with the package."""
    return sorted(folder.name for folder in BUNDLED_HEADS.iterdir() if (folder / "config.json").is_file())


def _model_in(folder: Path) -> Path:
    """The folder itself where it is a Hugging Face checkpoint, else the only GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    files = [file for file in _entries(folder) if file.suffix.lower() == ".gguf"]
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise InputError(f"{folder} holds {len(files)} GGUF files ({names})", f"name one, such as {files[0]}")
    raise InputError(
        f"{folder} holds no model: it has neither a config.json nor a .gguf file",
        "give the folder that a model was downloaded to, or a .gguf file",
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(
            f"{folder} cannot be read: {reason_of(error)}", "check the permissions of the folder"
        ) from error


def _model_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        return path
    if (path.parent / "config.json").is_file():
        raise InputError(f"{path} is one file of a model", f"give its folder: {path.parent}")
    raise InputError(f"{path} is not a model", "give a .gguf file or the folder of a Hugging Face checkpoint")


def _head_in(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} holds no head: it has no config.json", "give the folder of an EAGLE-3 head"
        )
    if not any(file.suffix.lower() in _HEAD_SUFFIXES for file in _entries(folder)):
        raise InputError(
            f"{folder} holds no head: it has neither .safetensors nor .bin weights",
            "download the head again, or give another folder",
        )
    return folder


def _head_file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf":
        raise InputError(
            f"{path} is a GGUF head, which is not read",
            "give the head in its original form: config.json and .safetensors",
        )
    if path.suffix.lower() not in _HEAD_SUFFIXES:
        raise InputError(f"{path} is not a head", "give a folder, or a .safetensors or .bin file")
    return path


def _nearby(path: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Files and folders in the parent of a path that does not exist, as a person would type them."""
    try:
        entries = sorted(path.parent.iterdir())[:_LISTED]
    except (OSError, ValueError):  # there is no parent either: nothing to suggest
        return []
    usable = [
        entry for entry in entries if entry.suffix.lower() in suffixes or (entry / "config.json").is_file()
    ]
    return [str(path.parent / entry.name) for entry in usable]


def unknown_name(name: str, what: str, candidates: Iterable[str]) -> InputError:
    """The error for an unknown name. Its hint is the closest of `candidates`."""
    known = {candidate.lower(): candidate for candidate in candidates}
    known.update({candidate.lower().rpartition("/")[2]: candidate for candidate in known.values()})
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
    repository = _REPOSITORY_URL.match(name)
    if repository is not None:
        return InputError(f"{shown} is an address of the hub", f"give its name: {repository[1]}")
    if os.path.islink(typed_path(name)):
        return InputError(f"{shown} is a link to what is not there", "check what it should lead to")
    looks_like_path = "/" in name or name.startswith("~") or Path(name).suffix in (".gguf", *_HEAD_SUFFIXES)
    message = f"no such file or folder: {shown}" if looks_like_path else f"no {what} is named {shown!r}"
    if close:
        return InputError(message, f"did you mean {known[close[0]]}?")
    first = DEMO_MODEL.name if what == "model" else bundled_heads()[0]
    kinds = "a folder, a .gguf file" if what == "model" else "a folder, a .safetensors file"
    return InputError(message, f"use {first}, {kinds} or an org/name of the hub")
