"""The target: one decoder for the Llama family, written around the slot pool.

Llama, Vicuna, Mistral, Qwen2, Qwen3, MiniCPM and SmolLM2 differ in what `ModelConfig` says. A pass takes M rows,
whatever they are: one token, a draft tree or a piece of a prompt. What a row may read is the view's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treeeagle_edge.checkpoint import Checkpoint
from treeeagle_edge.kernels.dispatch import add_rms_norm, attention, rms_norm, rotate_and_write, silu_gate
from treeeagle_edge.kernels.triton.operands import HeadNorm, Pool, Rotation
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv_store import KVStore
from treeeagle_edge.linear import check_bits
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.pass_rows import TensorTarget
from treeeagle_edge.rope import RotaryTable
from treeeagle_edge.target_weights import LayerWeights, TargetWeights, load_weights

_EXACT_MULTIPLE = 8  # rows: with multiples of 8 every product here treats all row positions alike (measured)


@dataclass(frozen=True)
class TargetOutput:
    """What one pass of M rows gives."""

    logits: Tensor  # [R, V] float32, of the R rows that were scored
    features: (
        Tensor  # [M, len(taps) * H] the residual stream at the taps, before the final norm, compute dtype
    )
    # [R] the largest logit of each scored row, NaN where one is not finite, and [R] its id: where the pass found them
    peaks: tuple[Tensor, Tensor] | None = None


class Target(TensorTarget):
    """A loaded model. It holds weights and rotary tables; keys and values belong to the caller's KVStore."""

    batch_invariant = False  # PyTorch picks other kernels for other numbers of rows

    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,
        *,
        bits: int,
        context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`context`: tokens planned for; `dtype`: compute dtype, that of the embedding."""
        self.config = config
        self.bits = bits
        self.context = context
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self._rope = RotaryTable(config.rope, config.head_dim, context, device)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype that keys and values are to be stored in: the compute dtype."""
        return self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of weights and rotary tables."""
        return self._weights.nbytes + self._rope.nbytes

    def embed(self, ids: Tensor) -> Tensor:
        """[M] int64 -> [M, H]: rows of embed_tokens as stored, without MiniCPM's scale, in the compute dtype."""
        return self._weights.embedding.index_select(0, ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] after the final norm, compute dtype -> [R, V] float32."""
        if self.config.logit_scale != 1.0:
            hidden = hidden * self.config.logit_scale
        return self._weights.lm_head(hidden).float()

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView | BatchView,
        store: KVStore,
        taps: tuple[int, ...],
        scored: slice = slice(None),
    ) -> TargetOutput:
        """One pass over M rows: writes their keys and values into `store` at `slots`, then attends through `view`.

        ids, positions, slots: [M] int64; slots of padding rows may repeat. taps: indices into Hugging Face's
        `hidden_states`: 0 is the (scaled) embedding, i the residual stream after layer i - 1, num_layers the
        normalised output, as there. scored: the rows whose logits are wanted.
        """
        config = self.config
        # the residual stream is float32: in bf16, passes of one row and of many differ by twice as much (measured)
        x = self.embed(ids).float()
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        rotation = self._rope.at(positions)
        tapped: dict[int, Tensor] = {}
        pools = map(Pool, store.keys.unbind(0), store.values.unbind(0))
        layers = self._weights.layers
        next_norms = (*(layer.input_norm for layer in layers[1:]), self._weights.final_norm)
        hidden = rms_norm(x, layers[0].input_norm, config.rms_norm_eps, self.dtype)
        for index, (layer, pool, next_norm) in enumerate(zip(layers, pools, next_norms, strict=True)):
            if index in taps:
                tapped[index] = x.to(self.dtype, copy=True)
            hidden = self._add(x, self._attend(layer, hidden, rotation, slots, view, pool), layer.mlp_norm)
            hidden = self._add(x, layer.down(silu_gate(layer.gate_up(hidden))), next_norm)
        tapped[config.num_layers] = hidden
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else hidden[:, :0]
        return TargetOutput(self.logits(hidden[scored]), features)

    def _attend(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: Rotation,
        slots: Tensor,
        view: AttentionView | BatchView,
        pool: Pool,
    ) -> Tensor:
        """hidden: [M, H], normalised, compute dtype; pool: of this layer. Returns the branch's [M, H]."""
        config = self.config
        qkv = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        norm = None if layer.qk_norm is None else HeadNorm(layer.qk_norm, config.rms_norm_eps)
        # queries stay in float32 up to the scores
        query = rotate_and_write(qkv, rotation, slots, pool, torch.float32, norm)
        mixed = attention(query, pool.keys, pool.values, view)
        return layer.output(mixed.reshape(len(hidden), -1).to(self.dtype))

    def _add(self, x: Tensor, branch: Tensor, norm: Tensor) -> Tensor:
        """Add a branch to the residual stream `x` in place; returns what the next one reads, its norm."""
        config = self.config
        return add_rms_norm(x, branch, norm, config.rms_norm_eps, self.dtype, config.residual_scale)


def exact_rows(nodes: int) -> int:
    """Rows that every pass of an exact session is padded to, so that `nodes` tree rows (the root included) fit."""
    return max(1, -(-nodes // _EXACT_MULTIPLE)) * _EXACT_MULTIPLE


def compute_dtype(bits: int, device: torch.device, family: str) -> torch.dtype:
    """Dtype of activations: fp32 for 32 bits, else bf16.

    fp16 only on CUDA cards without bf16, and never for Qwen2, whose activations overflow it.
    """
    if bits == 32:
        return torch.float32
    if (
        device.type == "cuda"
        and family != "qwen2"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return torch.float16
    return torch.bfloat16


def load_target(
    checkpoint: Checkpoint,
    *,
    bits: int,
    context: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    lm_head_bits: int | None = None,
) -> Target:
    """Load `checkpoint` at `bits` (4, 8, 16 or 32) for a planned `context` (tokens); `progress` gets (tensors, all).

    `lm_head_bits`: 8, 16 or None, as `widths.choose_widths` takes it. Raises InputError for a missing or misshapen
    tensor, CannotRunError where this machine cannot run a width or the device.
    """
    check_bits(bits, device)
    config = checkpoint.config
    dtype = compute_dtype(bits, device, config.family)
    with torch.inference_mode():
        weights = load_weights(
            checkpoint, bits=bits, device=device, dtype=dtype, progress=progress, lm_head_bits=lm_head_bits
        )
    return Target(config, weights, bits=bits, context=context, device=device, dtype=dtype)
