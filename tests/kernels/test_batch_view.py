"""Rows of separate sequences in one pass: each gets what it would get alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_toys import SLOTS, needs_native, store, toy
from tiny_models import tiny_target

from treeeagle_edge.kernels.native.library import NativeError
from treeeagle_edge.kernels.native.reading import Lists, View
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv.store import KVStore

LENGTH = 16  # slots of each sequence
IDS = [[5, 9, 2, 30], [7, 1], [11, 12, 13, 14, 15, 16, 17]]


@needs_native
def test_native_sequences_side_by_side_have_the_bits_they_have_alone() -> None:
    model = toy("", 2).model
    together, alone = store(), store()
    for row, ids in enumerate(IDS):
        for at, token in enumerate(ids[:-1]):
            for one in (together, alone):
                _one(model, token, at, row * LENGTH, one)
    lengths = np.array([len(ids) for ids in IDS])
    first = np.arange(len(IDS)) * LENGTH
    lists = Lists((first[:, None] + np.arange(LENGTH)).astype(np.int32), lengths.astype(np.int32))
    last = np.array([ids[-1] for ids in IDS])
    out = model.forward(
        last, lengths - 1, first + lengths - 1, lists, together, logit_rows=np.arange(len(IDS))
    )
    got = out.logits.copy()
    for row, ids in enumerate(IDS):
        assert np.array_equal(got[row], _one(model, ids[-1], len(ids) - 1, row * LENGTH, alone))


def _one(model, token: int, at: int, first: int, keys):
    slots = np.arange(first, first + at + 1)
    out = model.forward(
        np.array([token]),
        np.array([at]),
        slots[-1:],
        View(slots[:-1], slots[-1:]),
        keys,
        logit_rows=np.arange(1),
    )
    return out.logits[0].copy()


@needs_native
@pytest.mark.parametrize(
    ("slots", "counts", "sentence"),
    [
        ([[0, SLOTS]], [2], "own"),
        ([[0, -1]], [2], "own"),
        ([[0, 1]], [3], "own_counts"),
        ([[0, 1]], [0], "reads nothing"),
    ],
)
def test_native_lists_are_checked(slots: list[list[int]], counts: list[int], sentence: str) -> None:
    lists = Lists(np.array(slots, np.int32), np.array(counts, np.int32))
    with pytest.raises(NativeError, match=sentence):
        toy("").model.forward(
            np.array([1]), np.array([0]), np.array([0]), lists, store(), logit_rows=np.arange(1)
        )


def test_torch_sequences_side_by_side_equal_each_alone() -> None:
    target = tiny_target()
    config = target.config

    def empty() -> KVStore:
        return KVStore.allocate(
            config.num_layers,
            len(IDS) * LENGTH,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            target.device,
        )

    alone, together = empty(), empty()
    expected = []
    for row, ids in enumerate(IDS):
        slots = torch.arange(len(ids)) + row * LENGTH
        view = AttentionView(slots[:0], slots, torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
        out = target.forward(torch.tensor(ids), torch.arange(len(ids)), slots, view, alone, (2, 6))
        expected.append((out.logits[-1], out.features[-1]))
    first = torch.arange(len(IDS)) * LENGTH
    for step in range(max(map(len, IDS))):
        rows = torch.tensor([row for row, ids in enumerate(IDS) if step < len(ids)])
        tokens = torch.tensor([IDS[row][step] for row in rows])
        at = torch.full_like(rows, step)
        out = target.forward(tokens, at, first[rows] + step, BatchView(first[rows], at + 1), together, (2, 6))
        for place, row in enumerate(rows.tolist()):
            if step == len(IDS[row]) - 1:
                torch.testing.assert_close(out.logits[place], expected[row][0], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(out.features[place], expected[row][1], rtol=1e-4, atol=1e-4)
