"""The whole decoder in one call: close to numpy; a row's bits are those of plain decoding in any pass."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from native_toys import DIM, EPS, HEADS, KV, LAYERS, SLOTS, H, V, causal, needs_native, store, toy
from numpy_reference import layer_body, project, rms_norm

from treeeagle_edge.kernels.native.reading import View

pytestmark = needs_native


@pytest.mark.parametrize("fmt", ["q8", "q4_0", "q4_1"])
@pytest.mark.parametrize("extras", [False, True])
def test_close_to_numpy(isa: str, fmt: str, extras: bool) -> None:
    it = toy(isa, fmt=fmt, extras=extras)
    m, rng = 20, np.random.default_rng(1)
    ids = rng.integers(0, V, m)
    slots = rng.permutation(SLOTS)[:m].astype(np.int64)
    taps = np.array([0, 1, LAYERS])
    out = it.model.forward(
        ids,
        np.arange(m),
        slots,
        View(slots[:0], slots),
        store(),
        logit_rows=np.array([m - 1, 0, 5]),
        taps=taps,
        best=True,
    )
    x, states = it.embedding[ids] * np.float32(it.scales[0]), []
    lists = [slots[: r + 1].tolist() for r in range(m)]
    for spec in it.layers:
        states.append(x)
        keys, values = (np.zeros((SLOTS, KV, DIM), np.float32) for _ in range(2))
        entry = rms_norm(x, spec.vectors["attention_norm"], EPS)
        x = layer_body(
            spec, entry, x, keys, values, slots, lists, it.cos[:m], it.sin[:m],
            heads=HEADS, kv_heads=KV, dim=DIM, eps=EPS, residual=it.scales[1],
        )  # fmt: skip
    states.append(rms_norm(x, it.final_norm, EPS))
    hidden = rms_norm(x[[m - 1, 0, 5]], it.final_norm, EPS)
    logits = project(hidden * np.float32(it.scales[2]), it.embedding)
    # an activation at a rounding border may fall to either side: a step of int8 in one of few inputs
    for got, expected in (
        (out.hidden, hidden),
        (out.logits, logits),
        (out.features, np.concatenate([states[t] for t in taps], 1)),
    ):
        assert np.linalg.norm(got - expected) <= 4e-3 * np.linalg.norm(expected)
    np.testing.assert_array_equal(out.best, out.logits.argmax(1))


@pytest.mark.parametrize("fmt", ["q8", "q4_1"])
def test_prefill_in_any_chunks_on_any_threads(isa: str, fmt: str) -> None:
    ids = np.random.default_rng(2).integers(0, V, 60)
    slots = np.random.default_rng(3).permutation(SLOTS)[:60].astype(np.int64)
    one, three = toy(isa, 1, fmt=fmt, extras=True), toy(isa, 3, fmt=fmt, extras=True)
    alone = causal(one.model, ids, store(), slots, tuple(range(1, 60)))
    for cuts in ((), (1,), (7, 8, 31), (59,)):
        np.testing.assert_array_equal(causal(three.model, ids, store(), slots, cuts), alone)


def test_parents_say_the_same_as_a_mask(isa: str) -> None:
    it, rng = toy(isa, 2), np.random.default_rng(6)
    prompt, nodes, asking = 61, 24, 9  # as in drafting, the last rows ask and the others were written before
    slots = rng.permutation(SLOTS).astype(np.int64)
    ids = rng.integers(0, V, prompt + nodes)
    parents = np.array([-1, *(int(rng.integers(-1, r)) for r in range(1, nodes))], np.int32)
    visible = np.eye(nodes, dtype=bool)
    for r in range(nodes):
        if parents[r] >= 0:
            visible[r] |= visible[parents[r]]
    node_slots = slots[prompt : prompt + nodes]
    found = []
    for tail in ({"visible": visible}, {"parents": parents}):
        shared = store()
        causal(it.model, ids[:prompt], shared, slots)
        for first in (0, nodes - asking):
            at = slice(first, nodes)
            view = {key: value[at] if key == "visible" else value for key, value in tail.items()}
            got = it.model.forward(
                ids[prompt:][at], prompt - 1 + visible.sum(1)[at], node_slots[at],
                View(slots[:prompt], node_slots, **view), shared, logit_rows=range(nodes - first),
            )  # fmt: skip
            found.append(got.logits.copy())
    np.testing.assert_array_equal(found[2], found[0])
    np.testing.assert_array_equal(found[3], found[1])


def test_peaks_are_the_largest_logits_and_nan_where_a_row_is_not_finite(isa: str) -> None:
    it, m = toy(isa, 2), 5
    ids, slots = np.arange(m), np.arange(m)
    view, at = View(slots[:0], slots), store()
    out = it.model.forward(ids, slots, slots, view, at, logit_rows=range(m), best=True)
    np.testing.assert_array_equal(out.best, out.logits.argmax(1))
    np.testing.assert_array_equal(out.peaks, out.logits.max(1))
    it.model.vector("final_norm", np.full(it.final_norm.shape, np.inf, np.float32))
    spoilt = it.model.forward(ids, slots, slots, view, at, logit_rows=range(m), best=True)
    assert np.isnan(spoilt.peaks).all()


def output_matrix(case: str, hidden: np.ndarray, vocabulary: int) -> np.ndarray:
    """fp32 rows, or blocks of Q8_0, whose logits are what `case` says."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((vocabulary, H)).astype(np.float32)
    if case == "ties":  # every logit many times over
        return rows[rng.integers(0, min(3, vocabulary), vocabulary)]
    if case == "all equal":
        return np.zeros_like(rows)
    if case == "all negative":  # in the first row: what fills up the last tile must not count
        return -hidden[:1] * rng.uniform(0.5, 1.5, (vocabulary, 1)).astype(np.float32)
    if case == "infinite":  # a scale that a damaged file may hold; infinity of either sign, by the row
        blocks = gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
        blocks[vocabulary // 2, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
        return blocks
    return rows


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [5, 77, 1600])
@pytest.mark.parametrize("case", ["random", "ties", "all equal", "all negative", "infinite"])
def test_peaks_are_the_same_where_logits_go_nowhere(
    isa: str, threads: int, vocabulary: int, case: str
) -> None:
    it, m = toy(isa, threads, vocabulary=vocabulary), 19
    ids, slots = np.arange(m) % vocabulary, np.arange(m)
    view, at = View(slots[:0], slots), store()
    hidden = it.model.forward(ids, slots, slots, view, at, logit_rows=range(m), logits=False).hidden
    it.model.matrix("lm_head", "q8", output_matrix(case, hidden, vocabulary))
    for chosen in (range(m), [7], [3, 0, 3, 18]):
        full = it.model.forward(ids, slots, slots, view, at, logit_rows=chosen, best=True)
        logits, best, peaks = full.logits, full.best.copy(), full.peaks.copy()
        finite = np.isfinite(logits).all(1)
        np.testing.assert_array_equal(best[finite], logits.argmax(1)[finite])
        np.testing.assert_array_equal(peaks, np.where(finite, logits.max(1), np.nan))
        for _ in range(5 if threads > 1 else 1):  # threads divide the tiles differently each time
            full.best[:], full.peaks[:] = -1, -1
            bare = it.model.forward(ids, slots, slots, view, at, logit_rows=chosen, logits=False, best=True)
            assert bare.logits is None
            np.testing.assert_array_equal(bare.best, best)
            np.testing.assert_array_equal(bare.peaks, peaks)
        if len(chosen) == m:
            assert finite.all() == (case != "infinite")
            assert np.isneginf(logits.min(1)).any() == (case == "infinite")
            assert case != "all negative" or peaks[0] < 0


