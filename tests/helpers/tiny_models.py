"""Tiny random targets, heads and engines, made without any file, and a drafter that proposes what a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint
from treeeagle_edge.checkpoint.tensor_shapes import expected_shapes
from treeeagle_edge.config.generation_defaults import GenerationDefaults
from treeeagle_edge.drafting.growth import FixedGrowth
from treeeagle_edge.engine.loop import Engine
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.limits import MAX_EXPANSIONS
from treeeagle_edge.model.head import Head
from treeeagle_edge.model.pass_rows import FeatureRows, PassRows
from treeeagle_edge.model.target import Target, load_target
from treeeagle_edge.model_config import ModelConfig, RopeConfig
from treeeagle_edge.rounds import TreeShape
from treeeagle_edge.tree import DraftTree

CPU = torch.device("cpu")
VOCAB = 40
CONFIG = ModelConfig(
    family="llama",
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    rms_norm_eps=1e-5,
    max_position=4096,
    rope=RopeConfig(),
    tie_word_embeddings=False,
)


class RandomCheckpoint:
    """A checkpoint whose tensors are random but fixed by the seed."""

    path = Path("random")
    generation = GenerationDefaults()

    def __init__(self, config: ModelConfig = CONFIG, seed: int = 0) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {
            name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.3
            for name, shape in expected_shapes(config).items()
        }

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def raw(self, name: str) -> None:
        return None


def tiny_target(*, context: int = 128, bits: int = 32, seed: int = 0, config: ModelConfig = CONFIG) -> Target:
    return load_target(RandomCheckpoint(config, seed), bits=bits, context=context, device=CPU)


def head_tensors(config: ModelConfig = CONFIG, draft_vocab: int = VOCAB, seed: int = 1) -> dict[str, Tensor]:
    """A random head in the SafeAILab layout, without d2t when it drafts over the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    h, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "fc.weight": (h, 3 * h),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (48, h),
        "midlayer.mlp.up_proj.weight": (48, h),
        "midlayer.mlp.down_proj.weight": (h, 48),
        "lm_head.weight": (draft_vocab, h),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(h)
    tensors["norm.weight"] = torch.ones(h)
    if draft_vocab < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
    return tensors


def tiny_head(target: Target, *, slots: int, seed: int = 1) -> Head:
    config, raw = target.config, head_tensors(target.config, seed=seed)
    shapes = HeadConfig(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        num_taps=3,
        taps=config.default_taps,
        intermediate_size=48,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in raw.items()}
    checkpoint = HeadCheckpoint(shapes, tensors, torch.arange(VOCAB), None, ())
    return Head(
        checkpoint,
        target.embed,
        slots=slots + MAX_EXPANSIONS,
        context=target.context,
        dtype=torch.float32,
        device=CPU,
    )


def tiny_engine(
    *,
    context: int = 128,
    shape: TreeShape | None = None,
    slack: int = 32,
    exact: bool = False,
    bits: int = 32,
    config: ModelConfig = CONFIG,
) -> Engine:
    """An engine over a random target and a random head. `slack`: slots beyond the context and one tree."""
    shape = shape or TreeShape(depth=4, branching=3, nodes=8)
    target = tiny_target(context=context, bits=bits, config=config)
    slots = context + shape.nodes + 1 + slack
    head = tiny_head(target, slots=slots)
    return Engine(target, head, context=context, slots=slots, tree=shape, exact=exact)


class OracleDrafter:
    """Draws random trees that hold `continuation` down to a random depth, so that walks of every length occur.

    `continuation(position)` gives the plain text's token at a place of the sequence. Takes the place of `Drafter`.
    """

    def __init__(self, head: Head, continuation: Callable[[int], int], seed: int) -> None:
        self.head = head
        self._continuation = continuation
        self._random = random.Random(seed)

    def draft(self, features: FeatureRows, rows: PassRows, growth: FixedGrowth) -> DraftTree:
        self.head.extend_rows(features.tensor(), rows, growth.branching)
        root, root_position = rows.ids[-1], rows.prefix.stop - 1 + len(rows.ids)
        tokens, parents, depths = [root], [-1], [0]
        right = 0  # the deepest row on the true path
        for _ in range(self._random.randint(1, growth._nodes)):
            if self._random.random() < 0.6 and depths[right] < growth.depth:
                parent, token = right, self._continuation(root_position + depths[right] + 1)
                if token in self._children(tokens, parents, right):
                    continue
                right = len(tokens)
            else:
                parent = self._random.randrange(len(tokens))
                token = self._random.randrange(VOCAB)
                true = self._continuation(root_position + depths[parent] + 1)
                if depths[parent] >= growth.depth or token in (
                    true,
                    *self._children(tokens, parents, parent),
                ):
                    continue
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens))

    @staticmethod
    def _children(tokens: Sequence[int], parents: Sequence[int], parent: int) -> set[int]:
        return {token for token, above in zip(tokens, parents, strict=True) if above == parent}
