"""Models for the GPU check: random weights made on the device, and a head whose proposals are written beforehand.

The target's `lm_head` is its embedding moved on by one row, so that a token pulls towards the next number. How much it
pulls is the scale of the embedding: led, the text counts upwards, and any number of right drafts a round can be set;
free, layers decide, and a text comes out that knows every part of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor

from treeeagle_edge.generation_defaults import GenerationDefaults
from treeeagle_edge.head import Head, HeadOutput
from treeeagle_edge.head_checkpoint import HeadCheckpoint
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.kernels.view import AttentionView
from treeeagle_edge.kv_store import KVStore
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.linear import check_bits
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.pass_rows import TensorHead
from treeeagle_edge.target import Target, compute_dtype
from treeeagle_edge.target_weights import TargetWeights, load_weights
from treeeagle_edge.tensor_shapes import expected_shapes

FREE, LED = 0.02, 16.0  # scales of the embedding; a layer adds about 0.5 to the residual stream
_STEP = 1.0  # log-probability that a sibling is below the one before
_FIRST = -0.3  # of the first child: a path outranks siblings, so that trees reach their depth


class RandomCheckpoint:
    """A checkpoint without a file: each tensor is drawn on the device when it is read, the same in every run there."""

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
        """Nothing is stored in blocks."""


def draw(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, name: str) -> Tensor:
    """Normally distributed numbers that belong to `name`."""
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


@dataclass(frozen=True)
class RandomModel:
    """Random weights as a target holds them, for any number of targets."""

    config: ModelConfig
    weights: TargetWeights
    bits: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def load(cls, config: ModelConfig, *, bits: int, device: torch.device) -> RandomModel:
        """Draw and quantise layer by layer. Raises CannotRunError where the machine lacks what the width needs."""
        check_bits(bits, device)
        dtype = compute_dtype(bits, device, config.family)
        with torch.inference_mode():
            checkpoint = RandomCheckpoint(config, device, dtype)
            weights = load_weights(checkpoint, bits=bits, device=device, dtype=dtype, progress=None)
        return cls(config, weights, bits, dtype, device)

    def target(self, scale: float, context: int) -> Target:
        """A target for `context` tokens over these weights; `scale`: FREE or LED."""
        config = replace(self.config, embedding_scale=scale)
        return Target(
            config, self.weights, bits=self.bits, context=context, device=self.device, dtype=self.dtype
        )


def random_head(config: HeadConfig, target: Target, slots: int) -> Head:
    """A head in the target's dtype with random weights; `slots` of an engine, to which scratch rows are added."""
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
    """Proposes what a script says, and takes as long as the head behind it, whose passes are really made.

    The first `right` levels of a round hold the text's own next token, the ones below do not, so that a round settles
    right + 1 tokens. Column 0 of the hidden state carries how many right tokens lead to a row, -1 beside the text.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, head: Head, text: Tensor, right: int) -> None:
        """`text` [places] int64, on the device: the token at every place of the sequence that a draft may reach."""
        self.config: HeadConfig = head.config
        self.store: KVStore = head.store
        self._head = head
        self._text = text
        self._right = right

    @property
    def nbytes(self) -> int:
        """Bytes of the head behind it."""
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
        output = self._head.extend(features, tokens, positions, slots, view, top)
        return self._scripted(output, torch.zeros_like(output.hidden[:, 0]), positions[-1:] + 1, top)

    def step(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, slots: Tensor, view: AttentionView, top: int
    ) -> HeadOutput:
        """See `head.Head.step`."""
        output = self._head.step(hidden, tokens, positions, slots, view, top)
        above, places = hidden[:, 0], positions + 1
        on_text = (above >= 0) & (tokens == self._text[places])
        return self._scripted(output, torch.where(on_text, above + 1, -1), places, top)

    def clean_rows(self, slots: Tensor) -> None:
        """See `head.Head.clean_rows`."""
        self._head.clean_rows(slots)

    def _scripted(self, output: HeadOutput, level: Tensor, places: Tensor, top: int) -> HeadOutput:
        """level: [R] right tokens down to each row, or -1; places: [R] where the rows' tokens stand."""
        hidden = output.hidden.clone()
        hidden[:, 0] = level
        wrong = ((level < 0) | (level >= self._right)).long()
        ranks = torch.arange(top, device=level.device)
        ids = (self._text[places + 1] + wrong)[:, None] + ranks  # the right one first, or none of them right
        log_probs = (_FIRST - _STEP * ranks).expand(len(places), -1)
        return HeadOutput(hidden, log_probs, ids % self.config.vocab_size)