@pytest.mark.parametrize(
    ("prompt", "nodes"),
    [(61, 24), (61, 12), (125, 12), (125, 24)],
    ids=["block", "block, few rows", "chunk, few rows", "chunk"],
)
def test_a_tree_gives_the_logits_and_features_of_plain_decoding(isa: str, prompt: int, nodes: int) -> None:
    """The tree crosses the border of a block of 64 positions, or of a chunk of 128."""
    it = toy(isa, 2)
    rng = np.random.default_rng(4)
    slots = rng.permutation(SLOTS).astype(np.int64)
    ids = rng.integers(0, V, prompt + nodes)
    parents = [-1, *(int(rng.integers(0, r)) for r in range(1, nodes))]
    visible = np.eye(nodes, dtype=bool)
    for r in range(1, nodes):
        visible[r] |= visible[parents[r]]
    positions = prompt - 1 + visible.sum(1)
    shared = store()
    pieces = tuple(range(50, prompt - 11, 50))
    causal(it.model, ids[:prompt], shared, slots, pieces)
    node_slots = slots[prompt : prompt + nodes]
    taps = np.array([1, 2])
    got = it.model.forward(
        ids[prompt:], positions, node_slots, View(slots[:prompt], node_slots, visible), shared,
        logit_rows=np.arange(nodes), taps=taps,
    )  # fmt: skip
    logits, features = (x.copy() for x in (got.logits, got.features))
    for r in range(nodes):
        path = np.flatnonzero(visible[r])
        text = np.concatenate((ids[:prompt], ids[prompt + path]))
        fresh, order = store(), np.arange(len(text))
        causal(it.model, text[:-1], fresh, order, (*pieces, *range(prompt - 11, len(text) - 1, 3)))
        last = order[-1:]
        plain = it.model.forward(
            text[-1:],
            last,
            last,
            View(order[:-1], last),
            fresh,
            logit_rows=np.zeros(1, np.int64),
            taps=taps,
        )
        np.testing.assert_array_equal(logits[r], plain.logits[0])
        np.testing.assert_array_equal(features[r], plain.features[0])
