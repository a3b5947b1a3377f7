"""The noise of `sampling.gumbel` made on the device: from the same random bits, without waiting for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.kernels.dispatch import random_words
from treeeagle_edge.kernels.reference_noise import WORDS

_NUMBERS = 2 * WORDS  # of 32 bits, in a block


def gumbel_noise(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """[L, vocab_size] float64: line l is the noise that belongs to `positions[l]` under `seed`.

    seed: [1] int64, not negative; positions: [L] int64. Both are read on the device.
    """
    words = random_words(seed, positions, -(-vocab_size // _NUMBERS))
    numbers = words.view(torch.int32)[:, :vocab_size].long() & 0xFFFFFFFF
    return -torch.log(-torch.log((numbers.double() + 0.5) * 2.0**-32))
