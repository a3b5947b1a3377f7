"""DraftTree: parents before children, ancestors and children derived from them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from treeeagle_edge.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(1, 24))
    parents = [-1] + [draw(st.integers(0, row - 1)) for row in range(1, size)]
    depths = [0] * size
    for row in range(1, size):
        depths[row] = depths[parents[row]] + 1
    return DraftTree(tuple(range(size)), tuple(parents), tuple(depths), (0.0,) * size)


@given(trees())
def test_ancestors_lead_from_the_root_to_the_row(tree: DraftTree) -> None:
    for row, path in enumerate(tree.ancestors):
        assert path[0] == 0
        assert path[-1] == row
        assert len(path) == tree.depths[row] + 1
        assert all(tree.parents[child] == parent for parent, child in pairwise(path))


@given(trees())
def test_children_are_the_inverse_of_parents(tree: DraftTree) -> None:
    edges = {(parent, row) for parent, table in enumerate(tree.children) for row in table.values()}
    assert edges == {(parent, row) for row, parent in enumerate(tree.parents) if parent >= 0}


def test_root_only_is_plain_decoding() -> None:
    tree = DraftTree.root_only(7)
    assert (len(tree), tree.num_nodes, tree.ancestors, tree.children) == (1, 0, ((0,),), ({},))
