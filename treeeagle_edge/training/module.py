"""An EAGLE-3 head as a trainable module that drafts in training as it will in use (training-time test, 2503.01840).

Row t pairs the feature of token t with the embedding of token t + 1 (see `treeeagle_edge.model.head`). From chosen
rows, the anchors, the head drafts a chain of tokens. The first step of a chain reads the target's feature, each later
one the head's own output of the step before. A step attends to the rows up to its anchor and to its own chain, as a
branch of a draft tree does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.kernels.reference_layers import rotate
from treeeagle_edge.model.rope import RotaryTable

_LAYER = "layers.0."
TENSOR_NAMES = {  # attribute -> name in a checkpoint
    "fc": "fc.weight",
    "q": _LAYER + "self_attn.q_proj.weight",
    "k": _LAYER + "self_attn.k_proj.weight",
    "v": _LAYER + "self_attn.v_proj.weight",
    "o": _LAYER + "self_attn.o_proj.weight",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "embedding_norm": _LAYER + "input_layernorm.weight",
    "hidden_norm": _LAYER + "hidden_norm.weight",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "final_norm": "norm.weight",
    "lm_head": "lm_head.weight",
}


@dataclass(frozen=True)
class Inputs:
    """What the head reads of a batch: B dialogues of up to T tokens, with A anchor rows in each."""

    features: Tensor  # [B, T, taps * Ht]
    embeddings: Tensor  # [B, T, H] of the dialogue's tokens, from the target's table
    anchors: Tensor  # [B, A] int64 rows; unused places hold row 0


class TrainableHead(nn.Module):
    """The weights, float32. Products run in `dtype`, norms and attention's softmax in float32."""

    fc: nn.Parameter
    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    o: nn.Parameter
    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    embedding_norm: nn.Parameter
    hidden_norm: nn.Parameter
    mlp_norm: nn.Parameter
    final_norm: nn.Parameter
    lm_head: nn.Parameter

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, Tensor], *, length: int, dtype: torch.dtype
    ) -> None:
        """`tensors` by checkpoint name; `length`: the longest dialogue, tokens."""
        super().__init__()
        self.config = config
        self.dtype = dtype
        for attribute, name in TENSOR_NAMES.items():
            setattr(self, attribute, nn.Parameter(tensors[name].detach().to(torch.float32, copy=True)))
        device = tensors["fc.weight"].device
        table = RotaryTable(config.rope, config.head_dim, length, device)
        self._cos, self._sin = table.at(torch.arange(table.cos.shape[0], device=device)).rows

    def tensors(self) -> dict[str, Tensor]:
        """The weights by checkpoint name."""
        return {name: getattr(self, attribute).detach() for attribute, name in TENSOR_NAMES.items()}

    def unroll(self, inputs: Inputs, steps: int) -> Iterator[Tensor]:
        """Draft `steps` steps. For each step [B, A, H]: the normalised state that `lm_head` scores.

        Step k of the chain at row t predicts token t + 2 + k; the tokens before it are the dialogue's own.
        """
        anchors, kv_heads = inputs.anchors, self.config.num_kv_heads
        embedded = self._norm(inputs.embeddings, self.embedding_norm)
        fused = self._linear(inputs.features, self.fc)
        rows = torch.arange(fused.shape[1], device=fused.device)
        wide = torch.cat((embedded.roll(-1, dims=1), self._norm(fused, self.hidden_norm)), dim=-1)
        keys = [self._rotated(self._linear(wide, self.k), rows[None].expand(wide.shape[:2]), kv_heads)]
        values = [self._heads(self._linear(wide, self.v), kv_heads)]
        hidden = _rows(fused, anchors).float()
        readable = rows <= anchors[..., None]  # [B, A, T]
        last = fused.shape[1] - 1
        for step in range(steps):
            drafted = _rows(embedded, (anchors + 1 + step).clamp(max=last))
            normed = self._norm(hidden, self.hidden_norm)
            wide = torch.cat((drafted, normed), dim=-1)
            if self.config.norm_before_residual:
                hidden = normed.float()
            query = self._rotated(self._linear(wide, self.q), anchors + step, self.config.num_heads)
            if step > 0:
                keys.append(self._rotated(self._linear(wide, self.k), anchors + step, kv_heads))
                values.append(self._heads(self._linear(wide, self.v), kv_heads))
            hidden = hidden + self._linear(_attend(query, keys, values, readable), self.o).float()
            inner = self._norm(hidden, self.mlp_norm)
            gated = F.silu(self._linear(inner, self.gate)) * self._linear(inner, self.up)
            hidden = hidden + self._linear(gated, self.down).float()
            state = self._norm(hidden, self.final_norm)
            yield state
            if self.config.norm_output:
                hidden = state.float()

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), weight.to(self.dtype))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.config.rms_norm_eps).to(self.dtype)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, R, heads * hd] -> [B, heads, R, hd]."""
        return x.view(*x.shape[:2], heads, self.config.head_dim).transpose(1, 2)

    def _rotated(self, x: Tensor, positions: Tensor, heads: int) -> Tensor:
        """[B, R, heads * hd] at `positions` [B, R] -> [B, heads, R, hd]."""
        flat = x.reshape(-1, heads, self.config.head_dim)
        at = positions.flatten()
        turned = rotate(flat, self._cos[at], self._sin[at]).to(self.dtype)
        return self._heads(turned.view(*x.shape), heads)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """[B, T, H] at `index` [B, A] -> [B, A, H]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], readable: Tensor) -> Tensor:
    """[B, A, heads * hd]: attention over the dialogue's rows where `readable` [B, A, T], and over the anchor's chain.

    query: [B, heads, A, hd]. keys, values: first those of the dialogue [B, kv_heads, T, hd], then for each step of the
    chain [B, kv_heads, A, hd].
    """
    batch, heads, anchors, dim = query.shape
    kv_heads, length = keys[0].shape[1], keys[0].shape[2]
    grouped = (query * dim**-0.5).view(batch, kv_heads, heads // kv_heads, anchors, dim)
    flat = grouped.reshape(batch, kv_heads, -1, dim)
    scores = (flat @ keys[0].transpose(2, 3)).view(batch, kv_heads, -1, anchors, length).float()
    scores = scores.masked_fill(~readable[:, None, None], float("-inf"))
    own = [(grouped * key[:, :, None]).sum(-1, keepdim=True).float() for key in keys[1:]]
    weights = torch.cat((scores, *own), dim=-1).softmax(dim=-1).to(query.dtype)
    true = weights[..., :length].reshape(batch, kv_heads, -1, length)
    mixed = (true @ values[0]).view(grouped.shape)
    for step, value in enumerate(values[1:]):
        mixed = mixed + weights[..., length + step, None] * value[:, :, None]
    return mixed.reshape(batch, heads, anchors, dim).transpose(1, 2).reshape(batch, anchors, heads * dim)
