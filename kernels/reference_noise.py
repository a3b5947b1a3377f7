"""Random words that belong to a seed and a position: Philox 4x64 with ten rounds (Salmon et al., SC 2011).

These are the words of NumPy's `Philox(key=seed, counter=[0, 0, 0, position])`. PyTorch has no unsigned 64-bit
products, so words are int64 with the same bits: products wrap around in the same way, and the upper half of a product
is put together from halves of 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10
WORDS = 4  # of a block
_LOW = 0xFFFFFFFF


def random_words(seed: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """[L, 4 * blocks] int64: words of the counters (1, 0, 0, position), (2, 0, 0, position), ... under (seed, 0).

    seed: [1] int64; positions: [L] int64; nothing waits for either.
    """
    first = torch.arange(1, blocks + 1, device=seed.device).expand(len(positions), blocks)
    zero = torch.zeros_like(first)
    words = (first, zero, zero, positions[:, None].expand_as(first))
    keys = (seed, torch.zeros_like(seed))
    for _ in range(ROUNDS):
        (high_0, low_0), (high_1, low_1) = (
            _product(words[2 * i], factor) for i, factor in enumerate(FACTORS)
        )
        words = (high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0)
        keys = (keys[0] + _signed(KEY_STEPS[0]), keys[1] + _signed(KEY_STEPS[1]))
    return torch.stack(words, dim=-1).flatten(1)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 64 bits of `word` * `factor`, both unsigned."""
    low, high = word & _LOW, (word >> 32) & _LOW
    factor_low, factor_high = factor & _LOW, factor >> 32
    carried = high * factor_low + ((low * factor_low >> 32) & _LOW)
    middle = low * factor_high + (carried & _LOW)
    upper = high * factor_high + ((carried >> 32) & _LOW) + ((middle >> 32) & _LOW)
    return upper, word * _signed(factor)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word
