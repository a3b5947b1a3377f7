"""A model's shapes and constants from its config.json or GGUF metadata, without loading tensors or torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeeagle_edge.config.architectures import (
    FAMILIES,
    MOST_LAYERS,
    MOST_WIDTH,
    SUPPORTED_HINT,
    family_of,
    unsupported,
)
from treeeagle_edge.config.quantised import stored_width
from treeeagle_edge.config.rope import longest_position, rope_from_config
from treeeagle_edge.config.rotation import rotation_of
from treeeagle_edge.errors import InputError
from treeeagle_edge.json_file import read_json
from treeeagle_edge.model_config import ModelConfig

# What `transformers` assumes where config.json is silent.
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768, "minicpm": 2048}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_TIED_BY_DEFAULT = {"minicpm"}


def read_config(path: Path) -> ModelConfig:
    """Shapes and constants of the checkpoint at `path`: a Hugging Face directory or a .gguf file.

    Raises InputError for anything that is missing, damaged, or an architecture that does not run here.
    """
    if path.is_dir():
        return model_config_from_json(read_config_json(path), path)
    # gguf is imported for its own files alone
    from treeeagle_edge.config.gguf import gguf_model_config
    from treeeagle_edge.gguf_file import open_gguf

    return gguf_model_config(open_gguf(path))


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json of `directory`. Raises InputError where it is absent, saying what the directory holds."""
    file = directory / "config.json"
    if file.is_file():
        return read_json(file)
    if (directory / "adapter_config.json").is_file():
        base = read_json(directory / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise InputError(
            f"{directory} holds a LoRA adapter, not a whole model",
            f"merge it into {base} first, then give that directory",
        )
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs:
        raise InputError(
            f"{directory} holds no config.json", f"give the GGUF file itself, for example {ggufs[0]}"
        )
    raise InputError(
        f"{directory} holds no config.json",
        "give a Hugging Face model directory with config.json and weights, or a .gguf",
    )


def model_config_from_json(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """`config` is the parsed config.json of the directory `path`, where files beside it may say more of a rotation.

    Raises InputError for an architecture, quantisation or feature that does not run here, and missing keys.
    """
    try:
        return _model_config(config, path)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"config.json of {path} has a value of the wrong kind: {error}", "download the file again"
        ) from error


def _model_config(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """See `model_config_from_json`; values of the wrong kind raise TypeError, ValueError and their like."""
    family = _family(config, path)
    layers = _size(config, "num_hidden_layers", path)
    stored = stored_width(config, layers, path)
    _refuse_unsupported(config, family, path)
    hidden, heads = (_size(config, key, path) for key in ("hidden_size", "num_attention_heads"))
    head_dim = config.get("head_dim") or _DEFAULT_HEAD_DIM.get(family) or hidden // heads
    rope = rope_from_config(config, _max_position(config, family), path)
    bias = bool(config.get("attention_bias", False))
    tied = config.get("tie_word_embeddings")
    scales = _minicpm_scales(config, hidden, layers, path) if family == "minicpm" else {}
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", path),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=int(head_dim),
        vocab_size=_size(config, "vocab_size", path),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=_window(config, family, layers, longest_position(rope, _max_position(config, family))),
        rope=rope,
        tie_word_embeddings=family in _TIED_BY_DEFAULT if tied is None else bool(tied),
        attention_bias=family == "qwen2" or (bias and family != "mistral"),
        output_bias=bias and family in ("llama", "qwen3", "minicpm"),
        qk_norm=family == "qwen3",
        stored=stored,
        blocks=None,
        rotation=rotation_of(config, path),
        **scales,
    )


def _family(config: Mapping[str, Any], path: Path) -> str:
    """The family by `architectures`, or by `model_type` where the former is missing."""
    if config.get("draft_vocab_size") is not None or config.get("speculators_model_type"):
        raise unsupported("EAGLE-3", str(path))
    named = config.get("architectures") or []
    if named:
        return family_of(str(named[0]), str(path))
    model_type = config.get("model_type")
    if model_type in FAMILIES.values():
        return str(model_type)
    if not model_type:
        raise InputError(f"config.json of {path} names no architecture", SUPPORTED_HINT)
    raise unsupported(str(model_type), str(path))


def _refuse_unsupported(config: Mapping[str, Any], family: str, path: Path) -> None:
    """Raise InputError, by name, for what changes the maths and does not run here."""
    if config.get("is_encoder_decoder"):
        raise InputError(f"{path} is an encoder-decoder, which is not supported", SUPPORTED_HINT)
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if experts:
        raise InputError(f"{path} is a mixture of {experts} experts, which is not supported", SUPPORTED_HINT)
    act = config.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise InputError(f"{path} uses the activation {act}, which is not supported", "use a model with silu")
    if config.get("mlp_bias"):
        raise InputError(f"{path} has biases in its MLP (mlp_bias), which are not supported", SUPPORTED_HINT)
    other = set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    if other:
        raise InputError(
            f"{path} has layers of type {', '.join(sorted(other))}, not supported for {family}",
            SUPPORTED_HINT,
        )


def _size(config: Mapping[str, Any], key: str, path: Path) -> int:
    """A positive whole number under `key`."""
    value = config.get(key)
    most = MOST_LAYERS if key == "num_hidden_layers" else MOST_WIDTH
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        said = "does not say" if value is None else f"says {value!r} for"
        raise InputError(
            f"config.json of {path} {said} {key}",
            f"it takes a whole number from 1 to {most:,}; download the file again",
        )
    return value


def _max_position(config: Mapping[str, Any], family: str) -> int:
    """The declared context, before scaling and windows; `max_sequence_length` is Vicuna-16k's word for it."""
    declared = int(config.get("max_position_embeddings") or _DEFAULT_MAX_POSITION[family])
    if declared < 1:
        raise ValueError(f"max_position_embeddings is {declared}")
    return max(declared, int(config.get("max_sequence_length") or 0)) if family == "llama" else declared


def _window(config: Mapping[str, Any], family: str, layers: int, longest: int) -> int:
    """`longest`, capped by a sliding window where a layer has one: up to the window's size, attention is complete."""
    if family == "minicpm":  # block-sparse attention, where switched on, is dense up to dense_len
        dense = (config.get("sparse_config") or {}).get("dense_len")
        return min(longest, int(dense)) if dense else longest
    window = config.get("sliding_window")
    if not window or family == "llama":
        return longest
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return longest
    kinds = config.get("layer_types")
    if kinds:
        sliding = "sliding_attention" in kinds
    else:
        sliding = family == "mistral" or int(config.get("max_window_layers", 28)) < layers
    return min(longest, int(window)) if sliding else longest


def _minicpm_scales(config: Mapping[str, Any], hidden: int, layers: int, path: Path) -> dict[str, float]:
    """MiniCPM's constants (arXiv 2404.06395): on embeddings, on residual branches, before the lm_head."""
    for key in ("scale_emb", "scale_depth", "dim_model_base"):
        if not isinstance(config.get(key), int | float):
            raise InputError(
                f"config.json of {path} does not say {key}", "MiniCPM needs it; download the file again"
            )
    return {
        "embedding_scale": float(config["scale_emb"]),
        "residual_scale": float(config["scale_depth"]) / math.sqrt(layers),
        "logit_scale": float(config["dim_model_base"]) / hidden,
    }
