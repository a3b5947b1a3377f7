"""An EAGLE-3 head held by the native CPU kernels: 8-bit weights in blocks of 32, one native call a level."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.head import HeadOutput
from treeeagle_edge.head_checkpoint import HeadCheckpoint
from treeeagle_edge.kernels.native.head import Head
from treeeagle_edge.kernels.native.structs import HeadConfig
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv_store import KVStore
from treeeagle_edge.native_target import NativeTarget, native_store, native_view
from treeeagle_edge.rope import RotaryTable

_MATRICES = {
    "q": "layers.0.self_attn.q_proj.weight",
    "k": "layers.0.self_attn.k_proj.weight",
    "v": "layers.0.self_attn.v_proj.weight",
    "o": "layers.0.self_attn.o_proj.weight",
    "gate": "layers.0.mlp.gate_proj.weight",
    "up": "layers.0.mlp.up_proj.weight",
    "down": "layers.0.mlp.down_proj.weight",
    "fc": "fc.weight",
    "lm_head": "lm_head.weight",
}
_VECTORS = {
    "attention_norm": "layers.0.input_layernorm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "mlp_norm": "layers.0.post_attention_layernorm.weight",
    "final_norm": "norm.weight",
}


class NativeHead:
    """The same contract as `head.Head`, with bf16 KV rows."""

    def __init__(
        self,
        checkpoint: HeadCheckpoint,
        target: NativeTarget,
        *,
        slots: int,
        context: int,
        max_rows: int,
        max_scored: int,
    ) -> None:
        """`slots` rows of KV, scratch rows included; passes of at most `max_rows` rows, `max_scored` of them scored."""
        self.config = config = checkpoint.config
        self.notes = checkpoint.notes
        table = RotaryTable(config.rope, config.head_dim, context, torch.device("cpu"))
        self._head = head = Head(
            target.model,
            HeadConfig(
                config.hidden_size, config.num_taps * config.target_hidden_size, config.intermediate_size,
                config.num_heads, config.num_kv_heads, config.head_dim, config.draft_vocab_size, table.cos.shape[0],
                max_rows, max_scored, config.rms_norm_eps, config.norm_before_residual, config.norm_output,
            ),
        )  # fmt: skip
        for name, tensor in _MATRICES.items():
            head.matrix(name, "q8", _float32(checkpoint.tensors[tensor]))
        if checkpoint.embedding is not None:
            head.matrix("embedding", "q8", _float32(checkpoint.embedding))
        for name, tensor in _VECTORS.items():
            head.vector(name, _float32(checkpoint.tensors[tensor]))
        head.rope(table.cos.numpy(), table.sin.numpy())
        head.target_ids(checkpoint.target_ids.numpy())
        head.ready()
        self.store = KVStore.allocate(
            1, slots, config.num_kv_heads, config.head_dim, torch.bfloat16, torch.device("cpu")
        )

    @property
    def nbytes(self) -> int:
        """Bytes of weights, without the KV rows."""
        return self._head.nbytes

    def extend(
        self,
        features: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
    ) -> HeadOutput:
        """See `head.Head.extend`."""
        last = np.array([len(tokens) - 1])
        return self._run(tokens, positions, slots, view, top, last, features=features.contiguous().numpy())

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `head.Head.step`."""
        everything = np.arange(len(tokens))
        return self._run(tokens, positions, slots, view, top, everything, hidden=hidden.contiguous().numpy())

    def clean_rows(self, slots: Tensor) -> None:
        """See `head.Head.clean_rows`."""
        self.store.zero_non_finite(slots)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        view: AttentionView,
        top: int,
        scored: np.ndarray,
        **inputs: np.ndarray,
    ) -> HeadOutput:
        hidden, log_probs, ids = self._head.step(
            tokens.numpy(),
            positions.numpy(),
            slots.numpy(),
            native_view(view),
            native_store(self.store),
            scored_rows=scored,
            top=min(top, self.config.draft_vocab_size),
            **inputs,
        )
        return HeadOutput(
            torch.from_numpy(hidden)[scored], torch.from_numpy(log_probs), torch.from_numpy(ids)
        )


def _float32(tensor: Tensor) -> np.ndarray:
    return tensor.float().contiguous().numpy()
