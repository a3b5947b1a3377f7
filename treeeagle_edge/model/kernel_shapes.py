"""The shapes in which models on PyTorch's path call the kernels: kernels are tried in them before they serve."""

from __future__ import annotations

import torch

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.kernels.trial_cases import ModelShape
from treeeagle_edge.model_config import ModelConfig


def target_shape(config: ModelConfig, dtype: torch.dtype, *bits: int) -> ModelShape:
    """Of a target whose layers and lm_head have `bits` and compute in `dtype`; its residual stream is fp32."""
    return ModelShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
        dtype,
        head_norm=config.qk_norm,
        packed=4 in bits,
        int8=8 in bits,
    )


def head_shape(config: HeadConfig, dtype: torch.dtype, bits: int) -> ModelShape:
    """Of a draft head of `bits` that computes in `dtype`, its residual stream included."""
    return ModelShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.hidden_size,
        config.intermediate_size,
        dtype,
        stream=dtype,
        packed=bits == 4,
        int8=bits == 8,
    )
