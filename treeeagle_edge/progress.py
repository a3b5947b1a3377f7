"""How long work says what it does: it calls a function with one sentence at a time."""

from __future__ import annotations

from collections.abc import Callable

# Gets one sentence. Where the function has a true attribute `in_place`, each sentence replaces the one before on the
# screen, so that it may be called several times a second.
Progress = Callable[[str], None]


def silent(_sentence: str) -> None:
    """The progress of work that nobody watches."""
