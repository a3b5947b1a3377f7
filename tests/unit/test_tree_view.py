"""`/tree`: the drawing of a round."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeeagle_edge.cli.tree_view import clip, draw_round, label_of, width_of
from treeeagle_edge.rounds import Round
from treeeagle_edge.tree import DraftTree


def round_of(tree: DraftTree | None, walked=(0,), next_token=0, kind="tree") -> Round:
    nodes = tree.num_nodes if tree else 0
    return Round((next_token,), kind, nodes, len(walked) - 1, tree, tuple(walked), next_token, 0.0, 0.0, 0.0)


def drawn(words: list[str], parents: list[int], walked, after: str, width=100) -> list[str]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    table = [*words, after]
    tree = DraftTree(
        tuple(range(len(words))), tuple(parents), tuple(depths), tuple(-0.1 * i for i in range(len(words)))
    )
    return draw_round(round_of(tree, walked, len(words)), 53, lambda token: table[token], width)


def test_the_tree_of_the_manual():
    words = [" sky", " because", " of", " air", " the", " how", " molecules", " way"]
    assert drawn(words, [-1, 0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 4], " scattering") == [
        "round 53 · 7 nodes · walked 3 · after sky",
        " because ─┬─ of ─┬─ the ── way      ✓ because ✓ of ✓ the → scattering",
        "          │      └─ how",
        "          └─ air ── molecules",
    ]


def test_several_first_words_and_a_walk_that_stopped_at_once():
    assert drawn(["x", " a", " b", " c", "d"], [-1, 0, 0, 0, 2], [0], " z") == [
        "round 53 · 4 nodes · walked 0 · after x",
        "─┬─ a      → z",
        " ├─ b ── d",
        " └─ c",
    ]


def test_a_narrow_terminal_gets_the_walk_below():
    lines = drawn(["x", " first", " second", " third"], [-1, 0, 1, 2], [0, 1], " end", width=30)
    assert lines[1:] == [" first ── second ── third", "✓ first → end"]


def test_wide_characters_keep_their_columns():
    lines = drawn(["x", "漢字", "か", "👋"], [-1, 0, 1, 1], [0, 1], "e")
    assert lines[1].startswith(" 漢字 ─┬─ か")
    assert lines[2] == "       └─ 👋"
    assert width_of(lines[1].split("┬")[0]) == width_of(lines[2].split("└")[0])


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (" word", "word"),
        ("word", "word"),
        ("\n", "\\n"),
        ("\n\n", "\\n\\n"),
        (" ", "␣"),
        ("  ", "␣␣"),
        ("", "∅"),
        ("\t", "\\t"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u200b", "\\u200b"),
        ("<|im_end|>", "<|im_end|>"),
        ("\ufffd", "\ufffd"),
        ("a" * 40, "a" * 23 + "…"),
    ],
)
def test_a_token_is_shown_on_one_line(text, label):
    assert label_of(text) == label


def test_plain_rounds_say_so():
    lines = draw_round(round_of(DraftTree.root_only(3), kind="plain", next_token=1), 2, lambda _: " sky", 80)
    assert lines == ["round 2 · decoded plainly → sky"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.text(max_size=6)), min_size=1, max_size=24),
    st.integers(12, 120),
)
def test_any_tree_fits_its_lines(nodes, width):
    words = ["root", *(word for _, word in nodes)]
    parents = [-1, *(parent % (row + 1) for row, (parent, _) in enumerate(nodes))]
    lines = drawn(words, parents, [0], "end", width)
    assert all(width_of(line) <= width for line in lines)
    assert not any(char in line for line in lines for char in "\n\r\t\x1b")
    leaves = len(set(range(1, len(words))) - set(parents))
    assert len(lines) in (1 + leaves, 2 + leaves)


def test_clip_counts_columns():
    assert clip("漢字漢字", 5) == "漢字…"
    assert clip("abc", 3) == "abc"
