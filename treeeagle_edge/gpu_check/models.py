"""Models for the GPU check: random weights made on the device, and a head whose drafts are written beforehand.

The target's `lm_head` is its embedding shifted by one row, so that every token favours the next number. How strongly
depends on the scale of the embedding:

- LED: the embedding decides, and the text counts upwards. Since the text is known, a head can be told how many drafts
  of a round shall be right.
- FREE: the layers decide, so that the text depends on every part of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.checkpoint.tensor_shapes import expected_shapes
from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv.store import KVStore
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.model.head import Head, HeadOutput
from treeeagle_edge.model.linear import check_bits
from treeeagle_edge.model.pass_rows import TensorHead
from treeeagle_edge.model.target import Target, compute_dtype
from treeeagle_edge.model.target_weights import TargetWeights, load_weights
from treeeagle_edge.model_config import ModelConfig

FREE, LED = 0.02, 16.0  # scales of the embedding; a layer adds about 0.5 to the residual stream

# Log-probabilities that the scripted head gives. A chain of first children outranks siblings, so trees become deep.
_FIRST = -0.3  # of a first child
_STEP = 1.0  # each further child has so much less


class RandomCheckpoint:
    """A checkpoint without a file: a tensor is drawn on the device when it is read, and is the same in every run."""

    path = Path("random weights")
    generation = GenerationDefaults()

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self._device = device
        self._dtype = dtype
        self._shapes = expected_shapes(config)

    def names(self) -> frozenset[str]:
        """Canonical names of all tensors."""
        return frozenset(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """The tensor, on the device. Products of normalised rows with it have a deviation of about 1."""
        if name == "lm_head.weight":
            return self.tensor("model.embed_tokens.weight").roll(1, 0) * self.config.hidden_size**-0.5
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        scale = 1.0 if name.startswith("model.embed") else 0.1 if len(shape) == 1 else shape[1] ** -0.5
        return draw(shape, self._device, self._dtype, name) * scale

    def raw(self, name: str) -> None:
        """None: no tensor is stored quantised."""


def draw(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, name: str) -> Tensor:
    """Normally distributed numbers; `name` is their seed."""
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


@dataclass(frozen=True)
class RandomModel:
    """Random weights, quantised as a target holds them; any number of targets may share them."""

    config: ModelConfig
    weights: TargetWeights
    bits: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(cls, config: ModelConfig, *, bits: int, device: torch.device) -> RandomModel:
        """Draw and quantise layer by layer. Raises CannotRunError where this machine cannot run `bits`."""
        check_bits(bits, device)
        dtype = compute_dtype(bits, device, config.family)
        with torch.inference_mode():
            checkpoint = RandomCheckpoint(config, device, dtype)
            weights = load_weights(checkpoint, bits=bits, device=device, dtype=dtype)
        return cls(config, weights, bits, dtype, device)

    def target(self, scale: float, context: int) -> Target:
        """A target for `context` tokens over these weights; `scale`: FREE or LED."""
        config = replace(self.config, embedding_scale=scale)
        return Target(
            config, self.weights, bits=self.bits, context=context, device=self.device, dtype=self.dtype
        )


def random_head(config: HeadConfig, target: Target, slots: int) -> Head:
    """A head with random weights in the target's dtype. slots: of the engine; the head's scratch rows come on top."""
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    device, dtype = target.device, target.dtype
    tensors = {
        f"{name}.weight": draw(shape, device, dtype, name) * shape[1] ** -0.5
        for name, shape in config.matrices.items()
    }
    for name in (*(f"layers.0.{norm}.weight" for norm in norms), "norm.weight"):
        tensors[name] = torch.ones(config.hidden_size, device=device, dtype=dtype)
    checkpoint = HeadCheckpoint(config, tensors, torch.arange(config.draft_vocab_size), None, ())
    rows = slots + MAX_EXPANSIONS
    return Head(checkpoint, target.embed, slots=rows, context=target.context, dtype=dtype, device=device)


class ScriptedHead(TensorHead):
    """A head that drafts what a script says. It runs the passes of a real head too, so that it takes as long.

    In the first `right` levels of a tree one node is the text's own next token; below them none is. So a round gives
    right + 1 tokens. Column 0 of the hidden state tells how many right tokens lead to a row; -1: the row is off the
    text.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, head: Head, text: Tensor, right: int) -> None:
        """text: [places] int64, on the device: the right token at every place that a draft may reach."""
        self.config: HeadConfig = head.config
        self.store: KVStore = head.store
        self._head = head
        self._text = text
        self._right = right

    @property
    def nbytes(self) -> int:
        """Bytes of the real head."""
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
        """See `model.head.Head.extend`."""
        output = self._head.extend(features, tokens, positions, slots, view, top)
        return self._scripted(output, torch.zeros_like(output.hidden[:, 0]), positions[-1:] + 1, top)

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `model.head.Head.step`."""
        output = self._head.step(hidden, tokens, positions, slots, view, top)
        above, places = hidden[:, 0], positions + 1
        on_text = (above >= 0) & (tokens == self._text[places])
        return self._scripted(output, torch.where(on_text, above + 1, -1), places, top)

    def clean_rows(self, slots: Tensor) -> None:
        """See `model.head.Head.clean_rows`."""
        self._head.clean_rows(slots)

    def _scripted(self, output: HeadOutput, level: Tensor, places: Tensor, top: int) -> HeadOutput:
        """The output with its drafts replaced.

        level: [R] how many right tokens lead to each row, or -1. places: [R] the place of each row's token in the text.
        """
        hidden = output.hidden.clone()
        hidden[:, 0] = level
        wrong = ((level < 0) | (level >= self._right)).long()
        ranks = torch.arange(top, device=level.device)
        ids = (self._text[places + 1] + wrong)[:, None] + ranks  # the first one is right, or none of them is
        log_probs = (_FIRST - _STEP * ranks).expand(len(places), -1)
        return HeadOutput(hidden, log_probs, ids % self.config.vocab_size)
