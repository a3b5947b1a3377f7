"""The settings that a saved conversation brings back, except where the command line gave others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from treeeagle_edge.chat.history import SESSION_HINT, SavedSession
from treeeagle_edge.cli.sampling_options import SamplingChoices
from treeeagle_edge.errors import InputError, UsageError

_KINDS: Mapping[str, tuple[type, ...]] = {"top_k": (int,), "seed": (int,), "max_tokens": (int,)}
_NUMBER = (int, float)


@dataclass(frozen=True)
class Flags:
    """What the command line asked for. It stays where a saved conversation was held with something else."""

    choices: SamplingChoices = field(default_factory=SamplingChoices)
    system: str | None = None  # "" asks for none


def chosen(choices: SamplingChoices) -> dict[str, Any]:
    """The settings that somebody chose, as a file holds them."""
    values = {item.name: getattr(choices, item.name) for item in fields(choices)}
    return {name: value for name, value in values.items() if value is not None}


def saved_choices(path: Path, session: SavedSession) -> SamplingChoices:
    """The settings in `session`, read from `path`. Names that this version does not know are left out.

    Raises InputError for a value that no setting of that name can have.
    """
    known = {item.name for item in fields(SamplingChoices)}
    values = {name: value for name, value in session.settings.items() if name in known and value is not None}
    for name, value in values.items():
        if type(value) not in _KINDS.get(name, _NUMBER):
            raise InputError(f"{path} is a damaged session: {name} is no number of its kind", SESSION_HINT)
    try:
        return SamplingChoices(**values)
    except UsageError as problem:
        raise InputError(f"{path} is a damaged session: {problem}", SESSION_HINT) from problem


def under_flags(saved: SamplingChoices, flags: Flags) -> SamplingChoices:
    """What holds from now on: the flags, then what was saved."""
    return replace(saved, **chosen(flags.choices))


def brought_back(saved: SamplingChoices, system: bool, flags: Flags) -> str | None:
    """The sentence that names what a saved conversation brings with it, with or without a system prompt; None where
    that is nothing.
    """
    given = chosen(flags.choices)
    names = [
        f"{name.replace('_', '-')} {_shown(value)}"
        for name, value in chosen(saved).items()
        if name not in given
    ]
    if system and flags.system is None:
        names.append("its system prompt")
    return f"brought back: {', '.join(names)}" if names else None


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
