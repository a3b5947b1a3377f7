"""Writes a draft head in a layout that other programs read: SafeAILab's, or that of speculators, which vLLM serves.

`treeeagle_edge.checkpoint.head_layouts` reads both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeeagle_edge.checkpoint.head_layouts import LAYER, MIDLAYER, REQUIRED, TAP_KEY
from treeeagle_edge.errors import CannotRunError, InputError, UsageError, reason_of
from treeeagle_edge.head_config import HeadConfig
from treeeagle_edge.model_config import RopeConfig
from treeeagle_edge.training.shards import save_whole

LAYOUTS = ("safeailab", "speculators")
_MAX_POSITION = 2048  # what trainers write into the config; it does not limit the head
_DRAFTED = 3  # tokens that a server drafts in a round unless it is told otherwise
_ROPE_SCALING = {  # key in a config -> field
    "rope_type": "kind",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
    "attention_factor": "attention_factor",
}


def write_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    target_ids: Tensor,
    *,
    layout: str,
    target_name: str,
    dtype: torch.dtype = torch.float16,
    extra: Mapping[str, Any] | None = None,
    default_taps: tuple[int, ...] | None = None,
) -> None:
    """Write `folder`/config.json and model.safetensors, over older ones; each is written whole or not at all.

    tensors: by canonical name (`checkpoint.head_layouts.REQUIRED`, and embed_tokens.weight where
    `config.own_embedding`). dtype: in which they are stored. target_ids: [Vd] int64, strictly increasing ids of the
    target. layout: one of LAYOUTS. target_name: the target's Hugging Face id or folder, which the speculators layout
    names. extra: more keys for the decoder layer's config, such as max_position_embeddings or token ids; it cannot
    replace those that `config` decides. default_taps: the target's; where the head has the same, the SafeAILab layout
    does not name them, as that project's own heads do not.

    Raises UsageError for an unknown layout, InputError for a head that the layout cannot describe, CannotRunError for
    a full disk.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"unknown head layout {layout}", f"one of {', '.join(LAYOUTS)}")
    layer = _layer_config(config, dtype, extra or {})
    if layout == "speculators":
        declared = _speculators_config(config, layer, target_name)
    else:
        declared = _safeailab_config(config, layer, default_taps)
    stored = _stored(config, tensors, target_ids, dtype, MIDLAYER if layout == "safeailab" else LAYER)
    path = folder / "config.json"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(declared, indent=1) + "\n", encoding="utf-8")
        save_whole(stored, folder / "model.safetensors", {"format": "pt"})
        os.replace(unfinished, path)
    except OSError as error:
        raise CannotRunError(
            f"{path} cannot be written: {reason_of(error)}",
            "make room on the disk and run the same command again",
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _layer_config(config: HeadConfig, dtype: torch.dtype, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder layer in the words of a Llama config."""
    return {
        "max_position_embeddings": _MAX_POSITION,
        **extra,
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **({} if config.scaled_rope is None else {"rope_scaling": _rope_scaling(config.scaled_rope)}),
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any]:
    values = {key: getattr(rope, field) for key, field in _ROPE_SCALING.items()}
    return {key: value for key, value in values.items() if value is not None}


def _safeailab_config(
    config: HeadConfig, layer: dict[str, Any], default_taps: tuple[int, ...] | None
) -> dict[str, Any]:
    for flag in ("norm_before_residual", "norm_output"):
        if getattr(config, flag):
            raise InputError(
                f"the safeailab layout has no {flag}", "write the head in the speculators layout"
            )
    declared = {"architectures": ["LlamaForCausalLM"], **layer, "draft_vocab_size": config.draft_vocab_size}
    if config.target_hidden_size != config.hidden_size:
        declared["target_hidden_size"] = config.target_hidden_size
    if config.taps != default_taps:
        declared["eagle_config"] = {TAP_KEY: [tap - 1 for tap in config.taps]}
    return declared


def _speculators_config(config: HeadConfig, layer: dict[str, Any], target_name: str) -> dict[str, Any]:
    """The config as speculators' Eagle3SpeculatorConfig. It states every flag, since readers differ about defaults."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": _DRAFTED, "verifier_accept_k": 1, "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        TAP_KEY: list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
    }


def _stored(
    config: HeadConfig, tensors: Mapping[str, Tensor], target_ids: Tensor, dtype: torch.dtype, layer: str
) -> dict[str, Tensor]:
    """Tensors under the names of the file. Where the draft vocabulary is only a part of the target's, d2t and t2d too.

    d2t: what is added to a draft id to get the target's id. t2d: which of the target's ids have a draft id.
    """
    names = (*REQUIRED, "embed_tokens.weight") if config.own_embedding else REQUIRED
    stored = {}
    for name in names:
        spelt = layer + name.removeprefix(LAYER) if name.startswith(LAYER) else name
        stored[spelt] = tensors[name].detach().to("cpu", dtype).contiguous()
    ids = target_ids.to("cpu", torch.int64)
    if len(ids) < config.vocab_size:
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return stored
