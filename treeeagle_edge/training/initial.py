"""The weights that training starts from: the target's last layer, or an existing head."""

from __future__ import annotations

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head import HeadCheckpoint, open_head
from treeeagle_edge.checkpoint.opening import Checkpoint
from treeeagle_edge.errors import InputError
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import ModelConfig
from treeeagle_edge.sources.model_names import resolve_head

_LAYER = "layers.0."


def lm_head_rows(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """[len(ids), Ht] float32 rows of the target's lm_head."""
    tied = checkpoint.config.tie_word_embeddings
    return checkpoint.tensor("model.embed_tokens.weight" if tied else "lm_head.weight")[ids].float()


def from_last_layer(checkpoint: Checkpoint, config: HeadConfig, ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Tensors by name: norms, attention and MLP of the target's last layer, and rows of the target's `lm_head`.

    A head's attention reads the embedding beside the hidden state: that half of q, k and v, which the target lacks,
    starts with small random values. `fc` starts by passing on the highest tap. On the demo model this start was 0.3 to
    0.4 nats ahead of a random one after 300 steps.
    """
    target = checkpoint.config
    generator = torch.Generator().manual_seed(seed)
    layer = f"model.layers.{target.num_layers - 1}."
    hidden = config.hidden_size

    def small(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.02 / (columns / 576) ** 0.5

    def of_target(name: str) -> Tensor:
        return checkpoint.tensor(layer + name).float()

    tensors = {
        f"{_LAYER}{name}": of_target(name)
        for name in (
            "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
            "post_attention_layernorm.weight",
        )
    }  # fmt: skip
    for which in "qkv":
        name = f"self_attn.{which}_proj.weight"
        matrix = of_target(name)
        tensors[_LAYER + name] = torch.cat((small(len(matrix), hidden), matrix), dim=1)
    tensors[_LAYER + "hidden_norm.weight"] = of_target("input_layernorm.weight")
    tensors[_LAYER + "input_layernorm.weight"] = torch.ones(hidden)
    fused = torch.cat([small(hidden, hidden) for _ in range(config.num_taps - 1)], dim=1)
    tensors["fc.weight"] = torch.cat((fused, torch.eye(hidden)), dim=1)
    tensors["norm.weight"] = checkpoint.tensor("model.norm.weight").float()
    tensors["lm_head.weight"] = lm_head_rows(checkpoint, ids) * target.logit_scale
    return tensors


def open_initial(name: str, target_name: str, target: ModelConfig) -> HeadCheckpoint:
    """The head that `--init` names, opened for `target`.

    Raises InputError where there is no such head, or it belongs to another target or has an embedding of its own.
    """
    path = resolve_head(name, target_name)
    if path is None:
        raise InputError("--init none is no head to start from", "leave --init out, or name a head")
    opened = open_head(path, target)
    if opened.embedding is not None:
        raise InputError(
            f"the head {name} has an embedding of its own, which training cannot go on from",
            "start without --init, or from a head that shares the target's embedding",
        )
    return opened


def from_head(opened: HeadCheckpoint, ids: Tensor) -> dict[str, Tensor]:
    """Tensors of `opened`, with its `lm_head` rows in the order of `ids`.

    A token that the old head could not draft gets the mean of its rows: the target's own row would score far higher
    than the trained ones.
    """
    known = {int(token): row for row, token in enumerate(opened.target_ids.tolist())}
    trained = opened.tensors["lm_head.weight"].float()
    rows = torch.stack(
        [trained[known[token]] if token in known else trained.mean(dim=0) for token in ids.tolist()]
    )
    return {**{name: tensor.float() for name, tensor in opened.tensors.items()}, "lm_head.weight": rows}
