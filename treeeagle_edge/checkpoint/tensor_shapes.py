"""The tensors a model of given shapes must have: a checkpoint is checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import LINEARS, ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor of `config`; linear weights are [out, in]."""
    hidden = config.hidden_size
    linears = config.linear_shapes
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"{name}.weight": shape for name, shape in linears.items()},
    }
    if config.attention_bias:
        layer |= {f"{name}.bias": linears[name][:1] for name in LINEARS[:3]}
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {f"self_attn.{which}_norm.weight": (config.head_dim,) for which in "qk"}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(found: Mapping[str, tuple[int, ...]], config: ModelConfig, path: Path) -> None:
    """Compare the tensors of the checkpoint at `path` with what its config promises.

    Raises InputError that names the first missing, unexpected or misshapen tensor.
    """
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise InputError(
            f"{path} has {config.num_heads} query and {config.num_kv_heads} key heads of {config.head_dim}",
            "query heads are a multiple of key heads, and the width is even; download the config again",
        )
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise InputError(
                f"{path} lacks the tensor {name}", "download the model again; a file may be missing"
            )
        if tuple(found[name]) != shape:
            raise InputError(
                f"{name} in {path} has shape {list(found[name])}, and its config says {list(shape)}",
                "config and weights belong to different models; download both again",
            )
    extra = sorted(found.keys() - expected.keys())
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise InputError(
            f"{path} has the tensor {extra[0]}{more}, which its config does not explain",
            "the model differs from its declared architecture; use its original repository",
        )
