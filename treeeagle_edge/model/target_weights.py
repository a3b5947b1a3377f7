"""The weights of a target as its passes use them: Q, K and V joined in one matrix, gate and up in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeeagle_edge.checkpoint.bnb import StoredInt8, StoredMatrix
from treeeagle_edge.checkpoint.opening import Checkpoint, HoldsStored
from treeeagle_edge.checkpoint.tensor_shapes import expected_shapes
from treeeagle_edge.config.quantised import check_width
from treeeagle_edge.errors import InputError, UsageError
from treeeagle_edge.heap import give_back_freed
from treeeagle_edge.model.linear import DenseLinear, Linear, make_linear
from treeeagle_edge.model.target_stored import stored_linear
from treeeagle_edge.widths import choose_widths


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms are float32."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (heads + 2 kv_heads) * head_dim
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    output: Linear  # heads * head_dim -> H
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 I
    down: Linear  # I -> H

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        norms = (
            self.input_norm.nbytes
            + self.mlp_norm.nbytes
            + (0 if self.qk_norm is None else self.qk_norm.nbytes)
        )
        return norms + sum(linear.nbytes for linear in (self.qkv, self.output, self.gate_up, self.down))


@dataclass(frozen=True)
class TargetWeights:
    """Everything a target reads. A tied lm_head in the compute dtype is the embedding itself."""

    embedding: Tensor  # [V, H], compute dtype
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [H] float32
    lm_head: Linear  # H -> V

    @property
    def nbytes(self) -> int:
        """Bytes held, a shared embedding counted once."""
        shared = isinstance(self.lm_head, DenseLinear) and self.lm_head.weight is self.embedding
        head = 0 if shared else self.lm_head.nbytes
        layers = sum(layer.nbytes for layer in self.layers)
        return self.embedding.nbytes + layers + self.final_norm.nbytes + head


def load_weights(
    checkpoint: Checkpoint,
    *,
    bits: int,
    device: torch.device,
    dtype: torch.dtype,
    lm_head_bits: int | None = None,
    places: Sequence[torch.device] | None = None,
) -> TargetWeights:
    """Read, convert and place the tensors of `checkpoint` one by one, so that little more than the result is held.

    `places`: the device of each layer; None puts all on `device`, where everything else goes. `lm_head_bits`: as
    `choose_widths` takes it. Matrices that come quantised keep their codes and scales, and what such a checkpoint
    left as floats stays at 16 bits.

    Raises InputError, naming the tensor, where one is missing or has another shape than the config asks for; UsageError
    for a width other than the one that quantised weights are stored at.
    """
    check_width(checkpoint.config.stored, bits)
    reader = TensorReader(checkpoint)
    config = checkpoint.config
    raw = reader.tensor("model.embed_tokens.weight")
    embedding = raw.to(device=device, dtype=dtype).contiguous()
    head_bits = choose_widths(bits, device.type, native=False, lm_head=lm_head_bits).lm_head
    if config.tie_word_embeddings and head_bits >= 16:
        lm_head: Linear = DenseLinear(embedding, None)
    elif not config.tie_word_embeddings and (stored := reader.stored("lm_head.weight")) is not None:
        _check_lm_head(stored, lm_head_bits)
        lm_head = stored_linear([stored], [None], device=device, dtype=dtype)
    else:
        source = raw if config.tie_word_embeddings else reader.tensor("lm_head.weight")
        lm_head = make_linear(source, None, bits=head_bits, device=device, dtype=dtype)
    del raw
    layers = []
    for index, place in enumerate(places or [device] * config.num_layers):
        layers.append(_load_layer(reader, index, place, bits, dtype))
        # what a layer leaves behind in the heap the next one does not fit into: glibc's aligned blocks ask for a little
        # more than they take, so that every matrix below its threshold would stay
        give_back_freed()
    return TargetWeights(embedding, tuple(layers), reader.norm("model.norm.weight", device), lm_head)


def _check_lm_head(stored: StoredMatrix, asked: int | None) -> None:
    bits = 8 if isinstance(stored, StoredInt8) else 4
    if asked not in (None, bits):
        raise UsageError(
            f"--lm-head-bits is {asked}, and the model's lm_head is stored at {bits} bits",
            "leave --lm-head-bits out; other widths need the unquantised repository of the model",
        )


def _load_layer(
    reader: TensorReader, index: int, device: torch.device, bits: int, dtype: torch.dtype
) -> LayerWeights:
    prefix = f"model.layers.{index}."
    config = reader.config

    def linear(names: tuple[str, ...], with_bias: bool) -> Linear:
        weights, biases = ([f"{prefix}{name}.{part}" for name in names] for part in ("weight", "bias"))
        if config.stored is not None:
            return stored_linear(
                [
                    reader.tensor(name) if (found := reader.stored(name)) is None else found
                    for name in weights
                ],
                [reader.tensor(name) if with_bias else None for name in biases],
                device=device,
                dtype=dtype,
            )
        bias = reader.joined(biases) if with_bias else None
        return make_linear(reader.joined(weights), bias, bits=bits, device=device, dtype=dtype)

    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = (reader.norm(f"{prefix}self_attn.{which}_norm.weight", device) for which in "qk")
        qk_norm = torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return LayerWeights(
        input_norm=reader.norm(prefix + "input_layernorm.weight", device),
        qkv=linear(attention, config.attention_bias),
        qk_norm=qk_norm,
        output=linear(("self_attn.o_proj",), config.output_bias),
        mlp_norm=reader.norm(prefix + "post_attention_layernorm.weight", device),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), False),
        down=linear(("mlp.down_proj",), False),
    )


class TensorReader:
    """Tensors of a checkpoint, checked for presence and shape."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self._shapes = expected_shapes(checkpoint.config)

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        expected = self._shapes[name]
        if name not in self._names:
            raise InputError(
                f"tensor {name} of shape {list(expected)} is missing from {self._checkpoint.path}",
                "download the model again; a file may be missing",
            )
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"tensor {name} has shape {list(tensor.shape)}, the config asks for {list(expected)}",
                "config and weights belong to different models; download both again",
            )
        return tensor

    def raw(self, name: str) -> tuple[str, np.ndarray] | None:
        """(GGUF type, [rows, bytes a row] uint8) of a matrix stored in blocks, None for any other."""
        return self._checkpoint.raw(name)

    def stored(self, name: str) -> StoredMatrix | None:
        """The matrix as bitsandbytes stored it, None where it is stored otherwise."""
        return self._checkpoint.stored(name) if isinstance(self._checkpoint, HoldsStored) else None

    def joined(self, names: list[str]) -> Tensor:
        """Several tensors stacked along their output channels."""
        tensors = [self.tensor(name) for name in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def norm(self, name: str, device: torch.device) -> Tensor:
        """A norm's weight, float32, on `device`."""
        return self.tensor(name).to(device=device, dtype=torch.float32)
