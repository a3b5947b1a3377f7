"""The target: one decoder for the Llama family, written around the slot pool.

Llama, Vicuna, Mistral, Qwen2, Qwen3, MiniCPM and SmolLM2 differ in what `ModelConfig` says. A pass takes M rows,
whatever they are: one token, a draft tree or a piece of a prompt. What a row may read is the view's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.opening import Checkpoint
from treeeagle_edge.kernels.current_card import on_card
from treeeagle_edge.kernels.dispatch import add_rms_norm, attention, rms_norm, rotate_and_write, silu_gate
from treeeagle_edge.kernels.triton.operands import HeadNorm, Pool, Rotation
from treeeagle_edge.kernels.view import AttentionView, BatchView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.model.linear import check_bits
from treeeagle_edge.model.pass_rows import TensorTarget
from treeeagle_edge.model.rope import RotaryTable
from treeeagle_edge.model.target_places import layer_runs, moved, moved_view
from treeeagle_edge.model.target_weights import LayerWeights, TargetWeights, load_weights
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.sampling import Peaks

_HAS_BF16 = (8, 0)  # compute capability of the first cards that have it
_EXACT_MULTIPLE = 8  # rows: with multiples of 8 every product here treats all row positions alike (measured)


@dataclass(frozen=True)
class TargetOutput:
    """What one pass of M rows gives."""

    logits: Tensor  # [R, V] float32, of the R rows that were scored; [0, V] from a pass that gives their peaks alone
    # [M, len(taps) * H] the residual stream at the taps, before the final norm, compute dtype
    features: Tensor
    peaks: Peaks | None = None  # of the scored rows, where the pass found them


@dataclass(frozen=True)
class _Rows:
    """What the rows of a pass need on the device of a layer."""

    rotation: Rotation
    slots: Tensor  # [M] int64
    view: AttentionView | BatchView


class Target(TensorTarget):
    """A loaded model. It holds weights and rotary tables; keys and values belong to the caller's KVStore.

    Layers may lie on several cards: see `model.target_places`.
    """

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
        places: Sequence[torch.device] | None = None,
    ) -> None:
        """`context`: tokens planned for; `dtype`: compute dtype, that of the embedding; `places`: the device of each
        layer, None for `device`, where everything else is.
        """
        self.config = config
        self.bits = bits
        self.context = context
        self.device = device
        self.dtype = dtype
        self._weights = weights
        self.layer_devices = tuple(places or [device] * config.num_layers)
        self._runs = layer_runs(self.layer_devices)
        # one a run
        self._ropes = tuple(
            RotaryTable(config.rope, config.head_dim, context, run.device) for run in self._runs
        )
        # the norm that follows each layer, where it is on the layer's own device: None where the stream moves first
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        after = [*self.layer_devices[1:], device]
        self._next_norms = tuple(
            norm if here == there else None
            for norm, here, there in zip(norms, self.layer_devices, after, strict=True)
        )

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype that keys and values are to be stored in: the compute dtype."""
        return self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of weights and rotary tables."""
        return self._weights.nbytes + sum(rope.nbytes for rope in self._ropes)

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
        config, layers, home = self.config, self._weights.layers, self.device
        # the residual stream is float32: in bf16, passes of one row and of many differ by twice as much (measured)
        x = self.embed(ids).float()
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        tapped: dict[int, Tensor] = {}
        pools = tuple(starmap(Pool, store.layers()))
        hidden: Tensor | None = None
        for run, rope in zip(self._runs, self._ropes, strict=True):
            x = moved(x, run.device)
            rows = _Rows(
                rope.at(moved(positions, run.device)),
                moved(slots, run.device),
                moved_view(view, run.device),
            )
            with on_card(run.device):
                hidden = rms_norm(x, layers[run.layers.start].input_norm, config.rms_norm_eps, self.dtype)
                for index in run.layers:
                    if index in taps:
                        tapped[index] = moved(x.to(self.dtype, copy=True), home)
                    hidden = self._layer(index, x, hidden, rows, pools[index])
        if hidden is None:  # the stream comes home before its last norm
            hidden = rms_norm(moved(x, home), self._weights.final_norm, config.rms_norm_eps, self.dtype)
        tapped[config.num_layers] = hidden
        features = torch.cat([tapped[tap] for tap in taps], dim=-1) if taps else hidden[:, :0]
        return TargetOutput(self.logits(hidden[scored]), features)

    def _layer(self, index: int, x: Tensor, hidden: Tensor | None, rows: _Rows, pool: Pool) -> Tensor | None:
        """Add layer `index` to the stream `x` in place; returns what the next reads, None where `x` moves before it."""
        assert hidden is not None, "the stream moved within a run"
        layer, next_norm = self._weights.layers[index], self._next_norms[index]
        hidden = self._add(x, self._attend(layer, hidden, rows, pool), layer.mlp_norm)
        branch = layer.down(silu_gate(layer.gate_up(hidden)))
        if next_norm is not None:
            return self._add(x, branch, next_norm)
        x.add_(branch, alpha=self.config.residual_scale)
        return None

    def _attend(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rows: _Rows,
        pool: Pool,
    ) -> Tensor:
        """hidden: [M, H], normalised, compute dtype; pool: of this layer. Returns the branch's [M, H]."""
        config = self.config
        qkv = layer.qkv(hidden).view(len(hidden), -1, config.head_dim)
        norm = None if layer.qk_norm is None else HeadNorm(layer.qk_norm, config.rms_norm_eps)
        # queries stay in float32 up to the scores
        query = rotate_and_write(qkv, rows.rotation, rows.slots, pool, torch.float32, norm)
        mixed = attention(query, pool.keys, pool.values, rows.view, self.dtype)
        return layer.output(mixed.reshape(len(hidden), -1))

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
    if device.type == "cuda" and family != "qwen2" and torch.cuda.get_device_capability(device) < _HAS_BF16:
        return torch.float16
    return torch.bfloat16


def load_target(
    checkpoint: Checkpoint,
    *,
    bits: int,
    context: int,
    device: torch.device,
    lm_head_bits: int | None = None,
    places: Sequence[torch.device] | None = None,
) -> Target:
    """Load `checkpoint` at `bits` (4, 8, 16 or 32) for a planned `context` (tokens).

    `lm_head_bits`: 8, 16 or None, as `widths.choose_widths` takes it; `places`: as `Target` takes them. Raises
    InputError for a missing or misshapen tensor, CannotRunError where this machine cannot run a width or the device.
    """
    config, devices = checkpoint.config, dict.fromkeys((device, *(places or ())))
    for each in devices:
        check_bits(bits, each)
    dtype = _common_dtype(bits, devices, config.family)
    with torch.inference_mode():
        weights = load_weights(
            checkpoint,
            bits=bits,
            device=device,
            dtype=dtype,
            lm_head_bits=lm_head_bits,
            places=places,
        )
    return Target(config, weights, bits=bits, context=context, device=device, dtype=dtype, places=places)


def _common_dtype(bits: int, devices: Iterable[torch.device], family: str) -> torch.dtype:
    """The `compute_dtype` that all `devices` have: fp16 where one of them lacks bf16."""
    found = {compute_dtype(bits, device, family) for device in devices}
    return found.pop() if len(found) == 1 else torch.float16
