"""Rotary position embedding (Su et al., arXiv 2104.09864) in the rotate-half convention, with the scalings in use.

Tables are as long as the planned context asks, whatever position the checkpoint's config stops at.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treeeagle_edge.config.rope import longrope_scale, yarn_scale
from treeeagle_edge.kernels.triton.operands import Rotation
from treeeagle_edge.limits import ROTARY_MARGIN
from treeeagle_edge.model_config import RopeConfig

_YARN_BETA_FAST, _YARN_BETA_SLOW = 32, 1  # rotations; the paper's values


class RotaryTable:
    """Cosines and sines of every position of the planned context, float32."""

    def __init__(self, rope: RopeConfig, head_dim: int, context: int, device: torch.device) -> None:
        """`context` tokens are planned; scalings that look at the length use it, once and for all."""
        inverse, scaling = inverse_frequencies(rope, head_dim, context)
        positions = torch.arange(context + ROTARY_MARGIN, dtype=torch.float32)
        angles = torch.outer(positions, inverse)
        self.cos = (angles.cos() * scaling).to(device)  # [positions, head_dim / 2]
        self.sin = (angles.sin() * scaling).to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return self.cos.nbytes + self.sin.nbytes

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of a pass whose rows lie at int64 `positions` [M]."""
        return Rotation(self.cos, self.sin, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int, context: int) -> tuple[Tensor, float]:
    """[head_dim / 2] float32 inverse frequencies, and the factor on cosine and sine.

    `context` (tokens) decides where a scaling depends on the length: dynamic stretches to it; longrope takes its long
    factors when it exceeds the original context. Both are then fixed.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / rope.theta**exponents
    scaling = 1.0
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "dynamic":
        inverse = 1.0 / _dynamic_theta(rope, head_dim, context) ** exponents
    elif rope.kind == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.kind == "yarn":
        inverse, scaling = _yarn(rope, head_dim, exponents)
    elif rope.kind == "longrope":
        inverse, scaling = _longrope(rope, exponents, context)
    elif rope.kind != "default":
        raise ValueError(f"unknown rope scaling {rope.kind!r}")
    if rope.freq_divisors is not None:
        inverse = inverse / torch.tensor(rope.freq_divisors, dtype=torch.float32)
    return inverse, scaling


def _original(rope: RopeConfig) -> int:
    if rope.original_max_position is None:
        raise ValueError(f"rope scaling {rope.kind} needs original_max_position")
    return rope.original_max_position


def _dynamic_theta(rope: RopeConfig, head_dim: int, context: int) -> float:
    """NTK-aware base that stretches the original context to the planned one."""
    original = _original(rope)
    stretch = rope.factor * max(context, original) / original - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    waves_in_context = _original(rope) * inverse / (2 * math.pi)
    blend = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / rope.factor + blend * inverse


def _yarn(rope: RopeConfig, head_dim: int, exponents: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, a ramp between."""
    original = _original(rope)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(_YARN_BETA_FAST)), 0)
    high = min(math.ceil(dimension(_YARN_BETA_SLOW)), head_dim - 1)
    width = max(high - low, 0.001)  # both ends may meet
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = rope.theta**exponents
    inverse = ramp / (rope.factor * frequencies) + (1 - ramp) / frequencies
    return inverse, yarn_scale(rope.factor) if rope.attention_factor is None else rope.attention_factor


def _longrope(rope: RopeConfig, exponents: Tensor, context: int) -> tuple[Tensor, float]:
    """LongRoPE (arXiv 2402.13753): one divisor a dimension, from the short or the long list."""
    original = _original(rope)
    factors = rope.long_factor if context > original else rope.short_factor
    assert factors is not None
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    default = longrope_scale(rope.factor, original)
    return inverse, default if rope.attention_factor is None else rope.attention_factor
