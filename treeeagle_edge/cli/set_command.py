"""`/set`: what may be changed while chatting, with its range."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from treeeagle_edge.cli.conversation import Conversation
from treeeagle_edge.errors import UsageError
from treeeagle_edge.rounds import TreeShape, tree_shape

NUMBERS: dict[str, type] = {
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    "repetition-penalty": float,
    "presence-penalty": float,
    "frequency-penalty": float,
    "seed": int,
    "max-tokens": int,
}
SHAPE = ("nodes", "depth", "branching")
SWITCHES = ("spec", "wrap")
NAMES = (*NUMBERS, *SHAPE, *SWITCHES)


def setting_lines(conversation: Conversation) -> list[str]:
    """Every setting and its value now."""
    rows = [(name, _value_of(conversation, name)) for name in NUMBERS]
    tree = conversation.tree or conversation.runtime.tree
    if tree is not None:
        rows += [(name, _shown(tree, name)) for name in SHAPE]
    rows.append(("spec", "on" if conversation.speculate and tree is not None else "off"))
    rows.append(("wrap", "on" if conversation.wrap else "off"))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _value_of(conversation: Conversation, name: str) -> str:
    """The value of one of NUMBERS now, and whether it is the default."""
    field = name.replace("-", "_")
    value = getattr(conversation.params(), field)
    chosen = getattr(conversation.choices, field) is not None
    if name == "seed" and not chosen:
        shown = "drawn for each answer"
    elif value is None:
        shown = "up to the context"
    else:
        shown = f"{value:g}" if isinstance(value, float) else str(value)
    return shown if chosen else f"{shown} (default)"


def _shown(tree: TreeShape, name: str) -> str:
    """A bound, where the controller chooses within it."""
    value = str(getattr(tree, name))
    return f"at most {value}, chosen each round" if tree.adaptive else value


def change_setting(conversation: Conversation, argument: str) -> str:
    """Change one setting, `NAME VALUE`; VALUE `default` takes the choice back. Returns the sentence to show.

    Raises UsageError for an unknown name, a missing value and a value out of range, which it names.
    """
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    name, value = name.lower().replace("_", "-"), value.strip().lower()
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no setting {name}", f"{guess}/set lists them")
    if not value:
        raise UsageError(f"a value for {name} is missing", f"use /set {name} VALUE, or /set to list all")
    if name in SWITCHES:
        _switch(conversation, name, value)
    elif name in SHAPE:
        shape = _reshape(conversation, name, value)
        if shape.adaptive:
            value = _shown(shape, name)
    else:
        parsed = None if value == "default" else _number(name, value)
        conversation.choices = replace(conversation.choices, **{name.replace("-", "_"): parsed})
        value = _value_of(conversation, name)
    return f"{name} is {value}"


def _switch(conversation: Conversation, name: str, value: str) -> None:
    if value not in ("on", "off"):
        raise UsageError(f"{name} is {value!r}, which is no switch", f"use /set {name} on or /set {name} off")
    if name == "wrap":
        conversation.wrap = value == "on"
        return
    if value == "on" and conversation.runtime.tree is None:
        raise UsageError("there is no head to draft with", "start with --head, and without --no-spec")
    conversation.speculate = value == "on"


def _reshape(conversation: Conversation, name: str, value: str) -> TreeShape:
    """The shape from now on."""
    planned = conversation.runtime.tree
    if planned is None or conversation.runtime.head_name is None:
        raise UsageError(
            f"{name} shapes a tree, and there is no head to draft one",
            "start with --head, and without --no-spec",
        )
    shape = conversation.tree or planned
    given = {
        "depth": shape.depth,
        "branching": shape.branching,
        "nodes": 0 if shape.adaptive else shape.nodes,
    }
    if value == "default":
        given[name] = 0 if name == "nodes" and planned.adaptive else getattr(planned, name)
    else:
        given[name] = _number(name, value)
    if given["nodes"] == 0 and not planned.adaptive:
        raise UsageError("the tree was not started adaptive", "start with --nodes 0 to have its size chosen")
    make = tree_shape if planned.adaptive else TreeShape  # 0 nodes are offered where they can be had
    shape = make(given["depth"], given["branching"], given["nodes"])
    conversation.runtime.engine.check_shape(shape)  # slots were reserved when memory was planned
    conversation.tree = shape
    return shape


def _number(name: str, value: str) -> Any:
    kind = NUMBERS.get(name, int)
    try:
        return kind(value)
    except ValueError as problem:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(
            f"{name} is {value!r}, which is not {what}", f"use /set {name} followed by {what}"
        ) from problem
