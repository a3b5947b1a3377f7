"""A model's shapes and constants from a GGUF file: its metadata, and its tensor directory where metadata is silent."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from treeeagle_edge.config.architectures import MOST_LAYERS, MOST_WIDTH, SUPPORTED_HINT, gguf_family_of
from treeeagle_edge.config.rope import longest_position, longrope_scale, yarn_scale
from treeeagle_edge.errors import InputError
from treeeagle_edge.gguf_file import GGUFFile
from treeeagle_edge.model_config import BLOCK_BITS, ModelConfig, RopeConfig, StoredBlocks


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Shapes and constants of the model in `file`.

    Raises InputError for an architecture that does not run here (by name), and for missing metadata.
    """
    try:
        return _model_config(file)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file.path} has metadata of the wrong kind: {error}", "take another GGUF file of the model"
        ) from error


def _model_config(file: GGUFFile) -> ModelConfig:
    """See `gguf_model_config`; metadata of the wrong kind raises TypeError or ValueError."""
    family = gguf_family_of(file.architecture, str(file.path))
    if file.get("expert_count", 0):
        raise InputError(
            f"{file.path} is a mixture of {file.get('expert_count')} experts, which is not supported",
            SUPPORTED_HINT,
        )
    hidden, heads, layers = (
        _size(file, key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    head_dim = int(file.get("attention.key_length") or hidden // heads)
    _check_head_dim(file, head_dim)
    rope = _rope(file, head_dim)
    longest = longest_position(rope, _size(file, "context_length"))
    window = file.get("attention.sliding_window")
    scales = _minicpm_scales(file, hidden, layers) if family == "minicpm" else {}
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=_size(file, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_size(file, "attention.head_count_kv") if file.get("attention.head_count_kv") else heads,
        head_dim=head_dim,
        vocab_size=_tensor_shape(file, "token_embd.weight")[0],
        rms_norm_eps=float(file.get("attention.layer_norm_rms_epsilon", 1e-6)),
        max_position=min(longest, int(window)) if window else longest,
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        stored=None,
        blocks=_blocks(file),
        rotation=None,
        **scales,
    )


def _blocks(file: GGUFFile) -> StoredBlocks:
    layers = [t for t in file.tensors.values() if t.name.startswith("blk.") and len(t.shape) == 2]
    weights: Counter[int | None] = Counter()
    for tensor in layers:
        weights[BLOCK_BITS.get(tensor.quant.name)] += math.prod(tensor.shape)
    tables = [file.tensors["token_embd.weight"].quant.name]
    tables.append(file.tensors["output.weight"].quant.name if "output.weight" in file.tensors else tables[0])
    embedding, lm_head = (name if name in BLOCK_BITS else None for name in tables)
    return StoredBlocks(
        tuple((t.quant.name, t.shape[0], t.shape[1]) for t in layers if t.quant.name in BLOCK_BITS),
        weights.most_common(1)[0][0] if weights else None,
        embedding,
        lm_head,
    )


def _size(file: GGUFFile, key: str) -> int:
    """A positive whole number of the metadata; a list of equal numbers (one a layer) counts as one."""
    value: Any = file.get(key)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]
    if isinstance(value, list):
        raise InputError(
            f"{file.path} has layers of different shapes ({key}), which is not supported", SUPPORTED_HINT
        )
    most = MOST_LAYERS if key == "block_count" else MOST_WIDTH
    if not isinstance(value, int) or not 1 <= value <= most:
        said = "does not say" if value is None else f"says {value!r} for"
        raise InputError(
            f"{file.path} {said} {file.architecture}.{key}", "take another GGUF file of the model"
        )
    return value


def _tensor_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise InputError(f"{file.path} has no tensor {name}", "take another GGUF file of the model")
    return tensor.shape


def _check_head_dim(file: GGUFFile, head_dim: int) -> None:
    """Raise InputError unless keys and values have one width, and all of it is rotated."""
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.get(key)
        if value and int(value) != head_dim:
            raise InputError(
                f"{file.path} has {key} {value} beside heads of {head_dim}, which is not supported",
                SUPPORTED_HINT,
            )


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    """The scaling in the metadata, longrope's factors and Llama 3.1's divisors from their tensors."""
    theta = float(file.get("rope.freq_base", 10_000.0))
    kind = str(file.get("rope.scaling.type", "none"))
    declared = _size(file, "context_length")
    original = int(file.get("rope.scaling.original_context_length") or declared)
    short, long = (_vector(file, f"rope_factors_{which}.weight", head_dim) for which in ("short", "long"))
    if short and long:
        scale = declared / original
        attention = file.get("rope.scaling.attn_factor")
        if attention is None:
            attention = longrope_scale(scale, original)
        return RopeConfig(
            theta=theta,
            kind="longrope",
            factor=scale,
            original_max_position=original,
            short_factor=short,
            long_factor=long,
            attention_factor=float(attention),
        )
    divisors = _vector(file, "rope_freqs.weight", head_dim)
    factor = float(file.get("rope.scaling.factor") or file.get("rope.scale_linear") or 1.0)
    if kind == "yarn":
        attention = yarn_scale(factor) * float(file.get("rope.scaling.attn_factor", 1.0))
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            attention_factor=attention,
            freq_divisors=divisors,
        )
    if kind not in ("none", "linear"):
        raise InputError(f"{file.path} uses rope scaling {kind}, which is not supported", SUPPORTED_HINT)
    if factor != 1.0:
        return RopeConfig(theta=theta, kind="linear", factor=factor, freq_divisors=divisors)
    return RopeConfig(theta=theta, freq_divisors=divisors)


def _vector(file: GGUFFile, name: str, head_dim: int) -> tuple[float, ...] | None:
    """The fp32 vector [head_dim / 2] called `name`, or None where the file has none."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.quant != GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise InputError(
            f"{name} in {file.path} is {tensor.quant.name} {list(tensor.shape)}, not F32 [{head_dim // 2}]",
            "take another GGUF file of the model",
        )
    return tuple(file.blocks(name).view(np.float32).ravel().tolist())


def _minicpm_scales(file: GGUFFile, hidden: int, layers: int) -> dict[str, float]:
    """MiniCPM's constants; files older than the keys come from MiniCPM 1 and 2, which share their values."""
    logit = file.get("logit_scale")
    return {
        "embedding_scale": float(file.get("embedding_scale", 12.0)),
        "residual_scale": float(file.get("residual_scale", 1.4 / math.sqrt(layers))),
        "logit_scale": 1.0 / float(logit) if logit else 256.0 / hidden,
    }
