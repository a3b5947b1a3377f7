"""Folders of the person's own machine, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloads and derived files live: $TREEEAGLE_CACHE, else `treeeagle` in $XDG_CACHE_HOME or ~/.cache.

    The folder is not created here. A relative XDG_CACHE_HOME is ignored, as the specification asks.
    """
    own = os.environ.get("TREEEAGLE_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "treeeagle"
