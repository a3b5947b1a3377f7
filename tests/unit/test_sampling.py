"""The walk: exact distribution, exact penalties, and noise that belongs to a position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from treeeagle_edge.errors import CannotRunError, InputError, UsageError
from treeeagle_edge.sampling import Sampler, choose_token, draw, gumbel, random_numbers
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

CPU = torch.device("cpu")
VOCAB = 12
# root 0 with four drafted children, the second of which has three children, one of which has two
TREE = DraftTree(
    tokens=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    parents=(-1, 0, 0, 0, 0, 2, 2, 2, 6, 6),
    depths=(0, 1, 1, 1, 1, 2, 2, 2, 3, 3),
    log_probs=(0.0,) * 10,
)


def toy_logits(seed: int = 0) -> torch.Tensor:
    """[rows, VOCAB]: one fixed target distribution a row, likely enough at drafted children that walks go deep."""
    logits = torch.randn(len(TREE), VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    logits[0, 2] += 2.0
    logits[2, 6] += 2.0
    return logits


def walk(
    params: SamplingParams,
    logits: torch.Tensor,
    tree: DraftTree = TREE,
    prompt: tuple[int, ...] = (0,),
    at: int = 0,
):
    return Sampler(params, prompt, logits.shape[-1], CPU).walk(tree, logits, at)


@pytest.mark.parametrize(
    ("settings", "draws"),
    [
        ({"temperature": 1.0}, 50_000),
        ({"temperature": 1.3, "top_k": 9, "top_p": 0.9}, 50_000),
        ({"temperature": 0.8, "min_p": 0.08}, 10_000),
    ],
    ids=["plain", "top-k-top-p", "min-p"],
)
def test_walks_draw_from_the_exact_softmax_at_every_depth(
    settings: dict[str, float], draws: int, one_thread: None
) -> None:
    """Expectations row 8: 50,000 draws against the exact processed softmax, siblings and depths included."""
    logits = toy_logits()
    counts = np.zeros((len(TREE), VOCAB))
    for seed in range(draws):
        outcome = walk(SamplingParams(**settings, seed=seed), logits)  # type: ignore[arg-type]
        for row, child in zip(outcome.rows, outcome.rows[1:], strict=False):
            counts[row, TREE.tokens[child]] += 1
        counts[outcome.rows[-1], outcome.next_token] += 1
    for row in (0, 2, 6):  # depths 0, 1 and 2, with four, three and two siblings
        expected = exact_distribution(logits[row].double().numpy(), **settings) * counts[row].sum()
        kept = expected > 0
        assert counts[row].sum() > draws / 25
        assert counts[row][~kept].sum() == 0
        assert stats.chisquare(counts[row][kept], expected[kept]).pvalue > 1e-3


def exact_distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The definition, written apart from the sampler: sort, cut, renormalise."""
    probs = np.exp(logits / temperature)
    order = np.argsort(-probs)
    keep = np.ones(len(probs), dtype=bool)
    if top_k:
        keep[order[top_k:]] = False
    probs = np.where(keep, probs, 0.0) / probs[keep].sum()
    if top_p < 1.0:
        before = np.cumsum(probs[order]) - probs[order]
        keep[order[before >= top_p]] = False
    if min_p:
        keep &= probs >= min_p * probs.max()
    probs = np.where(keep, probs, 0.0)
    return probs / probs.sum()


@given(seed=st.integers(0, 2**62), at=st.integers(0, 10_000), temperature=st.floats(0.1, 3.0))
def test_a_seed_gives_the_same_tokens_with_any_tree_and_without(
    seed: int, at: int, temperature: float
) -> None:
    """Expectations row 17: noise belongs to (seed, position, token), so a discarded suffix changes nothing."""
    params = SamplingParams(temperature=temperature, seed=seed)
    logits = toy_logits(seed % 7)
    outcome = walk(params, logits, at=at)
    tokens = [TREE.tokens[row] for row in outcome.rows[1:]] + [outcome.next_token]
    for step, row in enumerate(outcome.rows):
        alone = walk(params, logits[row : row + 1], DraftTree.root_only(TREE.tokens[row]), at=at + step)
        assert alone.next_token == tokens[step]


