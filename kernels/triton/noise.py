"""The random words of `kernels.reference_noise` in one launch: in plain PyTorch they take some four hundred."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treeeagle_edge.kernels.reference_noise import FACTORS, KEY_STEPS, ROUNDS, WORDS
from treeeagle_edge.kernels.triton.launch import Launch

_BLOCK = 256  # counters a program


@triton.jit(do_not_specialize_on_alignment=("seed", "positions"))
def words_kernel(
    seed: tl.tensor,  # [1] int64
    positions: tl.tensor,  # [L] int64
    out: tl.tensor,  # [L, 4 * blocks] int64
    blocks: int,
    factor_0: tl.constexpr,
    factor_1: tl.constexpr,
    step_0: tl.constexpr,
    step_1: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Grid (L, pieces of a line): every lane is a counter, whose four words end up side by side."""
    line = tl.program_id(0)
    counter = tl.program_id(1) * block + tl.arange(0, block)
    word_0 = (counter + 1).to(tl.uint64)
    word_1 = tl.zeros([block], tl.uint64)
    word_2 = tl.zeros([block], tl.uint64)
    word_3 = word_1 + tl.load(positions + line).to(tl.uint64, bitcast=True)
    key_0 = word_1 + tl.load(seed).to(tl.uint64, bitcast=True)
    key_1 = tl.zeros([block], tl.uint64)
    by_0, by_1 = tl.full([block], factor_0, tl.uint64), tl.full([block], factor_1, tl.uint64)
    add_0, add_1 = tl.full([block], step_0, tl.uint64), tl.full([block], step_1, tl.uint64)
    for _ in tl.static_range(rounds):
        high_0, low_0 = tl.umulhi(word_0, by_0), word_0 * by_0
        high_1, low_1 = tl.umulhi(word_2, by_1), word_2 * by_1
        word_0, word_1 = high_1 ^ word_1 ^ key_0, low_1
        word_2, word_3 = high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = key_0 + add_0, key_1 + add_1
    there = counter < blocks
    to = out + line.to(tl.int64) * 4 * blocks + 4 * counter
    tl.store(to, word_0.to(tl.int64, bitcast=True), mask=there)
    tl.store(to + 1, word_1.to(tl.int64, bitcast=True), mask=there)
    tl.store(to + 2, word_2.to(tl.int64, bitcast=True), mask=there)
    tl.store(to + 3, word_3.to(tl.int64, bitcast=True), mask=there)


def random_words(seed: Tensor, positions: Tensor, blocks: int) -> Tensor:
    """Same contract, and same bits, as `reference_noise.random_words`."""
    out = torch.empty(len(positions), WORDS * blocks, dtype=torch.int64, device=seed.device)
    words_launch(seed, positions, out).run()
    return out


def words_launch(seed: Tensor, positions: Tensor, out: Tensor) -> Launch:
    """What fills `out` [L, 4 * blocks]."""
    assert positions.stride(0) == 1
    blocks = out.shape[1] // WORDS
    arguments = {
        "seed": seed,
        "positions": positions,
        "out": out,
        "blocks": blocks,
        "factor_0": FACTORS[0],
        "factor_1": FACTORS[1],
        "step_0": KEY_STEPS[0],
        "step_1": KEY_STEPS[1],
        "rounds": ROUNDS,
        "block": _BLOCK,
    }
    return Launch(words_kernel, (len(positions), triton.cdiv(blocks, _BLOCK)), arguments)
