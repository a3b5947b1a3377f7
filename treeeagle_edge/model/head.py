"""The EAGLE-3 draft head: one decoder layer that predicts the target's next token from its features (arXiv
2503.01840).

Row t pairs the feature of token t with the embedding of token t + 1 and lives in the slot of token t + 1; its
rotary position is t. Fed with its own output instead of a feature, it drafts further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.kernels.dispatch import add_rms_norm, attention, rms_norm, rotate_and_write, silu_gate
from treeeagle_edge.kernels.triton.operands import Pool
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.linear import Linear, make_linear
from treeeagle_edge.model.pass_rows import TensorHead
from treeeagle_edge.model.rope import RotaryTable


@dataclass(frozen=True)
class HeadOutput:
    """What a head pass gives for the R rows it scored."""

    hidden: Tensor  # [R, H] what further drafting is fed with: before the final norm, or with norm_output after it
    log_probs: Tensor  # [R, top] float32, the most likely next tokens, best first
    ids: Tensor  # [R, top] int64, ids of the target's vocabulary


class Head(TensorHead):
    """Weights of a head, and the KV rows it writes. Its dtype and its width are independent of the target's."""

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        embed: Callable[[Tensor], Tensor],
        *,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        bits: int = 16,
    ) -> None:
        """`embed` maps [M] ids to the target's [M, H] embeddings, used unless the head brings its own.

        `slots` rows of KV are reserved, scratch rows included; `context` sizes the rotary table whatever the
        head's own max_position says. `bits`: 8 and 4 quantise the matrices, whose products then take a `dtype` of 16
        bits; 16 and 32 keep them in `dtype`. Raises CannotRunError where this machine lacks what the width needs.
        """

        def weight(name: str) -> Tensor:
            return checkpoint.tensors[name].to(device=device, dtype=dtype)

        def linear(*names: str) -> Linear:
            joined = torch.cat([checkpoint.tensors[f"{name}.weight"] for name in names])
            return make_linear(joined, None, bits=bits, device=device, dtype=dtype)

        layer = "layers.0."
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.notes = checkpoint.notes
        self._target_ids = checkpoint.target_ids.to(device)
        self._fc = linear("fc")
        self._qkv = linear(*(f"{layer}self_attn.{p}_proj" for p in "qkv"))
        self._o = linear(layer + "self_attn.o_proj")
        self._gate_up = linear(*(f"{layer}mlp.{p}_proj" for p in ("gate", "up")))
        self._down = linear(layer + "mlp.down_proj")
        self._embedding_norm = weight(layer + "input_layernorm.weight")
        self._hidden_norm = weight(layer + "hidden_norm.weight")
        self._mlp_norm = weight(layer + "post_attention_layernorm.weight")
        self._final_norm = weight("norm.weight")
        self._lm_head = linear("lm_head")
        own = checkpoint.embedding
        self._own_embedding = None if own is None else own.to(device=device, dtype=dtype)
        self._embed = embed if own is None else self._embed_own
        self._rope = RotaryTable(config.rope, config.head_dim, context, device)
        self.store = KVStore.allocate(1, slots, config.num_kv_heads, config.head_dim, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, without the KV rows."""
        parts: tuple[Linear | Tensor | None, ...] = (
            self._fc,
            self._qkv,
            self._o,
            self._gate_up,
            self._down,
            self._lm_head,
            self._embedding_norm,
            self._hidden_norm,
            self._mlp_norm,
            self._final_norm,
            self._own_embedding,
        )
        return sum(part.nbytes for part in parts if part is not None)

    @torch.inference_mode()
    def extend(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
    ) -> HeadOutput:
        """One pass over M rows of true features [M, taps * Ht] of the target; only the last row is scored.

        tokens, positions, slots: [M] int64: the token of each row, its rotary position, and the slot its KV goes to.
        top: children wanted; fewer come where the draft vocabulary is smaller.
        """
        fused = self._fc(features.to(self.dtype))
        stream, branch = self._layer(fused, tokens, positions, slots, view)
        return self._score(stream[-1:], branch[-1:], top)

    @torch.inference_mode()
    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """One pass over M drafted rows, fed with the `hidden` [M, H] of their parents; every row is scored."""
        # what the caller holds stays as it is: the layer adds to its rows in place
        return self._score(*self._layer(hidden.clone(), tokens, positions, slots, view), top)

    def _layer(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [M, H] and the branch still to be added to it. `hidden` may be written to."""
        config = self.config
        embedding = self._norm(self._embed(tokens).to(self.dtype), self._embedding_norm)
        normed = self._norm(hidden, self._hidden_norm)
        wide = torch.cat((embedding, normed), dim=-1)
        qkv = self._qkv(wide).view(len(wide), -1, config.head_dim)
        pool = Pool(self.store.keys[0], self.store.values[0])
        query = rotate_and_write(qkv, self._rope.at(positions), slots, pool, self.dtype)
        mixed = attention(query, pool.keys, pool.values, view).reshape(len(wide), -1)
        stream = normed if config.norm_before_residual else hidden
        normed = self._add(stream, self._o(mixed), self._mlp_norm)
        return stream, self._down(silu_gate(self._gate_up(normed)))

    def _score(self, hidden: Tensor, branch: Tensor, top: int) -> HeadOutput:
        """hidden: [R, H], to which `branch` is added in place."""
        final = self._add(hidden, branch, self._final_norm)
        logits = self._lm_head(final).float()
        values, ids = logits.topk(min(top, logits.shape[-1]), dim=-1)
        log_probs = values - logits.logsumexp(dim=-1, keepdim=True)
        return HeadOutput(final if self.config.norm_output else hidden, log_probs, self._target_ids[ids])

    def clean_rows(self, slots: Tensor) -> None:
        """Zero what is not finite in the KV rows at `slots`: one bad feature must not spoil every later draft."""
        self.store.zero_non_finite(slots)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, self.dtype)

    def _add(self, x: Tensor, branch: Tensor, weight: Tensor) -> Tensor:
        """Add a branch to the residual stream `x` in place; returns its norm."""
        return add_rms_norm(x, branch, weight, self.config.rms_norm_eps, self.dtype)

    def _embed_own(self, ids: Tensor) -> Tensor:
        assert self._own_embedding is not None
        return F.embedding(ids, self._own_embedding)
