"""Shapes of the model and head that a run would load, from files on this machine or from the table of known models."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from treeeagle_edge.errors import InputError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.hub.fetch import cached_repository, is_repository
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.paths import typed_path
from treeeagle_edge.planning.known_models import KNOWN_MODELS, find_known
from treeeagle_edge.planning.memory_profile import MemoryProfile
from treeeagle_edge.settings import RunSettings
from treeeagle_edge.sources.demo_model import DEMO_MODEL, is_cached
from treeeagle_edge.sources.model_names import (
    BUNDLED_HEADS,
    bundled_heads,
    model_label,
    resolve_head,
    resolve_model,
)


@dataclass(frozen=True)
class PlannedModel:
    """A target and its head as shapes only."""

    name: str
    config: ModelConfig
    head_name: str | None
    head: HeadConfig | None
    on_disk: bool  # False: shapes from the table of known models, the weights are not on this machine
    head_on_disk: bool = False


def planned_model(settings: RunSettings, profile: MemoryProfile) -> PlannedModel:
    """Shapes of the model and head that a run would load. Nothing is downloaded.

    Files on this machine come first, then the table of known models. A model whose hidden states are rotated gets no
    head, unless the person asks for a head or a tree. Raises InputError for a name that is neither here nor in the
    table.
    """
    name = settings.model or profile.model
    local = _local_model(name)
    known = find_known(name)
    if local is not None:
        from treeeagle_edge.config.reader import read_config

        config, label = read_config(local), model_label(name)
        known = known or find_known(label)
    elif known is not None:
        config, label = known.config, next(key for key in KNOWN_MODELS if key.lower() == name.strip().lower())
    else:
        raise _unknown_model(name)
    own_head = profile.head if settings.model is None else None
    head_name = settings.head or own_head or (known.head_name if known else None)
    unsuited = config.rotation is not None and not settings.asks_for_tree
    if settings.wants_plain or head_name is None or head_name.lower() == "none" or unsuited:
        return PlannedModel(label, config, None, None, local is not None)
    there = _local_head(head_name) is not None
    return PlannedModel(label, config, head_name, _head_shapes(head_name, config), local is not None, there)


def _unknown_model(name: str) -> InputError:
    names = {known.lower(): known for known in KNOWN_MODELS}
    names.update({known.lower().rpartition("/")[2]: known for known in KNOWN_MODELS})
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {names[close[0]]}?" if close else "check the name or path"
    if is_repository(name):
        hint += (
            f", or fetch it first: treeeagle pull {name}"
            if not close
            else f" else fetch it first: treeeagle pull {name}"
        )
    message = (
        f"{name} is neither on this machine nor among the {len(KNOWN_MODELS)} models whose shapes are known"
    )
    return InputError(message, hint)


def _local_model(name: str) -> Path | None:
    """Path of a model that is already on this machine, None where it would have to be fetched."""
    if name.strip().lower() == DEMO_MODEL.name:
        return DEMO_MODEL.path if is_cached() else None  # a damaged one is fetched again
    if os.path.exists(
        typed_path(name)
    ):  # os.path says False to a name that no file system takes; Path raises
        return resolve_model(name)
    return cached_repository(name, "model") if is_repository(name) else None


def _head_shapes(name: str, target: ModelConfig) -> HeadConfig | None:
    """Shapes of a head: from the table where its name is known, else from its files where they are on this machine."""
    for known in KNOWN_MODELS.values():
        if known.head_name is not None and known.head_name.lower() == name.lower() and known.head is not None:
            if (
                known.head.target_hidden_size == target.hidden_size
                and known.head.vocab_size == target.vocab_size
            ):
                return known.head
            raise InputError(
                f"the head {name} belongs to a target of width {known.head.target_hidden_size} with "
                f"{known.head.vocab_size:,} tokens, this model has {target.hidden_size} and {target.vocab_size:,}",
                "leave --head out to get the head that goes with the model",
            )
    folder = _local_head(name)
    if folder is None:
        if not is_repository(name):
            resolve_head(name, "")  # says that no head has this name, and which is near
        raise InputError(
            f"the head {name} is not on this machine, so its shapes are not known",
            f"fetch it first: treeeagle pull {name}; --head none does without one",
        )
    from treeeagle_edge.checkpoint.head import read_head_config

    return read_head_config(folder, target)


def _local_head(name: str) -> Path | None:
    """Folder of a head that is already on this machine, None where it would have to be fetched."""
    if os.path.exists(typed_path(name)):
        return resolve_head(name, "")  # refuses what is no head at all
    if name.lower() in bundled_heads():
        return BUNDLED_HEADS / name.lower()
    return cached_repository(name, "head") if is_repository(name) else None
