"""Paths as a person types them, and folders of the person's own machine, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def typed_path(text: str) -> Path:
    """The path a person typed, with `~` as a shell reads it: of an unknown user it stays, where `Path` would raise."""
    return Path(os.path.expanduser(text))


def cache_dir() -> Path:
    """Where downloads and derived files live: $TREEEAGLE_CACHE, else `treeeagle` in $XDG_CACHE_HOME or ~/.cache.

    The folder is not created here. A relative XDG_CACHE_HOME is ignored, as the specification asks.
    """
    own = os.environ.get("TREEEAGLE_CACHE")
    if own:
        return typed_path(own).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treeeagle"
