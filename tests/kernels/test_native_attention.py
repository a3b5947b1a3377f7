"""Attention over slot lists: close to numpy; bits depend on what a row reads, not where the prefix ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_toys import needs_native
from numpy_reference import attention, bf16_bits

from treeeagle_edge.kernels.native.reading import Store, View
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

SLOTS = 400


def make(heads: int, kv_heads: int, dim: int, rows: int, seed: int = 0) -> tuple[Any, Any, Any, Store]:
    """query [rows, heads, dim], keys, values [SLOTS, kv_heads, dim] in fp32, and their store."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((SLOTS, kv_heads, dim)).astype(np.float32) for _ in range(2))
    keys, values = bf16_bits(k), bf16_bits(v)
    return q, k, v, Store(keys.ctypes.data, values.ctypes.data, SLOTS, kv_heads, keep=(keys, values))


def plain(team: Team, query: Any, reads: list[int], store: Store) -> Any:
    """One row that finds everything but its last slot in the prefix."""
    slots = np.array(reads, np.int64)
    return team.attention(query[None], View(slots[:-1], slots[-1:]), store)[0]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 32), (9, 3, 64), (4, 1, 96), (16, 2, 128)])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_close_to_numpy(isa: str, heads: int, kv_heads: int, dim: int, length: int) -> None:
    q, k, v, store = make(heads, kv_heads, dim, 1)
    reads = np.random.default_rng(length).permutation(SLOTS)[:length].tolist()
    got = plain(Team(1, isa), q[0], reads, store)
    expected = attention((q / np.sqrt(dim)).astype(np.float32), k, v, [reads])[0]
    assert np.abs(got - expected).max() <= 4e-3 * np.abs(v).max()  # weights are rounded to bf16


def random_tree(rows: int, rng: np.random.Generator) -> Any:
    """visible [rows, rows] of a random tree, parents before children."""
    visible = np.eye(rows, dtype=bool)
    for r in range(1, rows):
        visible[r] |= visible[rng.integers(0, r)]
    return visible


@pytest.mark.parametrize("prefix", [0, 1, 15, 47, 60, 63, 64, 100, 190])
def test_a_node_gets_the_bits_of_plain_decoding(isa: str, prefix: int) -> None:
    rows = 40
    q, _, _, store = make(9, 3, 64, rows)
    rng = np.random.default_rng(prefix)
    slots = rng.permutation(SLOTS)[: prefix + rows].astype(np.int64)
    visible = random_tree(rows, rng)
    team = Team(1, isa)
    got = team.attention(q, View(slots[:prefix], slots[prefix:], visible), store)
    for r in range(rows):
        reads = slots[:prefix].tolist() + slots[prefix:][visible[r]].tolist()
        np.testing.assert_array_equal(got[r], plain(team, q[r], reads, store))


def test_a_causal_chunk_may_be_cut_anywhere(isa: str) -> None:
    total = 150
    q, _, _, store = make(4, 2, 32, total)
    slots = np.random.default_rng(5).permutation(SLOTS)[:total].astype(np.int64)
    team = Team(1, isa)
    whole = team.attention(q, View(slots[:0], slots), store)
    for cut in (1, 17, 64, 100, 149):
        tail = team.attention(np.ascontiguousarray(q[cut:]), View(slots[:cut], slots[cut:]), store)
        np.testing.assert_array_equal(tail, whole[cut:])


def test_huge_scores_stay_finite(isa: str) -> None:
    q, _, _, store = make(2, 1, 32, 1)
    out = plain(Team(1, isa), q[0] * 1e4, list(range(200)), store)
    assert np.isfinite(out).all()
