"""What the engine refuses before an answer begins: prompts and trees that it has no room for."""

from __future__ import annotations

from collections.abc import Sequence

from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.rounds import TreeShape


def check_prompt(prompt_ids: Sequence[int], *, context: int, vocab: int) -> None:
    """Raise InputError for a prompt that is empty, fills the `context` (tokens), or has ids outside `vocab`."""
    if not prompt_ids:
        raise InputError("the prompt is empty", "type something to answer")
    if len(prompt_ids) >= context:
        raise InputError(
            f"the prompt has {len(prompt_ids):,} tokens, too many for a context of {context:,}",
            "shorten it, or start with a larger --context",
        )
    outside = next((i for i in prompt_ids if not 0 <= i < vocab), None)
    if outside is not None:
        raise InputError(
            f"token id {outside} is not in the target's vocabulary of {vocab:,}",
            "the tokenizer belongs to another model",
        )


def check_shape(shape: TreeShape, *, room: int, fixed_rows: int | None) -> None:
    """Raise UsageError for a tree of more nodes than `room`, slots, or one whose draft is too large.

    fixed_rows: of every pass in exact mode, else None.
    """
    if shape.nodes > room:
        raise UsageError(
            f"{shape.nodes} nodes need more slots than the {room} reserved",
            f"use at most {room}, or start with --nodes {shape.nodes}",
        )
    if fixed_rows is not None and shape.nodes + 1 > fixed_rows:
        raise UsageError(
            f"--exact keeps {fixed_rows} rows a pass, too few for {shape.nodes} nodes",
            f"use at most {fixed_rows - 1}, or start with --nodes {shape.nodes}",
        )
    if (shape.depth - 1) * shape.branching > MAX_EXPANSIONS:
        raise UsageError(
            f"depth {shape.depth} with branching {shape.branching} is too large a draft",
            f"keep (depth - 1) x branching at most {MAX_EXPANSIONS}",
        )
