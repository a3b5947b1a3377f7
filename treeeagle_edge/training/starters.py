"""First words of a person's turn, from the table in starters.yaml, as ids."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import yaml

from treeeagle_edge.chat.prompt import TextCodec

USER_TOKENS = 96  # longest turn of a person, unless the starter's group allows more


@dataclass(frozen=True)
class Starter:
    """First words of a person's turn."""

    ids: tuple[int, ...]
    weight: float  # how often it opens a dialogue, relative to the others
    follow_up: float  # how often it opens a later turn
    tokens: int  # longest turn, the starter not counted


def load_starters(codec: TextCodec) -> tuple[Starter, ...]:
    """The shipped table. The weights of a group are spread evenly over its starters."""
    table = yaml.safe_load((files("treeeagle_edge.training") / "starters.yaml").read_text(encoding="utf-8"))
    return tuple(
        Starter(
            tuple(codec.encode(text.rstrip(" "))),
            group["weight"] / len(group["starters"]),
            group["follow_up"] / len(group["starters"]),
            group.get("tokens", USER_TOKENS),
        )
        for group in table.values()
        for text in group["starters"]
    )
