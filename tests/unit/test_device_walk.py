"""Walks in tensor operations take the tokens that the host's walks take, with the same noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_trees import device_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from no_waiting import NoWaiting
from torch import Tensor

from treeeagle_edge import sampling
from treeeagle_edge.device.noise import gumbel_noise
from treeeagle_edge.device.walk import DeviceSampler
from treeeagle_edge.errors import InputError
from treeeagle_edge.sampling import Sampler
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

CPU = torch.device("cpu")
VOCAB = 30
PROMPT = [3, 7, 7, 29, 0]
TREE = DraftTree(  # rows 2 and 4 are twins: a head whose draft tokens are not distinct would give such
    (5, 1, 2, 3, 2, 4, 1, 6, 2, 8),
    (-1, 0, 0, 0, 0, 1, 1, 5, 5, 4),
    (0, 1, 1, 1, 1, 2, 2, 3, 3, 2),
    (0.0,) * 10,
)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("vocab", [1, 4, 1001])
def test_noise_has_the_bits_of_the_host(seed: int, vocab: int) -> None:
    """Philox in signed words equals NumPy's; only the logarithm is another library's."""
    positions = [0, 1, 4095, 2**40]
    ours = gumbel_noise(torch.tensor([seed]), torch.tensor(positions), vocab).numpy()
    for line, position in zip(ours, positions, strict=True):
        np.testing.assert_allclose(
            line, sampling.gumbel(sampling.random_numbers(seed, position, vocab)), rtol=1e-13, atol=1e-15
        )


@pytest.mark.parametrize("vocab", [1, 7, 1001])
def test_noise_of_a_position_is_the_same_alone_and_among_others(vocab: int) -> None:
    seed, positions = torch.tensor([5]), torch.tensor([9, 2**40, 10, 0, 11])
    together = gumbel_noise(seed, positions, vocab)
    for line, position in zip(together, positions, strict=True):
        assert torch.equal(line, gumbel_noise(seed, position[None], vocab)[0])


def logits_of(seed: int, *, pull: float = 3.0) -> Tensor:
    """[N, VOCAB] where each row likes its children."""
    logits = torch.randn(len(TREE), VOCAB, generator=torch.Generator().manual_seed(seed))
    for row, parent in enumerate(TREE.parents):
        if parent >= 0:
            logits[parent, TREE.tokens[row]] += pull
    return logits


def assert_same_walks(params: SamplingParams, seeds: range) -> int:
    """Several walks one after another, so that penalties see what was taken before. Returns the nodes walked."""
    device = DeviceSampler(VOCAB, CPU)
    # what an answer before leaves must not matter
    device.load(replace(params, repetition_penalty=2.0), [1, 2])
    device.load(params, PROMPT)
    host = Sampler(params, PROMPT, VOCAB, CPU)
    walked = 0
    for seed in seeds:
        logits, spare = logits_of(seed), seed % 3
        expected = host.walk(TREE, logits, 10 * seed)
        wide = torch.cat((logits, torch.full((spare, VOCAB), 9.0)))
        ours = device.walk(device_tree(TREE, spare), wide, torch.tensor([10 * seed]))
        assert [row for row in ours.rows.tolist() if row >= 0] == list(expected.rows)
        assert int(ours.next_token) == expected.next_token
        assert bool(ours.root_is_finite)
        walked += len(expected.rows) - 1
    return walked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.9, "min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.1, "frequency_penalty": 0.7},
        {"temperature": 1.1, "repetition_penalty": 0.6, "presence_penalty": -0.5, "top_p": 0.9},
        {"banned_ids": frozenset({1, 4})},
        {"logit_bias": {2: 4.0, 8: -3.0}, "temperature": 0.7},
        {"temperature": 1.0, "top_k": VOCAB + 5},
        {"temperature": 2.0, "top_k": 1},
    ],
    ids=str,
)
def test_walks_of_the_host(options: dict[str, object]) -> None:
    """Expectations rows 4, 10 and 11: greedy and sampled, with every step of processing."""
    assert assert_same_walks(SamplingParams(seed=11, **options), range(60)) > 10  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.9]),
    top_k=st.integers(0, VOCAB),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    repetition=st.sampled_from([1.0, 1.2, 0.8]),
    frequency=st.sampled_from([0.0, 0.4]),
)
def test_any_mixture_walks_as_on_the_host(
    seed: int, temperature: float, top_k: int, top_p: float, repetition: float, frequency: float
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        seed=seed,
    )
    assert_same_walks(params, range(8))


def test_a_row_that_is_not_finite_is_not_entered() -> None:
    device = DeviceSampler(VOCAB, CPU)
    device.load(SamplingParams(), PROMPT)
    logits = logits_of(0, pull=20.0)
    logits[0, 1] += 40.0
    whole = device.walk(device_tree(TREE), logits, torch.tensor([9]))
    rows = [row for row in whole.rows.tolist() if row >= 0]
    assert len(rows) > 2
    logits[rows[2], 3] = math.nan
    short = device.walk(device_tree(TREE), logits, torch.tensor([9]))
    assert [row for row in short.rows.tolist() if row >= 0] == rows[:2]
    assert int(short.next_token) == TREE.tokens[rows[2]]
    logits[0, 0] = math.inf
    assert not device.walk(device_tree(TREE), logits, torch.tensor([9])).root_is_finite


def test_a_greedy_walk_takes_as_many_operations_in_a_deep_tree_as_in_a_flat_one() -> None:
    """Each is a launch on a card. Where sampling or penalties choose level by level, they grow with the depth."""
    counts: dict[bool, list[int]] = {True: [], False: []}
    for depth in (1, 15):
        rows = range(depth)
        chain = device_tree(DraftTree((0, *rows), (-1, *rows), (0, *(1 + row for row in rows)), (0.0,) * 16))
        for greedy in counts:
            device = DeviceSampler(VOCAB, CPU)
            device.load(SamplingParams(temperature=0.0 if greedy else 1.0), PROMPT)
            logits, place = torch.randn(depth + 1, VOCAB), torch.tensor([9])
            with NoWaiting() as guard:
                device.walk(chain, logits, place)
            counts[greedy].append(guard.operations)
    assert counts[True][0] == counts[True][1] < counts[False][0] < counts[False][1]


def test_ids_outside_the_vocabulary_are_refused_or_harmless() -> None:
    device = DeviceSampler(VOCAB, CPU)
    with pytest.raises(InputError, match="token id 30 is not in the vocabulary"):
        device.load(SamplingParams(banned_ids=frozenset({30})), PROMPT)
    device.load(SamplingParams(stop_ids=frozenset({2, 30})), PROMPT)
    assert device.stops.nonzero().flatten().tolist() == [2]
