"""The draft head, one call a level: close to numpy, the same bits for any batch, the right top candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_toys import DIM, EPS, HEAD_HEADS, SLOTS, TAPS, VD, H, V, needs_native, toy_head
from numpy_reference import layer_body, project, rms_norm

from treeeagle_edge.kernels.native.head import Head
from treeeagle_edge.kernels.native.reading import Store, View

pytestmark = needs_native


def log_softmax(x: Any) -> Any:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize(("before_residual", "norm_output"), [(False, False), (True, False), (False, True)])
def test_close_to_numpy(isa: str, before_residual: bool, norm_output: bool) -> None:
    it = toy_head(isa, before_residual=before_residual, norm_output=norm_output)
    m, rng = 9, np.random.default_rng(1)
    tokens, slots = rng.integers(0, V, m), rng.permutation(SLOTS)[:m].astype(np.int64)
    features = rng.standard_normal((m, TAPS * H)).astype(np.float32)
    scored = np.array([m - 1, 2])
    state, log_probs, found = it.head.step(
        tokens, np.arange(m), slots, View(slots[:0], slots), Store.allocate(1, SLOTS, HEAD_HEADS, DIM),
        features=features, scored_rows=scored, top=7,
    )  # fmt: skip
    x = project(features, it.fc)
    normed = rms_norm(x, it.vectors["hidden_norm"], EPS)
    entry = np.concatenate(
        (rms_norm(it.target.embedding[tokens], it.vectors["attention_norm"], EPS), normed), 1
    )
    keys, values = (np.zeros((SLOTS, HEAD_HEADS, DIM), np.float32) for _ in range(2))
    x = layer_body(
        it.spec, entry, normed if before_residual else x, keys, values, slots,
        [slots[: r + 1].tolist() for r in range(m)], it.target.cos[:m], it.target.sin[:m],
        heads=HEAD_HEADS, kv_heads=HEAD_HEADS, dim=DIM, eps=EPS, residual=1.0,
    )  # fmt: skip
    final = rms_norm(x, it.vectors["final_norm"], EPS)
    expected = final if norm_output else x
    assert np.linalg.norm(state - expected) <= 4e-3 * np.linalg.norm(expected)
    table = log_softmax(project(final[scored], it.lm_head))
    order = np.argsort(-table, 1)[:, :7]
    np.testing.assert_allclose(log_probs, np.take_along_axis(table, order, 1), atol=0.03)
    assert (np.diff(log_probs, axis=1) <= 0).all()
    for row, ids in enumerate(found):
        near = [int(np.flatnonzero(it.ids == i)[0]) for i in ids]
        np.testing.assert_allclose(log_probs[row], table[row, near], atol=0.03)


def test_levels_give_the_bits_of_single_rows(isa: str) -> None:
    one, two = toy_head(isa, 1), toy_head(isa, 2)
    rng = np.random.default_rng(2)
    prompt, width = 70, 8
    slots = rng.permutation(SLOTS).astype(np.int64)
    features = rng.standard_normal((prompt, TAPS * H)).astype(np.float32)
    tokens = rng.integers(0, V, prompt)
    none = np.zeros(0, np.int64)

    def fill(head: Head, step: int) -> Store:
        at = Store.allocate(1, SLOTS, HEAD_HEADS, DIM)
        for begin in range(0, prompt, step):
            span = np.arange(begin, min(begin + step, prompt))
            head.step(
                tokens[span], span, slots[span], View(slots[:begin], slots[span]), at,
                features=features[span], scored_rows=none, top=1,
            )  # fmt: skip
        return at

    level, level_slots = rng.integers(0, V, width), slots[prompt : prompt + width]
    hidden = rng.standard_normal((width, H)).astype(np.float32)
    together = two.head.step(
        level, np.full(width, prompt), level_slots,
        View(slots[:prompt], level_slots, np.eye(width, dtype=bool)), fill(two.head, 32),
        hidden=hidden, scored_rows=np.arange(width), top=5,
    )  # fmt: skip
    alone_store = fill(one.head, 1)
    for r in range(width):
        alone = one.head.step(
            level[r : r + 1], np.array([prompt]), level_slots[r : r + 1],
            View(slots[:prompt], level_slots[r : r + 1]), alone_store,
            hidden=hidden[r : r + 1], scored_rows=np.zeros(1, np.int64), top=5,
        )  # fmt: skip
        for batch, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(batch[r], single[0])


def test_equal_scores_keep_the_lower_id_first(isa: str) -> None:
    it = toy_head(isa)
    it.head.matrix("lm_head", "q8", np.zeros((VD, H), np.float32))
    _, log_probs, found = it.head.step(
        np.array([1]), np.array([0]), np.array([0]), View(np.zeros(0, np.int64), np.array([0])),
        Store.allocate(1, SLOTS, HEAD_HEADS, DIM), hidden=np.ones((1, H), np.float32),
        scored_rows=np.array([0]), top=VD,
    )  # fmt: skip
    np.testing.assert_array_equal(found[0], it.ids)
    np.testing.assert_allclose(log_probs, -np.log(VD), rtol=1e-6)
