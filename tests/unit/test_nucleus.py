"""What top-p keeps depends on a row's scores alone: no order of adding, which a card chooses anew, changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from device_trees import device_tree
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treeeagle_edge import sampling
from treeeagle_edge.device import walk
from treeeagle_edge.device.walk import DeviceSampler
from treeeagle_edge.sampling import choose_token
from treeeagle_edge.sampling_params import SamplingParams
from treeeagle_edge.tree import DraftTree

ROOT = DraftTree((0,), (-1,), (0,), (0.0,))
VOCAB = 150_000
Least = Callable[[Tensor, SamplingParams], float]


class NoFloatScan(TorchDispatchMode):
    """Raises where floats are added up along a row, for which `torch.cumsum` has no order that stays on CUDA."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        scans = name in ("cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "_cumsum")
        assert not (scans and args[0].is_floating_point()), f"{func} of floats"
        return func(*args, **(kwargs or {}))


def least_on_the_host(scores: Tensor, params: SamplingParams) -> float:
    return float(scores[choose_token(scores, params, 0)])


def least_on_the_device(scores: Tensor, params: SamplingParams) -> float:
    sampler = DeviceSampler(len(scores), torch.device("cpu"))
    sampler.load(params, [0])
    return float(scores[sampler.walk(device_tree(ROOT), scores[None], torch.tensor([0])).next_token])


@pytest.fixture(params=[least_on_the_host, least_on_the_device], ids=["host", "device"])
def least_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Least:
    """Gives the least score that is kept: with a noise that makes up for all differences, and more, it is chosen."""

    def draw(scores: NDArray[np.float32], seed: int, position: int) -> int:
        return int(np.where(np.isfinite(scores), scores, np.inf).argmin())

    def least(scores: Tensor, params: SamplingParams) -> float:
        monkeypatch.setattr(walk, "gumbel_noise", lambda *_: -2.0 * scores.double()[None])
        with NoFloatScan():
            found: float = request.param(scores, params)
        return found

    monkeypatch.setattr(sampling, "draw", draw)
    return least


def rows() -> dict[str, Tensor]:
    """[VOCAB] each: nearly flat, as wide as logits are, one sure token over many doubtful ones."""
    generator = torch.Generator().manual_seed(3)
    flat = 1e-3 * torch.randn(VOCAB, generator=generator)
    wide = 2.5 * torch.randn(VOCAB, generator=generator)
    sure = flat.clone()
    sure[77] = 12.5
    return {"flat": flat, "wide": wide, "sure": sure}


@pytest.mark.parametrize("name", ["flat", "wide", "sure"])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_it_is_the_exact_set_whatever_the_order_of_the_tokens(
    least_kept: Least, name: str, top_p: float
) -> None:
    scores = rows()[name]
    best = np.sort(scores.numpy())[::-1]
    mass = np.exp((best - best[0]).astype(np.float64)).cumsum()
    exact = float(best[(mass < top_p * mass[-1]).sum()])
    params = SamplingParams(temperature=1.0, top_p=top_p)
    for seed in range(3):
        order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))
        assert least_kept(scores[order], params) == exact


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(4, 1.0, 4), (0, 0.7, 3), (4, 0.7, 2), (3, 0.999, 3), (0, 1e-9, 1)]
)
def test_top_k_comes_first(least_kept: Least, top_k: int, top_p: float, kept: int) -> None:
    """Of 0.5, 0.15, 0.1, 0.1 and less, two hold 0.7 of the four likeliest, and three 0.7 of all."""
    likely = torch.tensor([0.5, 0.15, 0.101, 0.099, 0.08, 0.07])
    scores = likely.log()
    assert least_kept(scores, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)) == float(
        scores[kept - 1]
    )


def test_shares_can_be_added_for_any_vocabulary() -> None:
    """Of four million tokens that are all the likeliest; what is excluded counts nothing."""
    scores = torch.zeros(4)
    scores[3] = float("-inf")
    assert sampling.shares(scores, scores.max()).tolist() == [2**40] * 3 + [0]
    assert 2**40 * 4_000_000 < 2**63
    total = sampling.shares(scores, scores.max()).sum()
    assert int(sampling.wanted_mass(total, 0.5)) == 3 * 2**39
    assert int(sampling.wanted_mass(total, 1.0 - 2**-53)) <= int(total)