def test_noise_is_gumbel_and_does_not_depend_on_the_vocabulary() -> None:
    noise = gumbel(random_numbers(3, 5, 20_000))
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert np.array_equal(noise[:100], gumbel(random_numbers(3, 5, 100)))
    assert not np.array_equal(noise[:100], gumbel(random_numbers(3, 6, 100)))
    assert not np.array_equal(noise[:100], gumbel(random_numbers(4, 5, 100)))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 40.0])
@pytest.mark.parametrize("left", [1, 7, 5000])
def test_a_draw_is_the_largest_of_scores_and_noise(spread: float, left: int) -> None:
    """Though the noise of most tokens is never worked out, and whatever was excluded."""
    generator = np.random.default_rng(left)
    for position in range(50):
        scores = (spread * generator.standard_normal(5000)).astype(np.float32)
        scores[generator.permutation(5000)[left:]] = -np.inf
        noisy = scores.astype(np.float64) + gumbel(random_numbers(9, position, 5000))
        assert draw(scores, 9, position) == noisy.argmax()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_in_a_tree_equal_plain_decoding(temperature: float) -> None:
    """Expectations row 10: a node's context is prompt + its path, so penalties are exact inside a tree."""
    params = SamplingParams(
        temperature=temperature, seed=11, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    )
    # next-token logits by last token
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 2

    def decode(depth: int) -> list[int]:
        """Complete trees of `depth` levels over a Markov target; depth 0 is plain decoding."""
        sampler, text = Sampler(params, (1, 2), VOCAB, CPU), [2]
        while len(text) < 25:
            tokens, parents, depths = [text[-1]], [-1], [0]
            for row in (r for r in range(VOCAB**depth) if depth):
                if row < len(tokens) and depths[row] < depth:
                    tokens += range(VOCAB)
                    parents += [row] * VOCAB
                    depths += [depths[row] + 1] * VOCAB
            tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens))
            outcome = sampler.walk(tree, table[list(tokens)], len(text))
            text += [tree.tokens[row] for row in outcome.rows[1:]] + [outcome.next_token]
        return text[:25]

    assert decode(2) == decode(1) == decode(0)


def test_temperature_acts_while_verifying() -> None:
    """Expectations row 9: verification uses the processors of plain decoding; near temperature 0 the mode wins."""
    logits = toy_logits()
    cold = {walk(SamplingParams(temperature=0.01, seed=seed), logits).rows for seed in range(50)}
    hot = {walk(SamplingParams(temperature=5.0, seed=seed), logits).rows for seed in range(50)}
    assert len(cold) == 1
    assert len(hot) > 3


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-31, 1e-30])
def test_next_to_no_temperature_takes_the_likeliest_token(temperature: float) -> None:
    """Over 1e-39 every positive logit would be infinite, and the noise alone would decide."""
    logits = 50 * toy_logits()
    assert (logits > 0).sum() > len(logits)
    sampled = walk(SamplingParams(temperature=temperature, top_p=0.95, seed=5), logits)
    assert sampled == walk(SamplingParams(), logits)


def test_a_row_that_is_not_finite_is_a_rejected_branch() -> None:
    """Expectations row 6: NaN on any branch neither fails nor changes the text."""
    logits = toy_logits()
    clean = walk(SamplingParams(), logits)
    assert clean.rows == (0, 2, 6) or len(clean.rows) > 1
    for row in range(1, len(TREE)):
        for value in (float("nan"), float("inf")):
            broken = logits.clone()
            broken[row, 3] = value
            outcome = walk(SamplingParams(), broken)
            if row in clean.rows:
                step = clean.rows.index(row)
                assert outcome.rows == clean.rows[:step]
                assert outcome.next_token == TREE.tokens[row]
            else:
                assert outcome == clean


def test_a_root_that_is_not_finite_is_an_error() -> None:
    logits = toy_logits()
    logits[0, 0] = float("nan")
    with pytest.raises(CannotRunError, match="non-finite"):
        walk(SamplingParams(), logits)


