"""Random words in Triton are those of the definition, which are NumPy's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_cases import DEVICE, needs_triton

from treeeagle_edge.kernels import reference_noise

pytest.importorskip("triton")
from treeeagle_edge.kernels.triton import noise as subject

pytestmark = needs_triton


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("blocks", [1, 75, 256, 600])
def test_the_words_of_the_definition(seed: int, blocks: int) -> None:
    seeds = torch.tensor([3, seed], device=DEVICE)[1:]
    positions = torch.tensor([0, 1, 9, 4095, 2**40], device=DEVICE)[1:]
    ours = subject.random_words(seeds, positions, blocks)
    assert torch.equal(ours, reference_noise.random_words(seeds, positions, blocks))
    for line, position in zip(ours, positions.tolist(), strict=True):
        words = np.random.Philox(key=seed, counter=[0, 0, 0, position]).random_raw(4 * blocks)
        assert np.array_equal(line.cpu().numpy().view(np.uint64), words)
