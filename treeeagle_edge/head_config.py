"""Shapes of an EAGLE-3 head (arXiv 2503.01840), as far as planning memory and building it need them."""

from __future__ import annotations

from dataclasses import dataclass

from treeeagle_edge.model_config import RopeConfig


@dataclass(frozen=True)
class HeadConfig:
    """Derived from the tensors of a head checkpoint; its config.json is only a cross-check."""

    hidden_size: int  # H
    target_hidden_size: int  # Ht
    num_taps: int  # width of `fc` / Ht
    taps: tuple[int, ...]  # indices into the target's hidden_states
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # of the target
    draft_vocab_size: int  # Vd
    rms_norm_eps: float
    rope_theta: float
    own_embedding: bool = False  # the file's embed_tokens differs from the target's and is kept
    scaled_rope: RopeConfig | None = None  # where positions are scaled; its theta is rope_theta
    norm_before_residual: bool = False  # the residual is the normalised state (speculators' heads)
    norm_output: bool = False  # drafting goes on from the state after the final norm (EAGLE-3.1)

    @property
    def rope(self) -> RopeConfig:
        """The head's own rotary embedding."""
        return self.scaled_rope or RopeConfig(theta=self.rope_theta)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Canonical name, without ".weight", -> (out, in) of every matrix that rows are multiplied with."""
        h, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "fc": (h, self.num_taps * self.target_hidden_size),
            "layers.0.self_attn.q_proj": (queries, 2 * h),
            "layers.0.self_attn.k_proj": (keys, 2 * h),
            "layers.0.self_attn.v_proj": (keys, 2 * h),
            "layers.0.self_attn.o_proj": (h, queries),
            "layers.0.mlp.gate_proj": (inner, h),
            "layers.0.mlp.up_proj": (inner, h),
            "layers.0.mlp.down_proj": (h, inner),
            "lm_head": (self.draft_vocab_size, h),
        }
