"""Rotary tables: frequencies against `transformers`, lengths from the planned context."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from treeeagle_edge.kernels.reference_layers import rotate
from treeeagle_edge.model.rope import RotaryTable, inverse_frequencies
from treeeagle_edge.model_config import RopeConfig

CPU = torch.device("cpu")
HEAD_DIM = 64
SHORT = tuple(1.0 + 0.05 * i for i in range(HEAD_DIM // 2))
LONG = tuple(1.5 + 0.5 * i for i in range(HEAD_DIM // 2))


def llama_config(parameters: dict[str, Any], max_position: int = 2048) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position,
        rope_parameters=parameters,
    )


LONGROPE = (
    {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "short_factor": list(SHORT),
        "long_factor": list(LONG),
        "original_max_position_embeddings": 512,
    },
    RopeConfig(kind="longrope", factor=4.0, short_factor=SHORT, long_factor=LONG, original_max_position=512),
)
CASES = {
    "linear": (
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        RopeConfig(kind="linear", factor=4.0),
        100,
    ),
    "dynamic, short": (
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        RopeConfig(kind="dynamic", factor=2.0, original_max_position=2048),
        100,
    ),
    "dynamic, long": (
        {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        RopeConfig(kind="dynamic", factor=2.0, original_max_position=2048),
        4000,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        RopeConfig(
            theta=500_000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=8192,
        ),
        100,
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_position=1024),
        100,
    ),
    "longrope, short": (
        *LONGROPE,
        512,
    ),
    "longrope, long": (
        *LONGROPE,
        513,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_equal_transformers(name: str) -> None:
    """Inverse frequencies and the factor on cosine and sine, for the planned context as sequence length."""
    parameters, rope, context = CASES[name]
    config = llama_config(parameters)
    theirs, scaling = ROPE_INIT_FUNCTIONS[rope.kind](config, CPU, seq_len=context)
    ours, factor = inverse_frequencies(rope, HEAD_DIM, context)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0.0)
    assert factor == pytest.approx(scaling)


def test_default_rotation_equals_transformers() -> None:
    """Rotate-half: the same rotated heads as Llama in `transformers`."""
    config = llama_config({"rope_type": "default", "rope_theta": 10_000.0})
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, HEAD_DIM, generator=generator)
    positions = torch.tensor([0, 1, 5, 77, 500, 1000, 2047])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    table = RotaryTable(RopeConfig(), HEAD_DIM, 2048, CPU)
    ours = rotate(q, *table.at(positions).rows)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_a_declared_attention_factor_wins() -> None:
    """longrope and yarn multiply cosine and sine with the declared factor instead of the formula's."""
    for kind in ("yarn", "longrope"):
        rope = RopeConfig(
            kind=kind,
            factor=4.0,
            original_max_position=512,
            short_factor=SHORT,
            long_factor=LONG,
            attention_factor=1.25,
        )
        table = RotaryTable(rope, HEAD_DIM, 100, CPU)
        cos, sin = table.at(torch.tensor([0])).rows
        assert torch.equal(cos, torch.full((1, 1, HEAD_DIM), 1.25))
        assert not sin.any()


def test_gguf_divisors_divide_the_frequencies() -> None:
    """Llama 3.1 files carry the scaling as one divisor a dimension pair."""
    divisors = tuple(float(2**i) for i in range(HEAD_DIM // 2))
    plain, _ = inverse_frequencies(RopeConfig(), HEAD_DIM, 100)
    divided, _ = inverse_frequencies(RopeConfig(freq_divisors=divisors), HEAD_DIM, 100)
    assert torch.equal(divided * torch.tensor(divisors), plain)


@pytest.mark.parametrize("context", [100, 8192, 16_384])
def test_tables_follow_the_planned_context(context: int) -> None:
    """Expectations row 18: tables come from the planned context, not from a head's or config's max_position.

    The last position of the context and a draft tree of the greatest depth behind it have rows, with the right angle.
    """
    table = RotaryTable(RopeConfig(original_max_position=2048), HEAD_DIM, context, CPU)
    last = context + 33
    cos, _ = table.at(torch.tensor([last])).rows
    assert float(cos[0, 0, 0]) == pytest.approx(math.cos(last), abs=1e-3)


def test_16_bit_heads_are_rotated_in_float32() -> None:
    x = torch.randn(3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    positions = torch.tensor([3, 900, 901])
    table = RotaryTable(RopeConfig(), HEAD_DIM, 1000, CPU)
    rotation = table.at(positions)
    rotated = rotate(x, *rotation.rows)
    assert rotated.dtype == torch.float32
    assert torch.equal(rotated, rotate(x.float(), *rotation.rows))


def test_unknown_kinds_are_refused() -> None:
    """A scaling that is not known is never run as if there were none."""
    with pytest.raises(ValueError, match="spiral"):
        inverse_frequencies(RopeConfig(kind="spiral"), HEAD_DIM, 100)
