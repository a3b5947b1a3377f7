"""`/tree`: the last round as a drawing. What was drafted, what was walked, and the token sampled at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wcwidth import wcswidth, wcwidth

from treeeagle_edge.rounds import Round
from treeeagle_edge.tree import DraftTree

LONGEST_LABEL = 24  # columns
GAP = 6  # columns between the drawing and the walk beside it
ELLIPSIS = "…"
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def label_of(text: str) -> str:
    """A token's text for a drawing: one leading space dropped, what cannot be seen escaped, never too long."""
    shown = text[1:] if len(text) > 1 and text[0] == " " and text.strip() else text.replace(" ", "␣")
    return clip("".join(_visible(char) for char in shown) or "∅", LONGEST_LABEL)


def _visible(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if wcwidth(char) < 0 or (wcwidth(char) == 0 and not char.isprintable()):
        return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
    return char


def width_of(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    return max(wcswidth(text), 0)


def clip(text: str, columns: int) -> str:
    """`text`, cut to `columns` with an ellipsis where it is wider."""
    if width_of(text) <= columns:
        return text
    kept = ""
    for char in text:
        if width_of(kept + char) > columns - 1:
            break
        kept += char
    return kept + ELLIPSIS


@dataclass(frozen=True)
class _Node:
    label: str
    children: tuple[_Node, ...]


def draw_round(step: Round, number: int, text_of: Callable[[int], str], width: int) -> list[str]:
    """Lines of at most `width` columns: a headline, then the tree with the walk beside or below it.

    number: which round of the answer it is, from 1. text_of: token id -> its text, special tokens included.
    """
    tree = step.tree
    if tree is None or tree.num_nodes == 0:
        plain = f"round {number} · decoded plainly → {label_of(text_of(step.next_token))}"
        return [clip(plain, width)]
    root = label_of(text_of(tree.tokens[0]))
    found = f", {tree.looked_up} of them looked up" if tree.looked_up else ""
    head = f"round {number} · {tree.num_nodes} nodes{found} · walked {step.accepted} · after {root}"
    drawing = list(_draw(_children(tree, 0, text_of)))
    walk = _walk(tree, step.walked, step.next_token, text_of)
    if width_of(drawing[0]) + GAP + width_of(walk) <= width:
        drawing[0] += " " * GAP + walk
    else:
        drawing.append(walk)
    return [clip(line, width) for line in (head, *drawing)]


def _walk(tree: DraftTree, walked: Sequence[int], next_token: int, text_of: Callable[[int], str]) -> str:
    steps = [f"✓ {label_of(text_of(tree.tokens[row]))}" for row in walked if row != 0]
    return " ".join([*steps, f"→ {label_of(text_of(next_token))}"])


def _children(tree: DraftTree, row: int, text_of: Callable[[int], str]) -> tuple[_Node, ...]:
    rows = sorted(tree.children[row].values(), key=lambda child: (-tree.log_probs[child], child))
    return tuple(
        _Node(label_of(text_of(tree.tokens[child])), _children(tree, child, text_of)) for child in rows
    )


def _draw(siblings: Sequence[_Node]) -> Iterator[str]:
    """Rows of the nodes beside each other: the first child on its parent's row, the others below it."""
    for index, node in enumerate(siblings):
        last = index == len(siblings) - 1
        if len(siblings) == 1:
            first, rest = " ", " "
        elif index == 0:
            first, rest = "─┬─ ", " │  "
        else:
            first, rest = (" └─ ", "    ") if last else (" ├─ ", " │  ")
        yield from _draw_node(node, first, rest)


def _draw_node(node: _Node, first: str, rest: str) -> Iterator[str]:
    indent = rest + " " * (width_of(node.label) + 1)
    if not node.children:
        yield first + node.label
        return
    only = node.children[0] if len(node.children) == 1 else None
    lines = list(_draw_node(only, "── ", "   ") if only else _draw(node.children))
    yield first + node.label + " " + lines[0]
    for line in lines[1:]:
        yield indent + line
