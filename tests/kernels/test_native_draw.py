"""A token drawn natively is the one that `sampling.choose_token` draws: any instruction set, any number of threads."""

from __future__ import annotations

from ctypes import byref, c_int64
from typing import Any

import numpy as np
import pytest
import torch
from native_toys import needs_native

from treeeagle_edge.kernels.native.library import NativeError, check, library
from treeeagle_edge.kernels.native.structs import Sampling
from treeeagle_edge.kernels.native.team import Team
from treeeagle_edge.sampling import choose_token, gumbel, random_numbers
from treeeagle_edge.sampling_params import SamplingParams

pytestmark = needs_native

# below, at and above a step of the generator, a piece of the work, and many of them
SIZES = (1, 3, 4, 5, 511, 512, 513, 5_000, 49_152)
CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_k": 20, "top_p": 0.5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1000, "top_p": 0.95, "min_p": 0.02},
)


def sampling(params: SamplingParams) -> Sampling:
    return Sampling(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)


def row(size: int, spread: float, at: int) -> np.ndarray:
    """Scores, half of them excluded in every other row."""
    generator = np.random.default_rng(at)
    scores = (spread * generator.standard_normal(size)).astype(np.float32)
    if at % 2 and size > 3:
        scores[generator.permutation(size)[: size // 2]] = -np.inf
    return scores


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_equals_the_definition(size: int, cuts: dict[str, Any], isa: str) -> None:
    one, three = Team(1, isa), Team(3, isa)
    for at in range(8 if size < 10_000 else 3):
        params = SamplingParams(temperature=(0.3, 0.7, 1.0, 3.0)[at % 4], seed=at, **cuts)
        scores = row(size, (0.5, 3.0, 12.0)[at % 3], at)
        expected = choose_token(torch.from_numpy(scores), params, 1000 * at)
        assert one.draw(scores, sampling(params), 1000 * at) == expected
        assert three.draw(scores, sampling(params), 1000 * at) == expected


@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}], ids=str)
def test_of_equal_scores_none_is_excluded_and_noise_decides(cuts: dict[str, Any]) -> None:
    how = sampling(SamplingParams(temperature=0.7, seed=2**63 - 1, **cuts))
    for position in (0, 1, 2**40):
        noise = gumbel(random_numbers(2**63 - 1, position, 5_000))
        assert Team(2).draw(np.full(5_000, 4.0, np.float32), how, position) == noise.argmax()


@pytest.mark.parametrize("spoilt", [-np.inf, np.nan])
def test_what_is_excluded_or_no_number_is_never_drawn(spoilt: float) -> None:
    scores = np.full(3_000, spoilt, np.float32)
    scores[[7, 2_500]] = -400.0, -401.0
    for top_k, top_p in ((0, 1.0), (5, 1.0), (300, 1.0), (0, 0.99), (300, 0.99)):
        drawn = {Team(2).draw(scores, Sampling(1.0, top_k, top_p, 0.0, seed), 3) for seed in range(40)}
        assert drawn == {7, 2_500}
    scores[[7, 2_500]] = spoilt
    with pytest.raises(NativeError, match="no score is above -infinity"):
        Team(2).draw(scores, Sampling(1.0, 0, 1.0, 0.0, 0), 3)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"temperature": 0.0}, "temperature is 0, not above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0, not above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, r"min_p is -0.1, outside 0\.\.1"),
    ],
)
def test_bad_numbers_are_refused(changed: dict[str, float], words: str) -> None:
    numbers = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, **changed}
    with pytest.raises(NativeError, match=words):
        Team(1).draw(np.zeros(4, np.float32), Sampling(**numbers), 0)


def test_bad_memory_is_refused() -> None:
    team, how, token = Team(1), Sampling(1.0, 0, 1.0, 0.0, 0), c_int64()
    with pytest.raises(NativeError, match="float32"):
        team.draw(np.zeros(4), how, 0)
    with pytest.raises(NativeError, match="count is 0"):
        team.draw(np.zeros(0, np.float32), how, 0)
    for arguments in (
        (None, 4096, 1, byref(how), 0, byref(token)),
        (team.handle, None, 1, byref(how), 0, byref(token)),
        (team.handle, 4097, 1, byref(how), 0, byref(token)),
        (team.handle, 4096, 1, None, 0, byref(token)),
        (team.handle, 4096, 1, byref(how), 0, None),
    ):
        with pytest.raises(NativeError, match=r"is null|is not aligned"):
            check(library().te_draw(*arguments))
