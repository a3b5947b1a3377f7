"""The best token is found through the upper bits of the output matrix, and is the one that all logits give."""

from __future__ import annotations

import numpy as np
import pytest
from native_toys import H, V, needs_native, store, toy

from treeeagle_edge.kernels.native.reading import View
from treeeagle_edge.kernels.native.team import Team

pytestmark = needs_native

BLOCKS = H // 32


def stored(quants: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks of Q8_0 from int8 [n, H] and scales [n, H / 32]."""
    parts = scales.astype(np.float16)[..., None].view(np.uint8), quants.reshape(-1, BLOCKS, 32).view(np.uint8)
    return np.ascontiguousarray(np.concatenate(parts, axis=2).reshape(len(quants), -1))


def output_matrix(case: str, hidden: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of Q8_0 [n, H] that make it hard to tell the best token from the upper six bits of each weight."""
    quants = rng.integers(-128, 128, (n, H)).astype(np.int8)
    scales = np.full((n, BLOCKS), 0.01)
    base = np.broadcast_to(quants[0], quants.shape)
    low = rng.integers(0, 4, (n, H)).astype(np.int8)
    match case:
        case "one stands out":  # the usual case: few others are computed
            quants //= 8
            quants[n // 2] = np.clip(hidden[0] / np.abs(hidden[0]).max() * 127, -127, 127)
        case "low bits":
            quants = base & ~3 | low
        case "best by its low bits alone":
            quants = base & ~3 | 1 + low % 2
            quants[n // 3] = base[0] & ~3 | np.where(hidden[0] > 0, 3, 0)
        case "best although its upper bits say less":  # by nearly all that the bound allows, in the first row
            up = np.sign(hidden[0]).astype(np.int8)
            best = np.clip(np.abs(base[0]), 4, 99) * up & ~3 | np.where(up > 0, 3, 0)
            steps = np.where(rng.permuted(np.tile(np.arange(H), (n, 1)), axis=1) < H // 2 - 1, 1, -1)
            quants = (best + steps * up).astype(np.int8)
            quants[n // 3 // 16 * 16 :][:16] = 0  # no other of its tile stands in for it
            quants[n // 3] = best
        case "equal":
            quants = base.copy()
        case "equal but for one step":
            quants = base.copy()
            quants[n // 2, 5] += 1 if hidden[0, 5] > 0 else -1
        case "two kinds":  # ties, of which the lower id is the best
            quants = np.where(rng.integers(0, 2, (n, 1)) == 0, base, base[:, ::-1])
        case "scales of all sizes":
            scales = 2.0 ** rng.uniform(-24, 15, (n, BLOCKS))
        case "tiny scales":
            scales = np.full_like(scales, 6e-8)
        case "huge scales":
            scales = np.full_like(scales, -65504.0)
        case "zeros":
            quants[:] = 0
        case "all below zero":
            quants = (-np.sign(hidden[:1]) * rng.integers(1, 128, (n, 1))).astype(np.int8)
        case _:
            assert case == "any"
    return stored(quants, scales)


CASES = [
    "any", "one stands out", "low bits", "best by its low bits alone", "best although its upper bits say less",
    "equal", "equal but for one step", "two kinds", "scales of all sizes", "tiny scales", "huge scales", "zeros",
    "all below zero",
]  # fmt: skip


def assert_best_is_that_of_all_logits(
    isa: str, threads: int, rows: int, vocabulary: int, case: str, norm: float, seed: int = 0
) -> np.ndarray:
    """Returns the logits.

    A new model each time, since one whose logits lie close together stops looking at the upper bits.
    """
    rng = np.random.default_rng(seed)
    it = toy(isa, threads, vocabulary=vocabulary)
    ids, slots = rng.integers(0, vocabulary, rows), np.arange(rows)
    view, at = View(slots[:0], slots), store()

    def hidden_states(final_norm: np.ndarray) -> np.ndarray:
        it.model.vector("final_norm", final_norm)
        return it.model.forward(
            ids, slots, slots, view, at, logit_rows=range(rows), logits=False
        ).hidden.copy()

    ones = np.ones_like(it.final_norm)
    alike = 1 / np.abs(hidden_states(ones)[0])  # makes the first row's activations all of one size
    hidden = hidden_states((alike if case.startswith("best") else it.final_norm) * np.float32(norm))
    matrix = output_matrix(case, np.nan_to_num(hidden), vocabulary, rng)
    it.model.matrix("lm_head", "q8", matrix)
    bare = it.model.forward(ids, slots, slots, view, at, logit_rows=range(rows), logits=False, best=True)
    best, peaks = bare.best.copy(), bare.peaks.copy()
    logits = it.model.forward(ids, slots, slots, view, at, logit_rows=range(rows)).logits.copy()
    np.testing.assert_array_equal(logits, Team(1, isa).matmul("q8", matrix, vocabulary, hidden))
    finite = np.isfinite(logits).all(1)
    np.testing.assert_array_equal(best[finite], logits.argmax(1)[finite])
    np.testing.assert_array_equal(peaks, np.where(finite, logits.max(1), np.nan))
    return logits


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vocabulary", [V, 1600])
def test_the_best_of_hard_matrices(isa: str, case: str, vocabulary: int) -> None:
    for threads, rows in ((1, 1), (2, 4), (3, 12), (2, 13)):
        logits = assert_best_is_that_of_all_logits(isa, threads, rows, vocabulary, case, 1.0)
        assert np.isfinite(logits).all()
        assert case != "all below zero" or logits[0].max() < 0
        assert case != "best although its upper bits say less" or logits[0].argmax() == vocabulary // 3


@pytest.mark.parametrize("norm", [0.0, 1e-44, 1e-38, 1e-30, 1e-10, 1e10, 1e30, 1e36, np.inf])
@pytest.mark.parametrize("case", ["any", "low bits", "scales of all sizes", "huge scales"])
def test_the_best_of_rows_of_any_size(isa: str, norm: float, case: str) -> None:
    logits = assert_best_is_that_of_all_logits(isa, 2, 4, V, case, norm)
    finite = np.isfinite(logits).all()
    assert finite or norm > 1e10
    assert not finite or norm < 1e36 or (norm == 1e36 and case != "huge scales")


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_random_matrices(isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case, rows = CASES[rng.integers(len(CASES))], int(rng.integers(1, 13))
    assert_best_is_that_of_all_logits(
        isa, 1 + seed % 3, rows, int(rng.integers(1, 400)), case, float(10.0 ** rng.uniform(-6, 6)), seed
    )


def test_passes_that_were_of_no_use_are_followed_by_some_without(isa: str) -> None:
    """Logits that lie close together, many passes: with the upper bits, then without them for a while, then again."""
    it, rng = toy(isa, 2, vocabulary=1600), np.random.default_rng(1)
    slots = np.arange(3)
    view, at = View(slots[:0], slots), store()
    it.model.matrix("lm_head", "q8", output_matrix("low bits", np.zeros((1, H)), 1600, rng))
    logits = it.model.forward(slots, slots, slots, view, at, logit_rows=range(3)).logits.copy()
    for _ in range(40):
        bare = it.model.forward(slots, slots, slots, view, at, logit_rows=range(3), logits=False, best=True)
        np.testing.assert_array_equal(bare.best, logits.argmax(1))
        np.testing.assert_array_equal(bare.peaks, logits.max(1))


def test_an_infinite_scale_spoils_every_row(isa: str) -> None:
    it, rng = toy(isa, 2), np.random.default_rng(2)
    slots = np.arange(4)
    view, at = View(slots[:0], slots), store()
    matrix = output_matrix("any", np.zeros((1, H)), V, rng)
    matrix[40, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    it.model.matrix("lm_head", "q8", matrix)
    bare = it.model.forward(slots, slots, slots, view, at, logit_rows=range(4), logits=False, best=True)
    assert np.isnan(bare.peaks).all()


def test_rows_of_the_embedding_are_whole(isa: str) -> None:
    it = toy(isa)
    np.testing.assert_array_equal(it.model.embed(np.arange(V)), it.embedding)
