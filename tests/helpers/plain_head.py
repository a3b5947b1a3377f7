"""Random heads with norms of their own, and the arithmetic of an EAGLE-3 head written out plainly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import CONFIG
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig

LAYER = "layers.0."


def random_head(
    target: ModelConfig = CONFIG,
    *,
    draft_vocab: int = 24,
    seed: int = 5,
    taps: tuple[int, ...] | None = None,
    own_embedding: bool = False,
    **fields: Any,
) -> HeadCheckpoint:
    """A head whose tensors, norms included, are random. `fields` go into its HeadConfig."""
    generator = torch.Generator().manual_seed(seed)
    h, taps = target.hidden_size, taps or target.default_taps
    config = HeadConfig(
        hidden_size=h,
        target_hidden_size=h,
        num_taps=len(taps),
        taps=taps,
        intermediate_size=96,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=1e-5,
        own_embedding=own_embedding,
        **{"rope_theta": 10_000.0, **fields},
    )
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = {
        "fc.weight": (h, len(taps) * h),
        LAYER + "self_attn.q_proj.weight": (q, 2 * h),
        LAYER + "self_attn.k_proj.weight": (kv, 2 * h),
        LAYER + "self_attn.v_proj.weight": (kv, 2 * h),
        LAYER + "self_attn.o_proj.weight": (h, q),
        LAYER + "mlp.gate_proj.weight": (96, h),
        LAYER + "mlp.up_proj.weight": (96, h),
        LAYER + "mlp.down_proj.weight": (h, 96),
        "lm_head.weight": (draft_vocab, h),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in matrices.items()}
    for name in (
        *(LAYER + n for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        "norm",
    ):
        tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(h, generator=generator)
    ids = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab].sort().values
    embedding = torch.randn(target.vocab_size, h, generator=generator) if own_embedding else None
    return HeadCheckpoint(config, tensors, ids, embedding, ())


@dataclass
class PlainHead:
    """One row after another, each reading all rows before it; keys and values are kept as lists of rows."""

    checkpoint: HeadCheckpoint
    embedding: Tensor  # [V, H]

    def __post_init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def feature_row(self, feature: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """Feature [taps * H] and token -> state that drafting goes on from [H], log-probabilities [Vd]."""
        return self.row(self._weight("fc.weight") @ feature, token)

    def row(self, hidden: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """The same from a state [H] of the head itself."""
        config = self.checkpoint.config
        normed = self._norm(hidden, LAYER + "hidden_norm")
        wide = torch.cat((self._norm(self.embedding[token], LAYER + "input_layernorm"), normed))
        position = len(self.keys)
        queries = self._turn(self._heads(wide, "q"), position)
        self.keys.append(self._turn(self._heads(wide, "k"), position))
        self.values.append(self._heads(wide, "v"))
        group = config.num_heads // config.num_kv_heads
        mixed = []
        for head, query in enumerate(queries):
            scores = torch.stack([query @ key[head // group] for key in self.keys]) / config.head_dim**0.5
            rows = torch.stack([value[head // group] for value in self.values])
            mixed.append(scores.softmax(0) @ rows)
        residual = normed if config.norm_before_residual else hidden
        between = residual + self._weight(LAYER + "self_attn.o_proj.weight") @ torch.cat(mixed)
        inner = self._norm(between, LAYER + "post_attention_layernorm")
        gate, up = (self._weight(f"{LAYER}mlp.{name}_proj.weight") @ inner for name in ("gate", "up"))
        after = between + self._weight(LAYER + "mlp.down_proj.weight") @ (gate * gate.sigmoid() * up)
        final = self._norm(after, "norm")
        return final if config.norm_output else after, (self._weight("lm_head.weight") @ final).log_softmax(0)

    def _weight(self, name: str) -> Tensor:
        return self.checkpoint.tensors[name]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.pow(2).mean() + self.checkpoint.config.rms_norm_eps).sqrt()
            * self._weight(f"{name}.weight")
        )

    def _heads(self, wide: Tensor, which: str) -> Tensor:
        flat = self._weight(f"{LAYER}self_attn.{which}_proj.weight") @ wide
        return flat.view(-1, self.checkpoint.config.head_dim)

    def _turn(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = position / self.checkpoint.config.rope_theta ** (torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
