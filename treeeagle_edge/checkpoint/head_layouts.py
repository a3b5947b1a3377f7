"""How EAGLE-3 heads are spelt on disk, brought to one form: tensors named as speculators does, one flat config.

| | SafeAILab (SafeAILab/EAGLE, arXiv 2503.01840), SpecForge, ModelOpt | speculators (vllm-project/speculators) |
|---|---|---|
| the layer's tensors | `midlayer.*`, of ModelOpt `layers.0.*` | `layers.0.*` |
| its config | flat | under `transformer_layer_config` |
| tapped layers | under `eagle_config`, counted by their output | at the top, counted by their input |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from treeeagle_edge.errors import InputError
from treeeagle_edge.model_config import ModelConfig

LAYER = "layers.0."
MIDLAYER = "midlayer."
TAP_KEY = "eagle_aux_hidden_state_layer_ids"
REQUIRED = (
    "fc.weight",
    "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
)
OPTIONAL = ("d2t", "embed_tokens.weight")
IGNORED = ("t2d", "layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")
NO_HEAD_HINT = "pass --head none to decode plainly, or a head that was trained for this model"

_UNSUPPORTED = {  # what changes a head's arithmetic -> the tensors it comes with
    "norm_before_fc": "input_norm.",
    "fc_norm": "fc_norm.",
    "q_norm": "layers.0.self_attn.q_norm.",
    "k_norm": "layers.0.self_attn.k_norm.",
}


@dataclass(frozen=True)
class CanonicalHead:
    """What the files of a head say, whichever layout they keep to. Shapes are not checked."""

    tensors: Mapping[str, Tensor]  # all of REQUIRED, perhaps some of OPTIONAL and IGNORED
    declared: Mapping[str, Any]  # the config, flat
    taps: tuple[int, ...]  # indices into the target's hidden_states
    notes: tuple[str, ...]


def canonical_head(
    raw: Mapping[str, Tensor], declared: Mapping[str, Any], target: ModelConfig, weights: Path
) -> CanonicalHead:
    """Bring the tensors and the config of a head to one form. `weights` is only named in errors.

    Raises InputError for heads of another kind, and for each part of one that does not run here, by name.
    """
    tensors = {_canonical_name(name): tensor for name, tensor in raw.items()}
    kind = declared.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise InputError(f"{weights.parent} holds a speculator of kind {kind}, not eagle3", NO_HEAD_HINT)
    notes: tuple[str, ...] = ()
    flat = dict(declared)
    if kind is not None:
        layer = flat.pop("transformer_layer_config", None)
        if not isinstance(layer, Mapping):
            raise InputError(
                f"{weights.parent / 'config.json'} lacks transformer_layer_config", "fetch the head again"
            )
        flat = {**flat, **layer}
        if "norm_before_residual" not in flat:
            notes = ("the head does not say norm_before_residual, and readers differ; read as false",)
    elif flat.get("norm_output"):
        notes = (
            "norm_output is read as in EAGLE-3.1; SpecForge's first heads that say it mean plain EAGLE-3",
        )
    _refuse_unsupported(tensors, flat)
    _check_names(tensors, weights)
    return CanonicalHead(tensors, flat, _taps(flat, kind is not None, target), notes)


def _canonical_name(name: str) -> str:
    return LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def _refuse_unsupported(tensors: Mapping[str, Tensor], flat: Mapping[str, Any]) -> None:
    nested = _eagle_config(flat)
    hint = f"without it the head would compute something else; {NO_HEAD_HINT}"
    for flag, prefix in _UNSUPPORTED.items():
        if flat.get(flag) or nested.get(flag) or any(name.startswith(prefix) for name in tensors):
            raise InputError(f"the head needs {flag}, which is not supported", hint)
    if nested.get("use_aux_hidden_state") is False:
        raise InputError(
            "the head reads no tapped layers (use_aux_hidden_state), which is not supported", hint
        )
    if (flat.get("hidden_act") or "silu") != "silu":
        raise InputError(f"the head needs hidden_act {flat['hidden_act']}, which is not supported", hint)


def _eagle_config(flat: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = flat.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def _check_names(tensors: Mapping[str, Tensor], weights: Path) -> None:
    missing = [name for name in REQUIRED if name not in tensors]
    fc = tensors.get("fc.weight")
    # one feature, one embedding
    two_inputs = fc is not None and fc.ndim == 2 and fc.shape[1] == 2 * fc.shape[0]
    if "fc.bias" in tensors or (two_inputs and "layers.0.hidden_norm.weight" in missing):
        raise InputError(
            f"{weights.name} looks like an EAGLE-1 or EAGLE-2 head, which is not supported", NO_HEAD_HINT
        )
    if missing:
        raise InputError(f"{weights} is no EAGLE-3 head: it lacks {', '.join(missing[:4])}", NO_HEAD_HINT)
    known = {*REQUIRED, *OPTIONAL, *IGNORED}
    unknown = sorted(name for name in tensors if name not in known)
    if unknown:
        raise InputError(
            f"the head holds tensors no known layout has: {', '.join(unknown[:8])}",
            "heads of other trainers change the arithmetic silently, so they are refused until supported",
        )


def _taps(flat: Mapping[str, Any], by_input: bool, target: ModelConfig) -> tuple[int, ...]:
    """Indices into hidden_states. `by_input`: ids at the top are such indices already.

    Flat configs with ids at the top exist in both countings; they are taken where both mean the default.
    """
    by_output = _layer_ids(_eagle_config(flat))
    if by_output:
        return tuple(layer + 1 for layer in by_output)
    ids = _layer_ids(flat)
    if by_input and ids:
        return ids
    if ids not in ((), target.default_taps, tuple(tap - 1 for tap in target.default_taps)):
        raise InputError(
            f"the head taps layers {ids}, and its config does not say whether their input or their output",
            f"move {TAP_KEY} under eagle_config, counted by output, in the head's config.json",
        )
    return target.default_taps


def _layer_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    ids = config.get(TAP_KEY) or ()
    if not isinstance(ids, list | tuple) or not all(isinstance(layer, int) for layer in ids):
        raise InputError(
            f"{TAP_KEY} in the head's config is {ids!r}, no list of layers", "fetch the head again"
        )
    return tuple(ids)
