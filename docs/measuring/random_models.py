"""Models of given shapes with random weights: the time of a pass does not depend on their values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.checkpoint.tensor_shapes import expected_shapes
from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig, RopeConfig
from treeeagle_edge.planning.known_models import KNOWN_MODELS

_DEVIATION = 0.02  # of the weights
_BLOCK = 32  # weights that share a scale

SHAPES = {
    "Qwen2-0.5B": ModelConfig(
        family="qwen2", hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14, num_kv_heads=2,
        head_dim=64, vocab_size=151_936, rms_norm_eps=1e-6, max_position=32_768, rope=RopeConfig(theta=1_000_000.0),
        tie_word_embeddings=True, attention_bias=True,
    ),
    "Llama-3.2-1B": KNOWN_MODELS["meta-llama/Llama-3.2-1B-Instruct"].config,
}  # fmt: skip


@dataclass
class RandomCheckpoint:
    """A checkpoint whose matrices are random GGUF blocks, Q4_1 or Q8_0, as native kernels load them."""

    config: ModelConfig
    bits: int  # of the layers; embedding and lm_head have 8
    path: Path = Path("random")
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    def names(self) -> frozenset[str]:
        """Names of all tensors that the shapes ask for."""
        return frozenset(expected_shapes(self.config))

    def tensor(self, name: str) -> Tensor:
        """A norm of ones or a bias of zeros. Matrices are read with `raw`."""
        return (torch.zeros if name.endswith("bias") else torch.ones)(expected_shapes(self.config)[name])

    def raw(self, name: str) -> tuple[str, np.ndarray] | None:
        """Random blocks of a matrix, None for a vector."""
        shape = expected_shapes(self.config)[name]
        if len(shape) == 1:
            return None
        in_layer = name.startswith("model.layers.")
        return random_blocks(shape[0], shape[1], self.bits if in_layer else 8)


def random_blocks(rows: int, columns: int, bits: int) -> tuple[str, np.ndarray]:
    """(GGUF type, [rows, bytes a row] uint8) of values around 0 with deviation 0.02."""
    header, size, levels = (2, 34, 256) if bits == 8 else (4, 20, 16)
    blocks = np.frombuffer(np.random.default_rng(0).bytes(rows * columns // _BLOCK * size), np.uint8)
    blocks = blocks.reshape(-1, size).copy()
    scale = _DEVIATION / (levels / 12**0.5)  # quants are uniform
    fields = [scale] if bits == 8 else [scale, -scale * (levels - 1) / 2]
    blocks[:, :header] = np.array(fields, np.float16).view(np.uint8)
    return ("Q8_0" if bits == 8 else "Q4_1"), blocks.reshape(rows, -1)


def random_head(target: ModelConfig, draft_vocab: int) -> HeadCheckpoint:
    """An EAGLE-3 head as wide as the target: one layer of its shapes, three taps, `draft_vocab` draft ids."""
    h, wide, inner = target.hidden_size, 2 * target.hidden_size, target.intermediate_size
    q, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    config = HeadConfig(
        hidden_size=h, target_hidden_size=h, num_taps=3, taps=target.default_taps, intermediate_size=inner,
        num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        vocab_size=target.vocab_size, draft_vocab_size=draft_vocab, rms_norm_eps=target.rms_norm_eps,
        rope_theta=10_000.0,
    )  # fmt: skip
    shapes = {
        "self_attn.q_proj": (q, wide), "self_attn.k_proj": (kv, wide), "self_attn.v_proj": (kv, wide),
        "self_attn.o_proj": (h, q), "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner),
    }  # fmt: skip
    named = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {"fc.weight": (h, 3 * h), "lm_head.weight": (draft_vocab, h)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * _DEVIATION for name, shape in named.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"layers.0.{name}.weight"] = torch.ones(h)
    tensors["norm.weight"] = torch.ones(h)
    return HeadCheckpoint(config, tensors, torch.arange(draft_vocab), None, ())


def smaller(config: ModelConfig, layers: int | None, vocab: int | None) -> ModelConfig:
    """The same widths with fewer layers or tokens, for a trial. None leaves a number as it is."""
    return replace(config, num_layers=layers or config.num_layers, vocab_size=vocab or config.vocab_size)