@pytest.mark.parametrize("broken", [(), (2,), (6,), (3, 5)])
def test_peaks_alone_lead_a_greedy_walk_where_logits_would(broken: tuple[int, ...]) -> None:
    logits = toy_logits()
    logits[list(broken), 4] = float("nan")
    peaks = (logits.max(dim=1).values, logits.nan_to_num(nan=-9.0).argmax(dim=1))
    sampler = Sampler(SamplingParams(), (0,), VOCAB, CPU)
    assert sampler.walk(TREE, torch.empty(0, VOCAB), 0, peaks) == walk(SamplingParams(), logits)
    peaks[0][0] = float("nan")
    with pytest.raises(CannotRunError, match="the target gave non-finite logits"):
        sampler.walk(TREE, torch.empty(0, VOCAB), 0, peaks)


@pytest.mark.parametrize(
    ("settings", "alone"),
    [
        ({}, True),
        ({"top_k": 5, "top_p": 0.9, "seed": 3}, True),
        ({"temperature": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"banned_ids": frozenset({1})}, False),
    ],
)
def test_peaks_are_enough_where_nothing_changes_the_logits(settings: dict[str, Any], alone: bool) -> None:
    assert Sampler(SamplingParams(**settings), (0,), VOCAB, CPU).needs_peaks_only is alone


def test_bias_and_bans() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 3.0
    root = DraftTree.root_only(0)
    assert walk(SamplingParams(), logits, root).next_token == 4
    assert walk(SamplingParams(banned_ids=frozenset({4}), logit_bias={7: 1.0}), logits, root).next_token == 7
    with pytest.raises(InputError, match="token id 99"):
        walk(SamplingParams(logit_bias={99: 1.0}), logits, root)
    with pytest.raises(InputError, match="every token is banned"):
        walk(SamplingParams(banned_ids=frozenset(range(VOCAB))), logits, root)


@pytest.mark.parametrize(
    ("name", "value", "range_text"),
    [
        ("repetition_penalty", 0.0, "0.1 to 10"),
        ("repetition_penalty", float("nan"), "0.1 to 10"),
        ("temperature", -0.1, "0 to 10"),
        ("top_p", 1.5, "0 to 1"),
        ("top_p", 0.0, "above 0"),
        ("min_p", -1.0, "0 to 1"),
        ("presence_penalty", 3.0, "-2 to 2"),
        ("frequency_penalty", -3.0, "-2 to 2"),
        ("top_k", -1, "0 (off) or a positive number"),
        ("max_tokens", 0, "1 or more"),
        ("seed", -1, "0 to 2^63 - 1"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(name: str, value: float, range_text: str) -> None:
    """Expectations row 11: a repetition penalty of 0 would give inf; the allowed range is named."""
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert range_text in (caught.value.hint or "")


def test_nucleus_larger_than_the_first_guess() -> None:
    """Of a nearly flat distribution over 3,000 tokens the share that top-p names is kept."""
    scores = torch.linspace(0.0, 0.01, 3_000)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    drawn = np.array([choose_token(scores, params, position) for position in range(3_000)])
    kept = 3_000 - drawn.min()
    assert 2_680 < kept <= 2_700


def test_equal_scores_are_kept_together() -> None:
    for cuts in ({"top_k": 2}, {"top_p": 0.1}):
        params = SamplingParams(temperature=1.0, **cuts)
        assert {choose_token(torch.zeros(5), params, position) for position in range(100)} == set(range(5))


class Divisions(TorchDispatchMode):
    """Counts divisions; raises where a number of the host is divided by."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.div:
            assert isinstance(args[1], torch.Tensor), "CUDA would multiply with the reciprocal"
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_scores_are_divided_as_on_the_device() -> None:
    """There temperature and penalty are tensors, and both samplers give the same bits on a card, too."""
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3)
    with Divisions() as seen:
        walk(params, toy_logits(), prompt=(1, 2))
    assert seen.count >= 2
